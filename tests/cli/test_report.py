import sys

import pytest

from tests.cli.runner import ok, refused
from tests.report.folders import a_line, write_run, write_two


@pytest.fixture
def compared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_two(tmp_path / "compared")


def test_the_page_lies_in_the_first_folder(compared):
    write_run(compared.parent / "more", [a_line(1, 0.2)], seed=3)
    said = ok("report", "compared", "more")
    page = compared / "report.html"
    assert said == f"compared/report.html: 3 runs, {page.stat().st_size:,} bytes\n"
    assert "fedavg, rounds=1, seed=3" in page.read_text("utf-8")


def test_page_figures_and_target(compared):
    said = ok("report", "compared/fedavg", "--out", "one.htm", "--figures", "new/figures", "--target", 0.5)
    shown = (compared.parent / "one.htm").read_text("utf-8")
    assert "Uplink to 50%" in shown and "Total to 50%" in shown
    assert said.splitlines()[1:] == [
        f"new/figures/accuracy-{over}.{kind}" for over in ("rounds", "bytes", "total") for kind in ("svg", "pdf")
    ]
    assert not (compared / "fedavg" / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("missing",), "missing: no such folder"),
        (("empty",), "empty: neither a run nor a folder of runs"),
        (("compared", "empty"), "empty: neither a run nor a folder of runs"),
        (("compared/fedavg/run.json",), "run.json: no such folder"),
        (("compared", "--out", "compared"), "compared: a report is named .html"),
        (("compared", "--out", "no/report.html"), "no/report.html: No such file or directory"),
        (("compared", "--target", 80), "the target is an accuracy between 0 and 1, got 80"),
    ],
)
def test_refused(compared, arguments, message):
    (compared.parent / "empty").mkdir()
    assert message in refused("report", *arguments)
    assert not list(compared.parent.rglob("*.html"))


def test_figures_without_their_extra(compared, monkeypatch):
    monkeypatch.delitem(sys.modules, "fedfq.report.figures", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install 'fedfq[report]'" in refused("report", "compared", "--figures", "figures")
    assert not (compared / "report.html").exists()
    ok("report", "compared")
