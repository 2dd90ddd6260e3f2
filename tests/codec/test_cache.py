"""Compiled code on disk: kept where it is safe, never stale, and not in the way."""

import ctypes
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numba
import pytest
from numba.core.caching import FunctionCache

import fedfq
from fedfq.codec import cache

PACKAGE = Path(fedfq.__file__).parent
SMALL = """
from fedfq.codec.kernels import kernel
@kernel
def twice(x):
    return x + x
print(*(twice(kind(21)) for kind in ({types})))
"""
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1  # of <linux/prctl.h> and <linux/capability.h>


def obey_modes():
    """Before a process of root begins: let it not write what may not be written."""
    if os.getuid() == 0:
        assert ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0) == 0


def start(code, package=PACKAGE, **variables):
    environment = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    environment |= {"PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"} | variables
    command = [sys.executable, "-c", code]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, preexec_fn=obey_modes, **pipes)


def run(code, package=PACKAGE, **variables):
    """What a new process prints, and what it says."""
    process = start(code, package, **variables)
    out, said = process.communicate()
    assert process.returncode == 0, said
    return out.strip(), said


def twice(package=PACKAGE, types="int, float", **variables):
    """A small kernel in a new process: what the process says."""
    out, said = run(SMALL.format(types=types), package, **variables)
    assert out == "42 42.0"
    return said


@pytest.fixture
def package(tmp_path):
    """A copy of the package that has never been used."""
    ignored = shutil.ignore_patterns("__pycache__")
    return shutil.copytree(PACKAGE, tmp_path / "installed" / "fedfq", ignore=ignored)


@pytest.fixture
def nowhere(tmp_path):
    """Variables under which neither a home nor a folder for temporary files can be used."""
    (tmp_path / "file").write_text("")
    inside_a_file = str(tmp_path / "file" / "none")
    return {"HOME": inside_a_file, "XDG_CACHE_HOME": inside_a_file, "TMPDIR": inside_a_file}


def protect(package):
    for folder in (package, *package.rglob("*")):
        folder.chmod(0o555 if folder.is_dir() else 0o444)


# Once


def test_what_is_compiled_is_said_once_and_kept(package):
    said = twice(package)
    assert (
        said.startswith("fedfq compiles what was not used here before: up to 15 s; kept in ") and said.count("\n") == 1
    )
    assert str(package / "codec" / "__pycache__") in said
    assert twice(package) == ""


def test_the_user_chooses_the_folder(package, tmp_path):
    assert f"kept in {tmp_path / 'chosen' / 'deep'}/" in twice(
        package, NUMBA_CACHE_DIR=str(tmp_path / "chosen" / "deep")
    )
    assert twice(package, NUMBA_CACHE_DIR=str(tmp_path / "chosen" / "deep")) == ""
    assert not (package / "codec" / "__pycache__").exists()


def test_processes_that_compile_at_once_do_not_disturb_each_other(tmp_path):
    pairs = ["int, float", "float, int", "bool, int", "complex, float", "int, complex", "float, complex"]
    processes = [start(SMALL.format(types=pair), NUMBA_CACHE_DIR=str(tmp_path)) for pair in pairs]
    results = [process.communicate()[0].split() for process in processes]
    assert results[:3] == [["42", "42.0"], ["42.0", "42"], ["2", "42"]]
    assert results[3:] == [["(42+0j)", "42.0"], ["42", "(42+0j)"], ["42.0", "(42+0j)"]]
    assert run(SMALL.format(types="bool, int, float, complex"), NUMBA_CACHE_DIR=str(tmp_path)) == (
        "2 42 42.0 (42+0j)",
        "",
    )


def test_functions_of_others_are_left_to_numba(tmp_path, monkeypatch):
    (tmp_path / "other_package.py").write_text("import numba\n@numba.njit(cache=True)\ndef one():\n    return 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import other_package

    assert type(other_package.one._cache) is FunctionCache
    assert other_package.one() == 1 and list((tmp_path / "__pycache__").glob("*.nbi"))


# Where nothing can be written


def test_a_package_that_cannot_be_written_uses_the_cache_of_the_user(package, nowhere, tmp_path):
    protect(package)
    usable = nowhere | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    said = twice(package, **usable)
    assert f"kept in {tmp_path / 'cache' / 'fedfq'}/" in said and said.count("\n") == 1
    assert twice(package, **usable) == ""


def test_without_a_home_there_is_the_folder_of_temporary_files(package, nowhere, tmp_path):
    protect(package)
    (tmp_path / "temporary").mkdir()
    usable = nowhere | {"TMPDIR": str(tmp_path / "temporary")}
    assert f"kept in {tmp_path / 'temporary'}/fedfq-{os.getuid()}/" in twice(package, **usable)
    assert twice(package, **usable) == ""


def test_without_any_folder_it_works_all_the_same(package, nowhere):
    protect(package)
    for _ in range(2):
        said = twice(package, **nowhere)
        assert said.startswith("fedfq compiles: up to 15 s, in every process, as no folder can keep it (")
        assert "Permission denied" in said and "Not a directory" in said and said.count("\n") == 1


def test_code_that_was_compiled_before_a_package_was_protected_is_used(package, nowhere):
    """As in the image of a container."""
    twice(package)
    protect(package)
    assert twice(package, **nowhere) == ""


def test_a_folder_that_vanishes_costs_nothing_but_time(tmp_path):
    code = SMALL.format(types="int, float").replace(
        "print", f"twice(1); import shutil; shutil.rmtree({str(tmp_path / 'cache')!r})\nprint"
    )
    out, said = run(code, NUMBA_CACHE_DIR=str(tmp_path / "cache"))
    assert out == "42 42.0" and "cannot be kept" in said and said.count("\n") == 2


# Never the wrong code


def test_a_kernel_is_compiled_again_when_one_that_it_calls_changes(package):
    code = (
        "import numpy as np\nfrom fedfq.codec.format.directions import _fill_with_random_numbers\n"
        "found = np.zeros((1, 2)); _fill_with_random_numbers(np.uint64(1), found); print(*found[0])"
    )
    first = run(code, package)[0]
    assert run(code, package) == (first, "")
    path = package / "codec" / "format" / "random_numbers.py"
    before, status = path.read_text(), path.stat()
    returned = before[before.index("def uniform(") :].split("return ", 1)[1].split("\n", 1)[0]
    path.write_text(before.replace(f"return {returned}", "return 0.75".ljust(len(returned) + 7)))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_size == status.st_size
    assert run(code, package)[0] == "0.5 0.5"
    path.write_text(before)
    assert run(code, package) == (first, "")


def test_kernels_are_where_changes_are_seen():
    using = [path for path in PACKAGE.rglob("*.py") if "@kernel\n" in path.read_text()]
    assert using and set(using) <= set(cache._sources())


def test_code_that_checks_indices_is_kept_apart(monkeypatch):
    usual = cache._digest.__wrapped__()
    monkeypatch.setattr(numba.config, "BOUNDSCHECK", 1)
    assert cache._digest.__wrapped__() != usual


def test_a_damaged_file_counts_as_absent(tmp_path):
    twice(NUMBA_CACHE_DIR=str(tmp_path))
    for place, path in enumerate(tmp_path.glob("*/*")):
        content = path.read_bytes()
        path.write_bytes(content[:-1] if place else content[:-1] + bytes([content[-1] ^ 1]))
    assert twice(NUMBA_CACHE_DIR=str(tmp_path)).startswith("fedfq compiles")
    assert twice(NUMBA_CACHE_DIR=str(tmp_path)) == ""


# Nobody else's code


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_folder_that_others_may_write_is_refused(tmp_path, package, mode):
    shared = tmp_path / "shared"
    twice(package, NUMBA_CACHE_DIR=str(shared))
    (folder,) = shared.iterdir()
    folder.chmod(mode)
    said = twice(package, NUMBA_CACHE_DIR=str(shared))
    assert f"(not in {shared}: others may write {folder})" in said
    assert f"kept in {package / 'codec' / '__pycache__'}/" in said


def test_so_is_one_below_it_unless_nobody_can_rename_there(tmp_path):
    folder = tmp_path / "open" / "mine"
    folder.mkdir(parents=True)
    folder.parent.chmod(0o777)
    assert cache._distrust(folder, all_above=True) == f"others may write {folder.parent}"
    folder.parent.chmod(0o1777)
    assert cache._distrust(folder, all_above=True) is None


def test_what_belongs_to_somebody_else_is_not_safe():
    def status(owner, mode=0o100644):
        return os.stat_result((mode, 0, 0, 1, owner, 0, 0, 0, 0, 0))

    assert cache._is_safe(status(0)) and cache._is_safe(status(os.getuid()))
    assert not cache._is_safe(status(os.getuid() + 12345))
    assert not cache._is_safe(status(0, 0o100664)) and not cache._is_safe(status(0, 0o100646))


def test_a_file_that_others_may_write_is_not_read(tmp_path):
    twice(NUMBA_CACHE_DIR=str(tmp_path))
    for path in tmp_path.glob("*/*"):
        assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        path.chmod(0o666)
    assert twice(NUMBA_CACHE_DIR=str(tmp_path)).startswith("fedfq compiles")


def test_a_generous_mask_opens_nothing(tmp_path):
    old = os.umask(0)
    try:
        twice(NUMBA_CACHE_DIR=str(tmp_path / "one" / "two"))
    finally:
        os.umask(old)
    for path in (tmp_path / "one", *(tmp_path / "one").rglob("*")):
        assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    assert twice(NUMBA_CACHE_DIR=str(tmp_path / "one" / "two")) == ""


# Not too much


def test_only_some_old_folders_stay(tmp_path):
    for age in range(10):
        (tmp_path / f"kernels-{age}").mkdir()
        os.utime(tmp_path / f"kernels-{age}", (1000 - age, 1000 - age))
    (tmp_path / "other").mkdir()
    cache._remove_old(tmp_path)
    kept = {f"kernels-{age}" for age in range(cache.KEPT_FOLDERS + 1)}
    assert {path.name for path in tmp_path.iterdir()} == kept | {"other"}


def test_a_link_to_nowhere_is_passed_over(package, nowhere, tmp_path):
    """In a folder that all may write, anybody could have put it there."""
    protect(package)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    temporary.chmod(0o1777)
    (temporary / f"fedfq-{os.getuid()}").symlink_to(tmp_path / "missing" / "evil")
    said = twice(package, **nowhere | {"TMPDIR": str(temporary)})
    assert "as no folder can keep it" in said


def test_a_folder_that_another_process_removes_is_no_error(tmp_path, monkeypatch):
    for number in range(10):
        (tmp_path / f"{cache.PREFIX}{number}").mkdir()
    lstat = Path.lstat

    def vanish(path):
        shutil.rmtree(path)
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", vanish)
    cache._remove_old(tmp_path)
