"""The same payload decodes to the same bits on every machine, with any number of threads.

Replicas of a model depend on it: a server must know to the last bit what its clients hold. Other processors are
played by the compiler and by OpenBLAS, which are told to be on one.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fedfq import decode, encode, inspect
from tests.fixtures.make import CASES, FOLDER, PRODUCTS
from tests.updates import low_rank, network, scaled

PROCESSORS = {  # what the compiler takes the processor for, and what OpenBLAS does
    "1999": ("generic", "-sse3,-ssse3,-sse4.1,-sse4.2,-avx,-avx2,-fma", "Prescott"),
    "2013": ("haswell", "+avx2,+fma", "Haswell"),
}

DECODE = """
import sys
from pathlib import Path
import numpy as np
from fedfq import decode

for path in Path(sys.argv[1]).glob("*.fq"):
    expected = dict(np.load(path.with_suffix(".npz")))
    for threads in (1, 2):
        decoded = decode(path.read_bytes(), like=expected, threads=threads)
        for name, array in expected.items():
            assert decoded[name].tobytes() == array.tobytes(), (path.name, name, threads)
print("the same bits")
"""


@pytest.fixture
def payloads(tmp_path: Path) -> Path:
    """Payloads of all kinds and what this machine makes of them."""
    matrix = low_rank(200, 150, 5, noise=0.1)  # (out a) x (in b)
    kernel = np.ascontiguousarray(matrix.reshape(40, 5, 30, 5).transpose(0, 2, 1, 3))
    updates = {
        "many-ranks": ({"w": low_rank(300, 500, 60, noise=0.5)}, {"ratio": 8}),
        "kernels": ({"w": kernel}, {"ratio": 50, "gain": True}),
        "levels-near-the-limit": ({"w": 1e4 * low_rank(64, 64, 3)}, {"step": 100.0}),
        "network": (network() | {"rows": scaled(200, 300)}, {"ratio": 30}),
    }
    for name, (update, options) in updates.items():
        payload = encode(update, **options)
        (tmp_path / f"{name}.fq").write_bytes(payload)
        np.savez(tmp_path / f"{name}.npz", **decode(payload))
    ranks = [max(t.rank for t in inspect((tmp_path / f"{name}.fq").read_bytes()).tensors) for name in updates]
    assert ranks[0] > 16 and ranks[1] and ranks[2]
    for case in (
        *CASES,
        *(
            name
            for name in PRODUCTS
            if name.startswith("factors") or name in ("sketch", "sketch-digest", "sketch-alone")
        ),
    ):
        for suffix in (".fq", ".npz"):
            (tmp_path / (case + suffix)).write_bytes((FOLDER / (case + suffix)).read_bytes())
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("processor", PROCESSORS)
def test_other_processors_decode_the_same_bits(payloads: Path, processor: str) -> None:
    compiler, features, blas = PROCESSORS[processor]
    environment = os.environ | {
        "NUMBA_CPU_NAME": compiler,
        "NUMBA_CPU_FEATURES": features,
        "OPENBLAS_CORETYPE": blas,
        "NUMBA_CACHE_DIR": str(payloads / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", DECODE, str(payloads)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "the same bits" in done.stdout, done.stderr
