"""A basis that both sides know: derived alike everywhere, named in the payload, and worth half the bytes."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedfq import Accumulator, Codec, ErrorFeedback, PayloadError, SharedBasis, decode, encode, inspect
from fedfq.metrics import nmse

SHAPES = {"conv": (24, 16, 3, 3), "fc": (60, 200), "bias": (60,)}


def federation(seed: int = 0, clients: int = 1) -> tuple[dict, dict, list[dict]]:
    """An initial model, the model some rounds later, and updates: all of them move in the same few directions."""
    rng = np.random.default_rng(seed)
    initial = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    sources = {name: rng.standard_normal((40, *shape)) for name, shape in SHAPES.items()}

    def move(scale: float) -> dict:
        result = {}
        for name, shape in SHAPES.items():
            if len(shape) == 1:
                result[name] = (scale * rng.standard_normal(shape)).astype(np.float32)
                continue
            rows, columns = shape[0], int(np.prod(shape[1:]))
            left = sources[name][:, :, *(0,) * (len(shape) - 1)].T  # rows x 40
            right = sources[name].reshape(40, rows, columns)[:, 0]  # 40 x columns
            mixed = left @ (0.8 ** np.arange(40)[:, None] * rng.standard_normal((40, 40))) @ right
            noise = rng.standard_normal((rows, columns))
            result[name] = (scale * (mixed + noise)).astype(np.float32).reshape(shape)
        return result

    drift = move(0.05)
    model = {name: initial[name] + drift[name] for name in SHAPES}
    return initial, model, [move(0.01) for _ in range(clients)]


INITIAL, MODEL, (UPDATE, OTHER) = federation(clients=2)
BASIS = SharedBasis(MODEL, INITIAL)


# --- What it is good for -----------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [40, 100])
def test_updates_that_move_as_the_model_did_take_fewer_bytes(ratio: int) -> None:
    shared = encode(UPDATE, ratio=ratio, layout="digest", shared_basis=BASIS)
    adaptive = encode(UPDATE, ratio=ratio, layout="digest")
    assert any(tensor.kind.startswith("shared factors") for tensor in inspect(shared, like=MODEL).tensors)
    assert inspect(shared, like=MODEL).shared_basis == BASIS.digest.hex()
    errors = nmse(UPDATE, decode(shared, like=MODEL, shared_basis=BASIS)), nmse(UPDATE, decode(adaptive, like=MODEL))
    assert errors[0] < 0.75 * errors[1]


@given(st.integers(0, 2**32), st.floats(5, 400), st.booleans())
def test_the_budget_is_kept(seed: int, ratio: float, gain: bool) -> None:
    rng = np.random.default_rng(seed)
    update = {name: value * np.float32(rng.lognormal()) for name, value in UPDATE.items()}
    codec = Codec(ratio=ratio, layout="digest", gain=gain)
    payload = codec.encode(update, shared_basis=BASIS)
    assert len(payload) <= 4 * sum(value.size for value in update.values()) / ratio
    assert payload == codec.encode(update, shared_basis=BASIS)
    decoded = decode(payload, like=MODEL, shared_basis=BASIS)
    assert {name: value.shape for name, value in decoded.items()} == SHAPES


def test_a_useless_basis_costs_only_its_name() -> None:
    """Of another federation: factors do without, and the payload has 8 bytes less for coefficients."""
    useless = SharedBasis(*federation(seed=1)[1::-1])
    with_it = decode(encode(UPDATE, ratio=20, shared_basis=useless), shared_basis=useless)
    assert nmse(UPDATE, with_it) < 1.05 * nmse(UPDATE, decode(encode(UPDATE, ratio=20)))


def test_before_the_model_has_moved_payloads_do_without() -> None:
    basis = SharedBasis(INITIAL, INITIAL)
    payload = encode(UPDATE, ratio=20, shared_basis=basis)
    assert payload == encode(UPDATE, ratio=20)
    assert inspect(payload).shared_basis is None


def test_a_late_joiner_without_the_initial_model_is_understood() -> None:
    """A server that has the basis takes payloads made without it."""
    total = Accumulator(MODEL)
    total.add(encode(UPDATE, ratio=20, shared_basis=BASIS), shared_basis=BASIS)
    total.add(encode(OTHER, ratio=20), shared_basis=BASIS)
    mean = {name: (UPDATE[name] + OTHER[name]) / 2 for name in UPDATE}
    assert nmse(mean, total.mean()) < 0.3


def test_accumulating_equals_decoding() -> None:
    payload = encode(UPDATE, ratio=30, shared_basis=BASIS)
    total = Accumulator(MODEL)
    total.add(payload, 3.0, shared_basis=BASIS)
    for name, value in decode(payload, shared_basis=BASIS).items():
        np.testing.assert_allclose(total.mean()[name], value, atol=1e-6)


def test_error_feedback_remembers_what_was_left_out() -> None:
    memory = ErrorFeedback(Codec(ratio=50))
    decoded = decode(memory.encode(UPDATE, shared_basis=BASIS), shared_basis=BASIS)
    for name, value in memory.residual.items():
        np.testing.assert_allclose(decoded[name] + value, UPDATE[name], atol=1e-6)


# --- The same basis everywhere -----------------------------------------------------------------------------


def test_directions_are_orthonormal_and_the_leading_ones() -> None:
    initial, model, _ = federation()
    drift = (model["fc"] - initial["fc"]).astype(np.float64)
    known = BASIS.used["fc"]
    for side in known.sides:
        np.testing.assert_allclose(side.T @ side, np.eye(side.shape[1]), atol=1e-3)
    best = np.square(np.linalg.svd(drift, compute_uv=False)[:20]).sum()
    assert np.square(drift @ known.right[:, :20]).sum() > 0.97 * best
    assert np.square(known.left[:, :20].T @ drift).sum() > 0.97 * best


def test_a_slightly_different_basis_decodes_to_nearly_the_same() -> None:
    """What another machine derives differs in the last bits: far less than the quantisation does."""
    payload = encode(UPDATE, ratio=20, shared_basis=BASIS)
    rng = np.random.default_rng(4)
    nudged = {n: v + np.float32(1e-7) * v * rng.standard_normal(v.shape).astype(np.float32) for n, v in MODEL.items()}
    other = SharedBasis(nudged, INITIAL)
    assert other.digest != BASIS.digest
    other.digest = BASIS.digest
    one, two = decode(payload, shared_basis=BASIS), decode(payload, shared_basis=other)
    assert nmse(one, two) < 1e-4 * nmse(UPDATE, one)


SCRIPT = """
import numpy as np, sys
from tests.codec.test_shared_basis import BASIS, UPDATE, encode
np.savez(sys.argv[1], payload=np.frombuffer(encode(UPDATE, ratio=20, shared_basis=BASIS), np.uint8),
         digest=np.frombuffer(BASIS.digest, np.uint8), right=BASIS.held["fc"].right, left=BASIS.held["fc"].left)
"""


def test_processes_with_other_numbers_of_threads_derive_the_same(tmp_path) -> None:
    """In BLAS and in our own pool; the payload of one decodes with the basis of the other."""
    found = []
    for threads in ("1", "2"):
        path = tmp_path / f"{threads}.npz"
        environment = os.environ | {"OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads}
        subprocess.run([sys.executable, "-c", SCRIPT, str(path)], check=True, env=environment)
        found.append(dict(np.load(path)))
    one, two = found
    assert bytes(one["digest"]) == bytes(two["digest"]) == BASIS.digest
    for side in ("left", "right"):
        np.testing.assert_allclose(one[side], two[side], atol=1e-4)
    threaded = SharedBasis(MODEL, INITIAL, threads=2)
    decoded = [decode(bytes(one["payload"]), shared_basis=basis) for basis in (BASIS, threaded)]
    assert nmse(*decoded) < 1e-8


# --- Bad input ---------------------------------------------------------------------------------------------


def reason(payload: bytes, **options: object) -> tuple[str, str]:
    with pytest.raises(PayloadError) as caught:
        decode(payload, **options)
    return caught.value.reason, str(caught.value)


def test_another_basis_or_none_is_refused_by_name() -> None:
    payload = encode(UPDATE, ratio=20, shared_basis=BASIS)
    later = SharedBasis({name: value + UPDATE[name] for name, value in MODEL.items()}, INITIAL)
    needed = f"the payload was made with the shared basis {BASIS.digest.hex()}"
    assert reason(payload) == ("basis", f"{needed}: pass shared_basis=")
    why, message = reason(payload, shared_basis=later)
    assert why == "basis" and later.digest.hex() in message and "another round" in message
    total = Accumulator(MODEL)
    with pytest.raises(PayloadError):
        total.add(payload, shared_basis=later)
    assert total.weight == 0.0


def test_a_basis_of_another_model_is_refused() -> None:
    without = {name: value for name, value in UPDATE.items() if name != "bias"}
    with pytest.raises(ValueError, match="another model: it has a tensor 'bias'"):
        encode(without, ratio=20, shared_basis=BASIS)
    with pytest.raises(ValueError, match="'fc' has shape"):
        encode(UPDATE | {"fc": UPDATE["fc"].T}, ratio=20, shared_basis=BASIS)
    with pytest.raises(ValueError, match="lacks the tensor 'more'"):
        encode(UPDATE | {"more": UPDATE["fc"]}, ratio=20, shared_basis=BASIS)
    with pytest.raises(ValueError, match="the initial model is another one"):
        SharedBasis(MODEL, without)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_models_that_are_not_finite_are_refused(value: float) -> None:
    broken = MODEL | {"fc": np.full(SHAPES["fc"], value, np.float32)}
    with pytest.raises(ValueError, match="'fc' .* not finite"):
        SharedBasis(broken, INITIAL)
    with pytest.raises(ValueError, match="'fc' .* not finite"):
        SharedBasis(MODEL, broken)


@pytest.mark.parametrize("options", [{"basis": "identity"}, {"allocator": "cgsa"}, {"rounding": "stochastic"}])
def test_only_the_adaptive_basis_goes_with_it(options: dict) -> None:
    with pytest.raises(ValueError, match='basis="adaptive"'):
        encode(UPDATE, ratio=20, shared_basis=BASIS, **options)


@pytest.mark.parametrize("scale", [1e-38, 1e-35, 1e-10, 1e10, 1e35, 1e37])
def test_drifts_of_any_scale(scale: float) -> None:
    """No warning, no NaN; beyond what products in float32 allow there is no basis, and payloads do without."""
    drift = {name: ((MODEL[name] - INITIAL[name]) * np.float64(scale)).astype(np.float32) for name in SHAPES}
    nothing = {name: np.zeros_like(value) for name, value in drift.items()}
    with np.errstate(all="raise", under="ignore"):
        basis = SharedBasis(drift, nothing)
        decoded = decode(encode(UPDATE, ratio=20, shared_basis=basis), shared_basis=basis)
    assert bool(basis.used) == (1e-30 < scale < 1e30)
    assert nmse(UPDATE, decoded) < 1
