"""Tables 3 and 4 from measurements, the prediction beside them, and what is refused."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from fedfq.network.measure import STEP_SECONDS, NetworkCell, measure_cells, read, rounds_per_epoch
from fedfq.network.tables import all_rows, predict_seconds, write_tables

MB = 1_000_000


def write_cell(out: Path, cell: NetworkCell, seconds: list[float], uplink_bytes: float = 0.0) -> None:
    line = {"stopped_s": 0.5, "delivery_s": 1.0, "encode_s": 0.1, "aggregate_s": 0.05, "downlink_bytes": 20 * MB}
    line |= {"flower_s": 2.0, "payload_bytes": 0.2 * MB, "down_payload_bytes": 0.4 * MB}
    rounds = [{"round": n, "round_s": s, "uplink_bytes": uplink_bytes, **line} for n, s in enumerate(seconds)]
    path = cell.file(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"conditions": asdict(cell), "environment": {"flwr": "1.41.0"}, "rounds": rounds}))


def example(out: Path, clients: int = 16) -> None:
    write_cell(out, NetworkCell("access", clients, "one-parameter"), [5.0, 5.2])
    write_cell(out, NetworkCell("access", clients, "fedavg"), [10.0, 10.4], 18.7 * MB)
    write_cell(out, NetworkCell("access", clients, "fedfq"), [5.6, 5.8], 0.6 * MB)


def test_an_epoch_is_the_papers() -> None:
    assert rounds_per_epoch(2) * 5 * STEP_SECONDS == pytest.approx(45.1)
    assert rounds_per_epoch(16) == pytest.approx(9.77, abs=0.01)


def test_a_row_tells_the_parts_of_a_round(tmp_path: Path) -> None:
    example(tmp_path)
    without, with_ = sorted(all_rows(tmp_path), key=lambda row: row.variant)
    assert without.round_s == pytest.approx(10.2) and without.spread_s == pytest.approx(0.4 / 2**0.5)
    assert without.fixed_s == pytest.approx(5.1 - 5 * STEP_SECONDS)
    assert without.less_fixed_s == pytest.approx(10.2 - 5.1 + 5 * STEP_SECONDS)
    assert without.uplink_s == pytest.approx(8 * 18.7 / 33)
    assert with_.codec_share == pytest.approx(0.15 / 5.7)
    assert without.epoch_s == pytest.approx(10.2 * 9.765625)
    assert without.less_fixed_error_s == pytest.approx(((0.4**2 + 0.2**2) / 2 / 2) ** 0.5)


def test_what_is_predicted_is_what_links_of_that_bandwidth_take(tmp_path: Path) -> None:
    """16 models take 4.4 s through 33 Mbit/s and 0.44 s through 330; a part of it passes while others still pause."""
    example(tmp_path)
    rows = {row.variant: row for row in all_rows(tmp_path)}
    assert 5.1 + 4.4 - 0.5 < rows["fedavg"].predicted_s < 5.1 + 4.4 + 0.44
    assert 5.1 + 0.1 < rows["fedfq"].predicted_s < 5.1 + 0.1 + 0.44 + 0.02


def test_no_link_is_predicted_to_be_faster_than_the_cores_pass_its_bytes_on(tmp_path: Path) -> None:
    example(tmp_path)
    (row,) = (row for row in all_rows(tmp_path) if row.variant == "fedavg")
    slower = row._replace(flower_s=row.flower_fixed_s + 4.0)  # 38.7 MB in 4 s: 77 Mbit/s instead of 330
    assert 0.8 < predict_seconds(slower) - row.predicted_s < 1.6


def test_slow_motion_is_taken_out_of_what_the_tables_say(tmp_path: Path) -> None:
    example(tmp_path)
    write_cell(tmp_path, NetworkCell("access", 16, "one-parameter", slow_motion=4), [20.0, 20.8])
    write_cell(tmp_path, NetworkCell("access", 16, "fedavg", slow_motion=4), [40.0, 41.6], 18.7 * MB)
    rows = {(row.slow_motion, row.variant): row for row in all_rows(tmp_path)}
    real, slow = rows[1, "fedavg"], rows[4, "fedavg"]
    assert slow.round_s == pytest.approx(real.round_s) and slow.spread_s == pytest.approx(real.spread_s)
    assert slow.fixed_s == pytest.approx(real.fixed_s) and slow.encode_s == real.encode_s
    written = {path.name: path.read_text() for path in write_tables(tmp_path)}
    assert "**Downlink ten times the uplink, in 4 times slow motion**" in written["table3.md"]


def test_tables_are_beside_the_papers_and_say_what_was_emulated(tmp_path: Path) -> None:
    example(tmp_path)
    written = {path.name: path.read_text() for path in write_tables(tmp_path)}
    assert list(written) == ["table3.md", "table4.md", "prediction.md", "rows.json"]
    assert "| 18.6 |" in written["table3.md"] and "| 9.42 |" in written["table4.md"]
    assert "steps (emulated)" in written["table3.md"] and "Flower's fixed cost" in written["table3.md"]
    assert "Measured: flwr 1.41.0." in written["table3.md"]
    assert "| 10.20 → 5.70 | 1.79x |" in written["table4.md"]
    assert "| 1,169 → 38 | 1,250 → 1,250 |" in written["table4.md"]
    assert "| 10.20 ± 0.28 |" in written["prediction.md"]


def test_without_the_fixed_cost_there_is_no_row(tmp_path: Path) -> None:
    write_cell(tmp_path, NetworkCell("access", 4, "fedavg"), [6.0])
    assert all_rows(tmp_path) == []


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    example(tmp_path)
    said: list[str] = []
    measure_cells([NetworkCell("access", 16, "fedfq"), NetworkCell("access", 16, "fedavg")], tmp_path, said.append)
    assert said == []


def test_a_measurement_under_other_conditions_is_refused(tmp_path: Path) -> None:
    example(tmp_path)
    with pytest.raises(ValueError, match="other conditions"):
        read(NetworkCell("access", 16, "fedfq", step_seconds=0.2), tmp_path)


def test_a_damaged_measurement_is_named(tmp_path: Path) -> None:
    cell = NetworkCell("access", 16, "fedfq")
    example(tmp_path)
    cell.file(tmp_path).write_text("{")
    with pytest.raises(ValueError, match="16-fedfq.json: no measurement"):
        read(cell, tmp_path)
    with pytest.raises(ValueError, match="16-fedfq.json: no measurement"):
        all_rows(tmp_path)
