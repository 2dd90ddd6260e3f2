"""The frozen payloads, decoded by a decoder that was written from the specification alone."""

from typing import Any

import numpy as np
import pytest

from tests.fixtures.make import CASES, FOLDER, PRODUCTS, floats, moved
from tests.independent import decode

NAMES = sorted(path.stem for path in FOLDER.glob("*.fq"))

SEEDS = {  # that `basis` of the fixtures was called with
    "shared-both": (30, 40),
    "shared-and-plain": (30, 40),
    "shared-right": (50, 40),
    "shared-right-and-plain": (50, 40),
    "shared-left": (30, 60),
    "shared-left-and-plain": (30, 60),
    "shared-sketch": (30, 40),
}


def drift(left: int, right: int) -> dict[str, np.ndarray[Any, Any]]:
    """Current - initial model of `basis(left, right)`."""
    columns = [floats(64, 1, seed=left + k) @ floats(1, 48, seed=right + k) for k in range(2)]
    return {"w": columns[0] / 2 + columns[1]}


def test_every_case_has_a_payload() -> None:
    assert sorted(CASES | PRODUCTS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_decodes_as_the_specification_says(name: str) -> None:
    update, options = (CASES | PRODUCTS)[name]
    shared = name.startswith("shared-")
    decoded = decode(
        (FOLDER / f"{name}.fq").read_bytes(),
        like=update if options.get("layout") == "digest" else None,
        drift=moved() if name == "shared-sketch-stretched" else drift(*SEEDS[name]) if shared else None,
    )
    with np.load(FOLDER / f"{name}.npz") as expected:
        assert sorted(decoded) == sorted(expected.files)
        for key in expected.files:
            assert decoded[key].dtype == expected[key].dtype
            assert decoded[key].shape == expected[key].shape
            if shared:
                error = np.abs(decoded[key].astype(np.float64) - expected[key]).max()
                assert error <= 1e-4 * np.abs(expected[key]).max()
            else:
                assert decoded[key].tobytes() == expected[key].tobytes()
