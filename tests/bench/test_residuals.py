"""What updates lose on the way, in seconds instead of minutes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedfq import SharedBasis
from fedfq.bench import residuals
from tests.updates import low_rank


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residuals, "LOOKED_AT", (2, 3))
    monkeypatch.setattr(residuals, "LATER", (1,))
    monkeypatch.setattr(residuals, "RATIOS", (256,))
    monkeypatch.setattr(residuals, "NOISE_RATIOS", (64, 512))
    monkeypatch.setattr(residuals, "SETTINGS", {"1 step": {"local_steps": 1}, "2 steps": {"local_steps": 2}})


def test_every_setting_round_and_ratio_is_measured_and_drawn(short: None, tmp_path: Path) -> None:
    said: list[str] = []
    result = residuals.run(None, "digits", 1, "float32", said.append)
    assert said == ["1 step", "2 steps"]
    assert [(row["setting"], row["round"], row["ratio"]) for row in result["lost"]] == [
        (setting, round_, ratio) for setting in said for round_ in (2, 3) for ratio in (256,)
    ]
    for row in result["lost"]:
        assert 0 < row["nmse"] < 1 and abs(row["common_share"]) < 1 and np.isfinite(row["common_lost"])
    for row in result["noise"]:
        assert 0 < row["fedfq_noise"] < row["eden_noise"]  # neither leaves anything out in the mean
    assert [row["ratio"] for row in result["noise"]] == [64, 512] * 4
    for row in result["spectrum"]:
        assert row["client_rank_1"] < row["client_rank_4"] < row["client_rank_16"] <= 1
    assert [(row["round"], row["rounds_later"]) for row in result["late"]] == [(2, 1), (2, 1)]
    residuals.write(result, tmp_path / "residuals")
    assert (tmp_path / "residuals.json").exists() and b"5 epochs" not in (tmp_path / "residuals.svg").read_bytes()


def test_what_vectors_have_in_common_is_found_beneath_their_noise() -> None:
    rng = np.random.default_rng(0)
    signal = rng.standard_normal(20_000)
    noisy = [signal + 3 * rng.standard_normal(20_000) for _ in range(10)]
    assert residuals.common_energy(noisy) / 20_000 == pytest.approx(1.0, abs=0.1)
    assert residuals.common_energy([signal] * 10) == pytest.approx(signal @ signal)


def test_a_payload_that_leaves_out_what_all_have_loses_it() -> None:
    """Ten clients with the same update: all that is lost is lost in common."""
    model = {"w": low_rank(40, 50, 3)}
    basis = SharedBasis(model, {"w": np.zeros((40, 50), np.float32)})
    update: dict[str, Any] = {"w": np.random.default_rng(0).standard_normal((40, 50)).astype(np.float32)}
    row, mean = residuals._compress([update] * 10, 64, basis)
    assert row["common_lost"] == pytest.approx(row["nmse"]) and row["common_share"] == pytest.approx(1.0)
    assert mean.shape == (2000,)


def test_nine_of_ten_clients_are_not_back_in_the_next_round() -> None:
    assert residuals.returns()[0] == {"after_rounds": 1, "not_yet_back": pytest.approx(0.9)}
