"""`fedfq encode`, `decode` and `inspect`: files in, files out, one line when something is wrong."""

import json
import os
import re

import numpy as np
import pytest
import torch
from safetensors.torch import save_file as save_torch

import fedfq
from fedfq.cli.codec import format_shape
from fedfq.files import read_tensors, write_tensors
from fedfq.tasks import models
from tests.cli.runner import ok, refused, run, shell


def an_update(seed=0):
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.normal(size=(200, 1)))
    return {
        "fc.weight": (scale * rng.laplace(size=(200, 100))).astype(np.float32),
        "fc.bias": rng.normal(size=200).astype(np.float32),
    }


def a_checkpoint(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "conv.weight": rng.normal(size=(16, 3, 3, 3)).astype(np.float32),
        "fc.weight": rng.normal(size=(100, 80)).astype(np.float32),
        "half": rng.normal(size=(40, 10)).astype(np.float16),
        "bn.running_var": 1 + rng.random(16).astype(np.float32),
        "bn.num_batches_tracked": rng.integers(0, 1000, ()),
        "mask": rng.random(9) > 0.5,
        "bytes": rng.integers(0, 256, 5).astype(np.uint8),
        "wraps": np.array(100 - 200 * seed, np.int8),
    }


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with an update and two checkpoints."""
    monkeypatch.chdir(tmp_path)
    write_tensors("update.npz", an_update())
    write_tensors("update.safetensors", an_update())
    write_tensors("old.safetensors", a_checkpoint(0))
    write_tensors("new.npz", a_checkpoint(1))
    return tmp_path


@pytest.fixture
def payload(folder):
    ok("encode", "update.npz", "update.fq")
    return folder / "update.fq"


# encode and decode


@pytest.mark.parametrize("source", ["update.npz", "update.safetensors"])
@pytest.mark.parametrize("target", ["back.npz", "back.safetensors"])
def test_round_trip_through_files(folder, source, target):
    ok("encode", source, "update.fq", "--ratio", 16)
    data = (folder / "update.fq").read_bytes()
    assert len(data) <= 4 * 20_200 / 16
    assert "2 tensors, 20,200 parameters" in ok("decode", "update.fq", target)
    expected = fedfq.decode(data)
    back = read_tensors(target)
    assert back.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(back[name], array)


def test_the_default_is_that_of_the_codec(folder):
    ok("encode", "update.npz", "update.fq")
    assert (folder / "update.fq").read_bytes() == fedfq.encode(read_tensors("update.npz"))
    assert "--ratio 256 if none" in ok("encode", "--help")


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (("--bits-per-parameter", 0.8), {"bits_per_parameter": 0.8}),
        (("--max-bytes", 900), {"max_bytes": 900}),
        (("--step", 0.5), {"step": 0.5}),
        (("--ratio", 9, "--keep", "*bias", "--keep", "x"), {"ratio": 9, "keep": ("*bias", "x")}),
        (("--layout", "digest", "--threads", 2), {"layout": "digest"}),
        (("--claimed-ratio", 32, "--allocator", "exact"), {"claimed_ratio": 32, "allocator": "exact"}),
        (("--ratio", 20, "--allocator", "cgsa", "--seed", 3), {"ratio": 20, "allocator": "cgsa", "seed": 3}),
        (("--step", 2, "--rounding", "stochastic", "--seed", 5), {"step": 2, "rounding": "stochastic", "seed": 5}),
        (("--ratio", 20, "--gain", "--basis", "identity"), {"ratio": 20, "gain": "full", "basis": "identity"}),
        (("--ratio", 20, "--norm-gain"), {"ratio": 20, "gain": "norm"}),
        (("--ratio", 20, "--no-gain"), {"ratio": 20, "gain": "none"}),
    ],
    ids=lambda value: None if isinstance(value, dict) else value[0],
)
def test_options_reach_the_codec(folder, arguments, options):
    ok("encode", "update.npz", "update.fq", *arguments)
    assert (folder / "update.fq").read_bytes() == fedfq.encode(read_tensors("update.npz"), **options)


def test_encode_says_what_was_won_and_lost(folder):
    line = ok("encode", "update.npz", "update.fq", "--ratio", 20)
    data = (folder / "update.fq").read_bytes()
    update, back = an_update(), fedfq.decode(data)
    error = sum(np.sum((update[name] - back[name]) ** 2) for name in update)
    nmse = error / sum(np.sum(array**2) for array in update.values())
    assert line.count("\n") == 1
    assert f"update.fq: {len(data):,} bytes instead of 80,800 ({80_800 / len(data):.1f}x)" in line
    assert float(re.search(r"NMSE ([\d.e-]+)", line)[1]) == pytest.approx(nmse, rel=0.01)


def test_the_error_shown_is_that_of_quantised_tensors(folder):
    tensors = an_update() | {"bn.running_var": np.full(10, 1e4, np.float32), "count": np.array(10**6)}
    write_tensors("bn.npz", tensors)
    line = ok("encode", "bn.npz", "bn.fq")
    assert float(re.search(r"NMSE ([\d.e-]+)", line)[1]) > 0.01


def test_an_update_of_nothing_but_zeros(folder):
    write_tensors("zero.npz", {"w": np.zeros((60, 60), np.float32)})
    assert "NMSE 0," in ok("encode", "zero.npz", "zero.fq")
    ok("decode", "zero.fq", "back.npz")
    assert not read_tensors("back.npz")["w"].any()


# Checkpoints


def test_a_checkpoint_in_the_place_of_an_update_is_warned_of(folder):
    torch.manual_seed(0)
    save_torch(models.digits_cnn().state_dict(), "model.safetensors")
    warned = run("encode", "model.safetensors", "x.fq")
    assert warned.exit_code == 0 and (folder / "x.fq").exists()
    [line] = [line for line in warned.stderr.splitlines() if not line.startswith("compiling")]
    assert line.startswith("fedfq: warning: model.safetensors looks like a checkpoint") and "--base" in line
    write_tensors("small.npz", {name: np.float32(0.001) * array for name, array in an_update().items()})
    for fine in (("small.npz", "x.fq"), ("new.npz", "x.fq", "--base", "old.safetensors", "--ratio", 10)):
        assert "warning" not in run("encode", *fine).stderr


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("layout", ["full", "digest"])
def test_checkpoint_to_payload_to_checkpoint(folder, layout):
    ok("encode", "new.npz", "d.fq", "--base", "old.safetensors", "--step", 1e-3, "--layout", layout)
    ok("decode", "d.fq", "back.safetensors", "--base", "old.safetensors")
    back, new = read_tensors("back.safetensors"), a_checkpoint(1)
    assert back.keys() == new.keys()
    for name, array in new.items():
        assert back[name].dtype == array.dtype and back[name].shape == array.shape
        if array.dtype.kind == "f":
            np.testing.assert_allclose(back[name], array, atol=5e-3)
        else:
            np.testing.assert_array_equal(back[name], array)


def test_bfloat16_checkpoints(folder):
    old = {"w": torch.randn(50, 40), "steps": torch.tensor(5)}
    new = {"w": old["w"] + 0.1 * torch.randn(50, 40), "steps": torch.tensor(15)}
    for name, model in (("o", old), ("n", new)):
        save_torch(model | {"w": model["w"].to(torch.bfloat16)}, f"{name}.safetensors")
    ok("encode", "n.safetensors", "d.fq", "--base", "o.safetensors", "--step", 1e-3)
    ok("decode", "d.fq", "back.npz", "--base", "o.safetensors")
    back = read_tensors("back.npz")
    assert back["w"].dtype == np.float32 and back["steps"] == 15
    np.testing.assert_allclose(back["w"], new["w"].to(torch.bfloat16).float().numpy(), atol=2e-3)


@pytest.mark.parametrize("option", ["--like", "--base"])
def test_an_update_that_does_not_fit_the_model(folder, payload, option):
    message = refused("decode", "update.fq", "back.npz", option, "old.safetensors")
    assert "update.fq: tensor 'fc.weight' has shape (200, 100), the model's is (100, 80)" in message
    assert not (folder / "back.npz").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"more": np.zeros(3)}, "other.npz has, and the input lacks, the tensor 'more'"),
        ({"mask": None}, "other.npz lacks the tensor 'mask'"),
        ({"half": np.zeros((10, 40), np.float16)}, "tensor 'half' has shape (40, 10), in other.npz (10, 40)"),
        ({"mask": np.zeros(9, np.uint8)}, "tensor 'mask' has dtype bool, in other.npz uint8"),
    ],
    ids=["more", "less", "shape", "dtype"],
)
def test_a_base_that_does_not_fit(folder, change, message):
    other = {name: array for name, array in (a_checkpoint(0) | change).items() if array is not None}
    write_tensors("other.npz", other)
    assert message in refused("encode", "new.npz", "d.fq", "--base", "other.npz")
    assert not (folder / "d.fq").exists()


def test_a_sum_beyond_the_dtype_is_refused(folder):
    write_tensors("large.npz", {"w": np.full(300, 6e4, np.float16)})
    write_tensors("update.npz", {"w": np.full(300, 6e4, np.float16)})
    ok("encode", "update.npz", "d.fq", "--step", 100)
    assert "tensor 'w': the sum does not fit into float16" in refused("decode", "d.fq", "b.npz", "--base", "large.npz")


# inspect


def test_inspect_shows_every_tensor(folder):
    ok("encode", "new.npz", "d.fq", "--ratio", 10)
    report = fedfq.inspect((folder / "d.fq").read_bytes())
    table = ok("inspect", "d.fq")
    for tensor in report.tensors:
        row = next(line for line in table.splitlines() if line.startswith(tensor.name))
        assert row.split(None, 3)[1:3] == [format_shape(tensor.shape), tensor.dtype]
        small = tensor.kind.startswith("small")  # these share their bytes
        assert row.split(None, 3)[3].startswith(tensor.kind) and row.rstrip().endswith(tensor.kind) == small
        assert small or row.split()[-1] == f"{tensor.nonzeros:,}"
    last = table.splitlines()[-1]
    assert last.startswith(f"total ({report.ratio:.1f}x)") and f"{report.bytes:,} 100.0%" in last


def test_inspect_as_json(folder):
    ok("encode", "new.npz", "d.fq", "--layout", "digest", "--ratio", 10)
    assert "digest" in refused("inspect", "d.fq", "--json")
    shown = json.loads(ok("inspect", "d.fq", "--like", "old.safetensors", "--json"))
    assert shown["bytes"] == os.path.getsize("d.fq")
    tensors = sum(tensor["bytes"] for tensor in shown["tensors"])
    assert shown["bytes"] == shown["header_bytes"] + shown["small_bytes"] + tensors
    assert {tensor["name"] for tensor in shown["tensors"]} == set(a_checkpoint())


def test_names_cannot_write_to_the_terminal(folder):
    data = fedfq.encode({"\x1b[2Jgone": np.ones(3), "[red]:smile:": np.ones(3)}, step=1)
    (folder / "d.fq").write_bytes(data)
    table = ok("inspect", "d.fq")
    assert "\x1b" not in table and "x1b[2Jgone" in table and "[red]:smile:" in table


# Whatever is wrong: one line, exit code 2, nothing written


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing.npz", "out.fq"), "missing.npz: No such file"),
        (("model.pt", "out.fq"), "model.pt: a file of tensors is named .safetensors or .npz"),
        ((".", "out.fq"), "."),
        (("nan.npz", "out.fq"), "nan.npz: tensor 'w' has entries that are not finite"),
        (("objects.npz", "out.fq"), "objects.npz: tensor 'w': it holds Python objects"),
        (("text.npz", "out.fq"), "text.npz: not a readable .npz file"),
        (("strings.npz", "out.fq"), "strings.npz: tensor 'w' has dtype"),
        (("update.npz", "out.fq", "--max-bytes", 10), "a budget of 10 bytes is too small"),
        (("update.npz", "out.fq", "--ratio", 8, "--step", 1), "give one size, not --ratio and --step"),
        (("update.npz", "out.fq", "--ratio", 0.5), "ratio must be at least 1 and finite, got 0.5"),
        (("update.npz", "out.fq", "--threads", 0), "threads must be"),
        (("update.npz", "out.fq", "--claimed-ratio", 32), "claimed_ratio="),
        (("update.npz", "out.fq", "--base", "missing.npz"), "missing.npz: No such file"),
        (("update.npz", "no/out.fq"), "no/out.fq: No such file or directory"),
        (("update.npz", "update.npz"), "update.npz: a payload is no file of tensors"),
        (("update.npz", "new.npz"), "new.npz: a payload is no file of tensors"),
        (("update.npz", "."), "not a regular file"),
    ],
)
def test_encode_refuses(folder, arguments, message):
    np.savez("nan.npz", w=np.array([1, np.nan]))
    np.savez("objects.npz", w=np.array([{}], object))
    np.savez("strings.npz", w=np.array(["text"]))
    (folder / "text.npz").write_text("text")
    (folder / "model.pt").write_bytes(b"")
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert message in refused("encode", *arguments)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing.fq", "out.npz"), "missing.fq: No such file"),
        (("truncated.fq", "out.npz"), "truncated.fq: the payload is damaged"),
        (("empty.fq", "out.npz"), "empty.fq: "),
        (("text.fq", "out.npz"), "text.fq: this is not a fedfq payload"),
        (("update.npz", "out.npz"), "update.npz: this is not a fedfq payload"),
        (("update.fq", "out.pt"), "out.pt: a file of tensors is named .safetensors or .npz"),
        (("update.fq", "no/out.npz"), "no/out.npz: No such file or directory"),
        (("update.fq", "out.npz", "--like", "missing.npz"), "missing.npz: No such file"),
        (("update.fq", "update.npz", "--base", "update.npz"), "update.npz: the output would overwrite an input"),
        (("update.fq", "out.npz", "--like", "new.npz", "--base", "new.npz"), "give --like or --base, not both"),
        (("update.fq", "out.npz", "--max-bytes", 1000), "more than the limit of 1000; --max-bytes raises it"),
        (("digest.fq", "out.npz"), "digest.fq: the payload holds only a digest of its layout"),
    ],
)
def test_decode_refuses(folder, payload, arguments, message):
    (folder / "truncated.fq").write_bytes(payload.read_bytes()[:-10])
    (folder / "empty.fq").write_bytes(b"")
    (folder / "text.fq").write_text("text")
    (folder / "digest.fq").write_bytes(fedfq.encode(an_update(), ratio=64, layout="digest"))
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert message in refused("decode", *arguments)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_encode_never_overwrites_its_input(folder):
    (folder / "link.fq").symlink_to(folder / "update.npz")
    content = (folder / "update.npz").read_bytes()
    assert "link.fq: the output would overwrite an input" in refused("encode", "update.npz", "link.fq")
    assert (folder / "update.npz").read_bytes() == content


def test_inspect_refuses(folder):
    assert "update.npz: this is not a fedfq payload" in refused("inspect", "update.npz")
    assert ".: Is a directory" in refused("inspect", ".")


# As a process


def test_exit_codes_of_a_process(folder):
    fine = shell("encode", "update.npz", "update.fq")
    assert fine.returncode == 0 and fine.stdout.startswith("update.fq: ")
    (folder / "update.fq").write_bytes((folder / "update.fq").read_bytes()[:100])
    bad = shell("decode", "update.fq", "back.npz")
    assert bad.returncode == 2 and bad.stdout == ""
    assert bad.stderr.splitlines()[-1] == "fedfq: update.fq: the payload is damaged: its checksum does not match"
    assert "Traceback" not in bad.stderr and not (folder / "back.npz").exists()
    unknown = shell("encode", "update.npz", "u.fq", "--allocator", "magic")
    assert unknown.returncode == 2 and "Traceback" not in unknown.stderr


def test_control_c_is_quiet(folder, payload, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(fedfq, "decode", interrupt)
    result = run("decode", "update.fq", "back.npz")
    assert result.exit_code == 130 and result.output == ""
    assert not (folder / "back.npz").exists()


def test_compilation_is_announced_and_only_then(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cold"))
    write_tensors("small.npz", {name: np.float32(0.001) * array for name, array in an_update().items()})
    cold = shell("encode", "small.npz", "update.fq", "--basis", "identity")
    assert (
        cold.stderr.startswith("fedfq compiles what was not used here before: up to 15 s")
        and cold.stderr.count("\n") == 1
    )
    assert shell("encode", "small.npz", "update.fq", "--basis", "identity").stderr == ""
