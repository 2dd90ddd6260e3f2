"""The clients that a process plays."""

import subprocess
import sys

WATCHED = """
import sys
from pathlib import Path
from fedfq.codec.cache import KernelCache
from fedfq.federation.config import Config
from fedfq.federation.loop import Federation, run

asked, load, step = [], KernelCache.load_overload, Federation.step

def watched(federation):
    KernelCache.load_overload = lambda self, *rest: asked.append(self._name) or load(self, *rest)
    return step(federation)

Federation.step = watched
sizes = {"rounds": 2, "clients": 4, "per_round": 2, "local_steps": 1}
run(Config.make(task="digits", method="fedfq@64", **sizes), Path(sys.argv[1]))
print(asked)
"""


def test_no_round_waits_for_a_kernel(tmp_path):
    """Or the first method of a comparison would look slower than the others."""
    process = subprocess.run([sys.executable, "-c", WATCHED, tmp_path / "run"], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout == "[]\n"
