import json
from pathlib import Path
from typing import Any

import pytest

from fedfq.federation.config import Config
from fedfq.federation.loop import run as run_federation
from fedfq.report.runs import read_run, read_runs, summary_rows
from tests.report.folders import CLIENTS, ENVIRONMENT, RAW, a_line, a_model, a_payload, write_run, write_two


def test_a_run_as_it_was_written(tmp_path):
    lines = [a_line(1, None), a_line(2, 0.5, 1500), a_line(3, None, 10), a_line(4, 0.25, 90)]
    run = read_run(write_run(tmp_path / "run", lines, method="fedfq@8", sample=a_payload(), eval_every=2))
    assert run.label == "fedfq@8" and run.finished and run.environment == ENVIRONMENT
    down = 2 * CLIENTS * RAW  # in two rounds
    assert [tuple(point) for point in run.points] == [
        (2, 0.5, 0.5, 2500, 2500 + down),
        (4, 0.25, 0.75, 2600, 2600 + 2 * down),
    ]
    assert (run.final_accuracy, run.best_accuracy, run.last_accuracy) == (0.25, 0.5, 0.375)
    assert run.raw_bytes == RAW and run.seconds == 12
    assert [tensor.name for tensor in run.sample.tensors] == sorted(a_model())
    assert run.sample.bytes == len(a_payload())


def test_the_last_five_evaluations(tmp_path):
    run = read_run(write_run(tmp_path / "run", [a_line(n + 1, n / 8) for n in range(8)]))
    assert run.last_accuracy == (3 + 4 + 5 + 6 + 7) / 8 / 5


def test_what_clients_hold_is_evaluated_where_it_is_not_the_servers_model(tmp_path: Path) -> None:
    """Its mean is that of the last five evaluations, too. `left_out` is there after every round."""
    lines = [a_line(n + 1, 0.5, left_out=n / 2, held_accuracy=n / 8) for n in range(7)]
    run = read_run(write_run(tmp_path / "run", [*lines, a_line(8, None, left_out=4)]))
    assert run.last_held_accuracy == (2 + 3 + 4 + 5 + 6) / 8 / 5
    assert [line.left_out for line in run.rounds] == [0, 0.5, 1, 1.5, 2, 2.5, 3, 4]
    same = read_run(write_run(tmp_path / "same", [a_line(1, 0.5)]))
    assert same.last_held_accuracy is None and same.rounds[0].left_out is None


def test_bytes_to_a_target(tmp_path):
    run = read_run(write_run(tmp_path / "run", [a_line(1, 0.2), a_line(2, 0.6), a_line(3, 0.4), a_line(4, 0.8)]))
    assert [run.bytes_to(target) for target in (0.1, 0.6, 0.61, 0.9)] == [1000, 2000, 4000, None]
    rows = [summary_rows([run], target)[0] for target in (0.1, 0.6, 0.61, 0.9)]
    every = 1000 + CLIENTS * RAW  # round, up and down
    assert [row["total_bytes_to_target"] for row in rows] == [every, 2 * every, 4 * every, None]


def test_ratios_count_answers_that_were_taken(tmp_path):
    """Refused uploads cost bytes and bring nothing; whoever has nothing to say saves."""
    lines = [a_line(1, 0.2, 1000, [(0, "damaged"), (4, "damaged")]), a_line(2, 0.3, 0)]
    run = read_run(write_run(tmp_path / "run", lines))
    assert run.rejected == 2
    assert run.wire_ratio == RAW * (2 * CLIENTS - 2) / 1000
    assert run.claimed_ratio == 2 * run.wire_ratio  # `a_line` claims half


def test_the_total_ratio_is_of_answers_that_were_taken_and_of_a_model_for_every_client_that_was_asked(
    tmp_path: Path,
) -> None:
    """First contacts, with their initial models, make it worse; a smaller model makes it better."""
    refused = [(0, "damaged"), (4, "damaged")]
    lines = [a_line(1, 0.2, 1000, refused, downlink_bytes=700), a_line(2, 0.3, 0, downlink_bytes=300)]
    run = read_run(write_run(tmp_path / "run", lines))
    assert run.total_bytes == 2000
    assert run.total_ratio == RAW * (2 * CLIENTS - 2 + 2 * CLIENTS) / 2000
    plain = read_run(write_run(tmp_path / "plain", [a_line(1, 0.2, CLIENTS * RAW)]))
    assert plain.total_ratio == 1
    first = read_run(write_run(tmp_path / "first", [a_line(1, 0.2, CLIENTS * RAW, downlink_bytes=2 * CLIENTS * RAW)]))
    assert first.total_ratio == pytest.approx(2 / 3)


def test_nothing_uploaded_has_no_ratio(tmp_path):
    run = read_run(write_run(tmp_path / "run", [a_line(1, 0.2, 0)]))
    assert run.wire_ratio is None and run.claimed_ratio is None
    assert run.total_ratio == 2  # but the models went down
    assert read_run(write_run(tmp_path / "none", [a_line(1, 0.2, 0, downlink_bytes=0)])).total_ratio is None


def test_a_sample_of_another_method_has_no_tensors(tmp_path):
    assert read_run(write_run(tmp_path / "run", [a_line(1, 0.2)], sample=b"\0" * RAW)).sample is None


# Rows, for the page and the terminal


def test_summary_rows(tmp_path):
    fedavg, fedfq = summary_rows(read_runs([write_two(tmp_path / "compared")]), target=0.8)
    assert (fedavg["run"], fedfq["run"]) == ("fedavg", "fedfq@8")
    assert fedavg["wire_ratio"] == 1 and fedavg["bytes_to_target"] == 8 * CLIENTS * RAW
    assert fedavg["total_ratio"] == 1 and fedavg["total_bytes_to_target"] == 16 * CLIENTS * RAW
    assert fedfq["uplink_bytes"] == 27_000 and fedfq["downlink_bytes"] == 9 * CLIENTS * RAW
    assert fedfq["total_bytes"] == fedfq["total_bytes_to_target"] == 27_000 + 9 * CLIENTS * RAW
    assert fedfq["total_ratio"] == (18 * CLIENTS - 1) * RAW / fedfq["total_bytes"]  # one upload was refused
    assert fedavg["held_accuracy"] is None
    assert fedfq["accuracy"] == pytest.approx(0.85) and fedfq["accuracy_last_5"] == pytest.approx(0.65)
    assert fedfq["bytes_to_target"] == 27_000 and fedfq["rejected"] == 1
    assert fedavg.keys() == fedfq.keys()


def test_no_target_no_column(tmp_path):
    row = summary_rows(read_runs([write_two(tmp_path / "compared")]))[0]
    assert "bytes_to_target" not in row and "total_bytes_to_target" not in row


# Runs that were killed


def test_an_unfinished_run(tmp_path):
    """There is no model yet; its size is in run.json, whatever clients were sent."""
    lines = [a_line(1, 0.2, downlink_bytes=17)]
    run = read_run(write_run(tmp_path / "run", lines, rounds=20, finished=False, sample=a_payload()))
    assert not run.finished and run.raw_bytes == RAW and run.sample is None
    assert run.wire_ratio == RAW * CLIENTS / 1000


def test_a_run_that_has_only_begun(tmp_path):
    run = read_run(write_run(tmp_path / "run", [], rounds=20, finished=False))
    (tmp_path / "run" / "rounds.jsonl").unlink()
    assert read_run(tmp_path / "run") == run
    assert not run.finished and run.points == () and run.raw_bytes == RAW
    row = summary_rows([run], target=0.5)[0]
    for name in ("accuracy", "wire_ratio", "total_ratio", "held_accuracy", "bytes_to_target", "total_bytes_to_target"):
        assert row[name] is None


@pytest.mark.parametrize("name", ["rounds.jsonl", "timings.jsonl"])
def test_half_a_line_at_the_end_is_ignored(tmp_path, name):
    folder = write_run(tmp_path / "run", [a_line(1, 0.2), a_line(2, 0.3)], finished=False)
    whole = (folder / name).read_bytes()
    one = whole.index(b"\n") + 1
    for size in range(one, len(whole)):
        (folder / name).write_bytes(whole[:size])
        run = read_run(folder)
        lines = run.rounds if name == "rounds.jsonl" else run.timings
        assert len(lines) == (2 if size == len(whole) - 1 else 1)


# What is no run


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.json", "{", "run.json: not the description of a run"),
        ("run.json", "[]", "run.json: not the description of a run"),
        ("run.json", '{"fedfq": 1}', r"run.json: not the description of a run \(no 'config'\)"),
        ("run.json", '{"config": {"speed": 3}}', "unknown key 'speed'"),
        ("rounds.jsonl", "text\n", "rounds.jsonl: line 1 is damaged"),
        ("rounds.jsonl", json.dumps(a_line(1, 0.1)) + "\n{\n" + json.dumps(a_line(2, 0.1)), "line 2 is damaged"),
        ("rounds.jsonl", json.dumps(a_line(1, 0.1, uplink_bytes=None)) + "\n", "line 1 is damaged"),
        ("rounds.jsonl", json.dumps(a_line(1, float("nan"))) + "\n", "line 1 is damaged"),
        ("rounds.jsonl", json.dumps(a_line(1, 0.1, uplink_bytes=float("inf"))) + "\n", "line 1 is damaged"),
        ("rounds.jsonl", json.dumps(a_line(1, 0.1, held_accuracy=float("nan"))) + "\n", "line 1 is damaged"),
        ("rounds.jsonl", json.dumps(a_line(1, 0.1, left_out="much")) + "\n", "line 1 is damaged"),
        ("rounds.jsonl", json.dumps(a_line(2, 0.1)) + "\n", "rounds.jsonl: the rounds are not 1, 2, 3"),
        ("timings.jsonl", "3\n", "timings.jsonl: line 1 is damaged"),
        ("model.safetensors", "text", "model.safetensors: not a readable .safetensors file"),
    ],
)
def test_damage_is_named(tmp_path, name, content, message):
    folder = write_run(tmp_path / "run", [a_line(1, 0.2)])
    (folder / name).write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_run(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("raw", [None, -1, 4960.0, "4960", True])
def test_the_size_of_an_update_is_a_whole_number_of_bytes(tmp_path: Path, raw: Any) -> None:
    """All ratios are of it."""
    folder = write_run(tmp_path / "run", [a_line(1, 0.2)])
    described = json.loads((folder / "run.json").read_text()) | {"raw_bytes": raw}
    (folder / "run.json").write_text(json.dumps(described))
    with pytest.raises(ValueError, match="run.json: not the description of a run \\(raw_bytes is "):
        read_run(folder)


def test_a_folder_without_runs(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    with pytest.raises(ValueError, match="neither a run nor a folder of runs"):
        read_runs([tmp_path])
    with pytest.raises(ValueError, match="missing: no such folder"):
        read_runs([tmp_path / "missing"])


# Several runs


def test_a_folder_of_runs_in_natural_order(tmp_path):
    for ratio in (128, 32, 64):
        write_run(tmp_path / f"fedfq@{ratio}", [a_line(1, 0.2)], method=f"fedfq@{ratio}")
    (tmp_path / "notes").mkdir()
    (tmp_path / "report.html").write_text("")
    assert [run.label for run in read_runs([tmp_path])] == ["fedfq@32", "fedfq@64", "fedfq@128"]


def test_the_same_run_twice_is_one(tmp_path):
    write_two(tmp_path)
    assert len(read_runs([tmp_path / "fedavg", tmp_path, tmp_path / "fedfq@8" / ".." / "fedavg"])) == 2


def test_labels_name_what_else_differs(tmp_path):
    for name, others in {"a": {}, "b": {"seed": 1}, "c": {"seed": 1, "split": "shards:2"}, "d": {}}.items():
        write_run(tmp_path / name, [a_line(1, 0.2)], **others)
    write_run(tmp_path / "e", [a_line(1, 0.2)], method="fedfq@8")
    labels = [run.label for run in read_runs([tmp_path])]
    assert labels == [
        f"fedavg, seed=0 ({tmp_path / 'a'})",
        "fedavg, seed=1",
        "fedavg",  # the only one of its split
        f"fedavg, seed=0 ({tmp_path / 'd'})",
        "fedfq@8",
    ]


# The real thing


def test_a_real_run(tmp_path):
    config = Config.make(task="digits", method="fedfq@32", rounds=2)
    result = run_federation(config, tmp_path / "run")
    run = read_run(tmp_path / "run")
    assert run.finished and run.config == config and run.label == "fedfq@32"
    assert run.final_accuracy == result.rounds[-1]["accuracy"]
    assert run.raw_bytes == 4 * sum(value.size for value in result.theta.values())
    assert 32 <= run.wire_ratio < 33 and run.claimed_ratio == run.wire_ratio
    assert run.total_bytes == run.uplink_bytes + sum(line["downlink_bytes"] for line in result.rounds)
    assert {tensor.name for tensor in run.sample.tensors} == set(result.theta)
    assert run.seconds > 0 and run.environment["fedfq"]
