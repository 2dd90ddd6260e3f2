"""Layouts: the table in a payload says what was written, any other model is refused, and the digest stays for ever."""

from collections.abc import Callable

import numpy as np
import pytest

from fedfq import PayloadError, decode
from fedfq.codec.format import layout as layout_module
from fedfq.codec.format.container import parse
from fedfq.codec.format.layout import Spec, digest
from fedfq.codec.format.sections import ZERO
from tests.payloads import write

SINGLE = np.dtype(np.float32)


# --- The table ---------------------------------------------------------------------------------------------


def test_what_the_format_cannot_hold_is_not_written() -> None:
    for spec in (Spec("n" * 4097, (3,), SINGLE), Spec("é" * 2049, (3,), SINGLE), Spec("w", (1,) * 33, SINGLE)):
        with pytest.raises(ValueError, match="does not fit the format"):
            write([spec], [(ZERO, b"")], as_digest=False)
    for spec in (Spec("n" * 4096, (3,), SINGLE), Spec("w", (1,) * 32, SINGLE)):
        assert parse(write([spec], [(ZERO, b"")], as_digest=False), None).layout == [spec]


MODEL = {"a": np.zeros((3, 4), np.float32), "b": np.zeros(5, np.int64)}
DIFFERENT: dict[str, Callable[[], list[Spec]]] = {
    "another name": lambda: [Spec("c", (3, 4), SINGLE), Spec("b", (5,), SINGLE)],
    "another shape": lambda: [Spec("a", (4, 3), SINGLE), Spec("b", (5,), SINGLE)],
    "a tensor less": lambda: [Spec("a", (3, 4), SINGLE)],
    "a tensor more": lambda: [Spec("a", (3, 4), SINGLE), Spec("b", (5,), SINGLE), Spec("c", (), SINGLE)],
    "something huge": lambda: [Spec("a", (3, 4), SINGLE), Spec("b", (2**50,), SINGLE)],
    "nothing": lambda: [],
}


@pytest.mark.parametrize("as_digest", [False, True])
@pytest.mark.parametrize("name", DIFFERENT)
def test_another_layout_than_the_models_is_refused(name: str, as_digest: bool) -> None:
    layout = DIFFERENT[name]()
    payload = write(layout, [(ZERO, b"")] * len(layout), as_digest=as_digest)
    with pytest.raises(PayloadError) as caught:
        decode(payload, like=MODEL)
    assert caught.value.reason == "layout"


def test_too_many_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = [Spec(f"w{k}", (3,), SINGLE) for k in range(11)]
    payload = write(layout, [(ZERO, b"")] * 11, as_digest=False)
    monkeypatch.setattr(layout_module, "MAX_TENSORS", 10)
    with pytest.raises(PayloadError, match="more than 10 tensors"):
        decode(payload)
    with pytest.raises(ValueError, match='use layout="digest"'):
        write(layout, [(ZERO, b"")] * 11, as_digest=False)


# --- The digest --------------------------------------------------------------------------------------------


def test_digest_ignores_order_and_dtype_but_not_names_shapes_and_which_are_floats() -> None:
    single, double = np.dtype(np.float32), np.dtype(np.float64)
    layout = [Spec("a", (3, 4), single), Spec("b", (), single)]
    same = [Spec("b", (), double), Spec("a", (3, 4), np.dtype(np.float16))]
    assert digest(layout) == digest(same) and len(digest(layout)) == 8
    others = [
        [Spec("a", (4, 3), single), Spec("b", (), single)],
        [Spec("a", (3, 4), single), Spec("b", (1,), single)],
        [Spec("a", (3, 4), single), Spec("c", (), single)],
        [Spec("a", (3, 4), single)],
        [Spec("a", (3, 4), single), Spec("b", (), np.dtype(np.int8))],
        [Spec("b", (3, 4), single), Spec("a", (), single)],
        [Spec("a', (3, 4))('b", (), single)],
        [],
    ]
    assert len({digest(layout), *map(digest, others)}) == 1 + len(others)


def test_digest_is_frozen() -> None:
    """Another digest would no longer fit the payloads of older releases."""
    assert (
        digest([Spec("b", (), np.dtype(np.float32)), Spec("a", (3, 4), np.dtype(np.float32))]).hex()
        == "8bc51e844d21253b"
    )
