import re
from pathlib import Path

import pytest

from fedfq.report import styles
from fedfq.report.figures import _figure, write_figures
from fedfq.report.runs import read_runs
from fedfq.report.styles import COLOURS
from tests.report.folders import a_line, write_run, write_two


def test_the_same_runs_give_the_same_files(tmp_path):
    runs = read_runs([write_two(tmp_path / "compared")])
    names = [f"accuracy-{over}.{kind}" for over in ("rounds", "bytes", "total") for kind in ("svg", "pdf")]
    for folder in ("first", "second"):
        assert [path.name for path in write_figures(runs, tmp_path / folder)] == names
    for name in names:
        content = (tmp_path / "first" / name).read_bytes()
        assert content == (tmp_path / "second" / name).read_bytes()
        assert not re.search(rb"<dc:date>|/CreationDate", content)


@pytest.mark.parametrize(
    ("field", "expected"), [("round", [1, 2, 3]), ("uplink_bytes", [5, 10]), ("total_bytes", [7, 19, 31])]
)
def test_curves_show_what_was_evaluated(tmp_path, field, expected):
    """A logarithmic axis has no place for an evaluation before the first byte."""
    evaluated = [(1, 0.1, 0), (2, 0.2, 5), (3, 0.3, 5), (4, None, 5)]
    lines = [a_line(number, accuracy, uplink, downlink_bytes=7) for number, accuracy, uplink in evaluated]
    figure = _figure(read_runs([write_run(tmp_path / "run", lines, rounds=9, finished=False)]), field)
    (curve,) = figure.axes[0].lines
    assert list(curve.get_xdata()) == expected
    assert curve.get_label() == "fedavg (unfinished)"


def test_a_panel_for_every_setting_and_one_legend(tmp_path):
    for split in ("iid", "shards:2", "dirichlet:0.3"):
        write_run(tmp_path / split.replace(":", "-"), [a_line(1, 0.2)], split=split)
    figure = _figure(read_runs([tmp_path]), "uplink_bytes")
    shown = [axes.get_title() for axes in figure.axes if axes.get_visible()]
    assert shown == ["digits, dirichlet:0.3", "digits, iid", "digits, shards:2"]
    assert [entry.get_text() for entry in figure.legends[0].get_texts()] == ["fedavg"]


def test_a_narrow_range_of_bytes_has_ticks(tmp_path):
    for uplink in (2100, 3000, 4900):
        figure = _figure(read_runs([write_run(tmp_path / str(uplink), [a_line(1, 0.2, uplink)])]), "uplink_bytes")
        low, high = figure.axes[0].get_xlim()
        assert high >= 10 * low * 0.999
        assert any(low <= tick <= high for tick in figure.axes[0].get_xticks())


def test_nothing_was_evaluated(tmp_path):
    runs = read_runs([write_run(tmp_path / "run", [], rounds=9, finished=False)])
    assert len(write_figures(runs, tmp_path / "figures")) == 6


def test_the_page_has_the_same_colours():
    css = Path(styles.__file__).with_name("page.css").read_text()
    light = css[: css.index("@media")]
    assert re.findall(r"--c\d: (#\w+);", light) == list(COLOURS)


def test_a_curve_has_the_colour_of_its_method(tmp_path):
    """Alone or among others, as on the page."""
    for number, method in enumerate(("fedpaq", "fedavg", "fedfq@64")):
        write_run(tmp_path / "all" / str(number), [a_line(1, 0.2)], method=method)
    drawn = {line.get_label(): line for line in _figure(read_runs([tmp_path / "all"]), "round").axes[0].lines}
    (alone,) = _figure(read_runs([tmp_path / "all" / "1"]), "round").axes[0].lines
    for line in (drawn["fedavg"], alone):
        assert (line.get_color(), line.get_marker()) == (styles.styles(["fedavg"])["fedavg"].hex, "o")
    assert len({line.get_color() for line in drawn.values()}) == 3
