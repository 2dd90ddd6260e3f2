"""Payloads of older releases: they decode to the same bits for ever, and the same update still gives them."""

import zlib

import numpy as np
import pytest

from fedfq import PayloadError, decode, encode
from fedfq.codec.format.container import parse
from fedfq.codec.format.sections import SECTIONS
from fedfq.codec.tensors import specs
from tests.fixtures.make import CASES, FOLDER, PRODUCTS
from tests.updates import Array, assert_identical


def expected(case: str) -> dict[str, Array]:
    with np.load(FOLDER / f"{case}.npz", allow_pickle=False) as arrays:
        return dict(arrays)


def test_every_case_has_its_files() -> None:
    assert (
        {path.stem for path in FOLDER.glob("*.fq")}
        == {path.stem for path in FOLDER.glob("*.npz")}
        == set(CASES | PRODUCTS)
    )


@pytest.mark.parametrize("case", CASES)
def test_frozen_payloads_decode_to_the_same_bits(case: str) -> None:
    payload = (FOLDER / f"{case}.fq").read_bytes()
    update, options = CASES[case]
    as_in_update = {name: expected(case)[name] for name in update}  # files of digests have them sorted
    assert_identical(decode(payload, like=update), as_in_update)
    if options.get("layout") == "digest":
        with pytest.raises(PayloadError, match="like="):
            decode(payload)
    else:
        assert_identical(decode(payload), expected(case))


@pytest.mark.parametrize("case", PRODUCTS)
def test_frozen_factors_decode_to_the_same_numbers(case: str) -> None:
    """Known directions, which every machine finds for itself, differ more, and most where the drift was weak."""
    basis = PRODUCTS[case][1].get("shared_basis")
    decoded = decode((FOLDER / f"{case}.fq").read_bytes(), like=PRODUCTS[case][0], shared_basis=basis)
    tolerance = 1e-5 if basis is None else 3e-4
    for name, array in expected(case).items():
        np.testing.assert_allclose(decoded[name], array, rtol=0, atol=tolerance * np.abs(array).max(initial=0))


@pytest.mark.skipif("ng" in zlib.ZLIB_RUNTIME_VERSION, reason="zlib-ng deflates layouts to other bytes")
@pytest.mark.parametrize("case", CASES)
def test_the_same_update_gives_the_frozen_bytes(case: str) -> None:
    update, options = CASES[case]
    assert encode(update, **options) == (FOLDER / f"{case}.fq").read_bytes()


def test_the_cases_hold_every_kind_of_section() -> None:
    kinds = set()
    for case, (update, _) in (CASES | PRODUCTS).items():
        parsed = parse((FOLDER / f"{case}.fq").read_bytes(), specs(update))
        kinds |= {section.kind for section in parsed.sections.values()}
    assert kinds == set(SECTIONS)
