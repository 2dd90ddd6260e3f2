"""The benchmark's own arithmetic; its measurements are for `fedfq bench codec`."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from fedfq.bench import codec
from fedfq.bench.peers import OURS, PEERS, nncodec
from fedfq.bench.updates import fresh, from_folder
from tests.updates import draw


def small_update() -> dict[str, np.ndarray]:
    return {"w": draw("laplace", (60, 80)), "b": draw("normal", (80,))}


def test_every_codec_is_measured_in_true_bytes() -> None:
    rows = codec.rate_distortion("small", small_update(), (32,), None)
    assert {row["codec"] for row in rows} >= {*OURS, *PEERS, "QSGD", "float16 + zstd"}
    for row in rows:
        assert row["ratio"] == pytest.approx(4 * 4880 / row["bytes"])
        assert row["nmse"] >= 0 and row["encode_MB_s"] > 0
    assert all(row["bytes"] <= 4 * 4880 / 32 for row in rows if row["codec"] in {*OURS, *PEERS})


def test_bytes_at_equal_error_are_read_off_the_line_between_two_ratios() -> None:
    def row(name: str, bytes_: int, error: float) -> dict[str, object]:
        return {"update": "u", "codec": name, "bytes": bytes_, "nmse": error, "ratio": 0.0}

    rows = [row("fedfq", 1000, 0.1), row("fedfq", 250, 0.4), row("NNCodec", 1500, 0.2), row("NNCodec", 9000, 0.01)]
    compared = codec.against_nncodec(rows)
    assert len(compared) == 1  # nothing is said of an error that ours was not measured at
    assert compared[0]["times_fewer"] == pytest.approx(1500 / math.sqrt(1000 * 250))


def test_the_adaptive_basis_is_compared_in_one_percent_more_bytes() -> None:
    (row,) = codec.never_worse("small", small_update(), (32,))
    assert row["nmse_over_identity"] <= 1.0


def test_result_and_figure_are_written(tmp_path: Path) -> None:
    rows = codec.rate_distortion("small", small_update(), (32, 64), None)
    result = {"rate_distortion": rows, "order_0": codec.order_0("small", small_update(), (32, 64))}
    codec.write(result, tmp_path / "new" / "codec")
    assert json.loads((tmp_path / "new" / "codec.json").read_text()) == result
    assert "small" in (tmp_path / "new" / "codec.svg").read_text()


def test_without_cifar10_the_fresh_updates_are_of_digits(tmp_path: Path) -> None:
    trained = fresh(tmp_path)
    assert trained.task == "digits" and len(trained.updates) == 2
    assert all(any(array.any() for array in update.values()) for update in trained.updates.values())


def test_an_environment_without_nncodec_is_named() -> None:
    with pytest.raises(ValueError, match=r"NNCodec failed under .*python.*nncodec"):
        nncodec(Path(sys.executable), small_update())


def test_a_folder_without_updates_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no .npz or .safetensors"):
        from_folder(tmp_path)
