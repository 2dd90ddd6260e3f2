"""What a stranger gets: the wheel in an empty environment, with the newest of every core dependency and no extra.

Needs the package registry, as `make setup` does. Nothing of constraints.txt is used: what breaks with a new release of
a dependency should break here, before it does so for users.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path

import numpy as np
import pytest

import fedfq

ROOT = Path(__file__).parents[1]
HIDDEN = ("PYTHONPATH", "PIP_CONSTRAINT", "NUMBA_CACHE_DIR")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """The folder of the new environment's commands."""
    dist, home = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("home")
    checked(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", dist, cwd=ROOT)
    [wheel] = dist.glob("*.whl")
    venv.create(home, with_pip=False)  # ours installs into it: bringing a pip would take seconds
    scripts = home / ("Scripts" if os.name == "nt" else "bin")
    checked(
        sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", scripts / "python", "install", wheel
    )
    return scripts


def called(*command, cwd):
    environment = {name: value for name, value in os.environ.items() if name not in HIDDEN}
    return subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, env=environment)


def checked(*command, cwd="."):
    result = called(*command, cwd=cwd)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_command_works_with_core_dependencies_alone(scripts, tmp_path):
    rng = np.random.default_rng(0)  # a small update of rank 2: kernels compile once, and there is little else to do
    update = {"w": (1e-3 * rng.standard_normal((64, 2)) @ rng.standard_normal((2, 64))).astype("f4")}
    np.savez(tmp_path / "update.npz", **update)
    assert "encode" in checked(scripts / "fedfq", "--help", cwd=tmp_path)
    checked(scripts / "fedfq", "encode", "update.npz", "update.fq", "--ratio", 16, cwd=tmp_path)
    payload = (tmp_path / "update.fq").read_bytes()
    assert len(payload) <= 16_384 / 16
    assert "total (16" in checked(scripts / "fedfq", "inspect", "update.fq", cwd=tmp_path)
    checked(scripts / "python", "-m", "fedfq", "decode", "update.fq", "back.npz", cwd=tmp_path)
    with np.load(tmp_path / "back.npz") as back:
        np.testing.assert_array_equal(back["w"], fedfq.decode(payload)["w"])
        np.testing.assert_allclose(back["w"], update["w"], atol=1e-4)


def test_options_without_effect_are_refused_there_too(scripts, tmp_path):
    for arguments, message in (
        (("plan", "--parameters", 1_000_000, "--scale", "--clients", 8), "--clients does not go with --scale"),
        (("reproduce", "table1", "--clients", 8), "--clients does not go with table1"),
        (("run",), "this needs torch, which is not installed: pip install 'fedfq[sim]'"),
    ):
        result = called(scripts / "fedfq", *arguments, cwd=tmp_path)
        assert (result.returncode, result.stdout, result.stderr) == (2, "", f"fedfq: {message}\n")


def test_python_m_is_the_same_command(scripts, tmp_path):
    for arguments in (("--version",), ("methods",), ("run", "--help")):
        by_module = checked(scripts / "python", "-m", "fedfq", *arguments, cwd=tmp_path)
        assert by_module == checked(scripts / "fedfq", *arguments, cwd=tmp_path)
    assert "Usage: fedfq run" in by_module
