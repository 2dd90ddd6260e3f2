import json
import re
from html.parser import HTMLParser

import pytest

from fedfq.methods import METHODS
from fedfq.report.markup import duration, short_bytes, text
from fedfq.report.page import MOST_REJECTED, page, write_page, write_report
from fedfq.report.runs import read_runs
from tests.report.folders import CLIENTS, HOSTILE, RAW, a_line, write_run, write_two


class Outline(HTMLParser):
    """Tables as rows of (text, data-value, title), and every tag that was opened."""

    def __init__(self, html):
        super().__init__()
        self.tables, self.tags, self.open = {}, [], []
        self.feed(html)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        if attributes.get("role") == "region":
            self.rows = self.tables[attributes["aria-label"]] = []
        elif tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append(["", attributes.get("data-value"), attributes.get("title")])
            self.open.append(tag)

    def handle_endtag(self, tag):
        if self.open and tag == self.open[-1]:
            self.open.pop()

    def handle_data(self, data):
        if self.open:
            self.rows[-1][-1][0] += data

    def column(self, table, title):
        head, *rows = self.tables[table]
        place = [cell[0] for cell in head].index(title)
        return [row[place] for row in rows]


@pytest.fixture
def two(tmp_path):
    return read_runs([write_two(tmp_path / "compared")])


def embedded(html):
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)[1])


def test_the_page_asks_for_nothing(two):
    """One script that the policy names, no reference to anything outside."""
    html = page(two, target=0.5)
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?!data:)[^"'\s>]""", html.replace(text(HOSTILE), ""))
    assert "@import" not in html and "url(" not in html
    assert "default-src 'none'" in html and "script-src 'sha256-" in html
    assert len(html) < 60_000


def test_numbers_sort_as_numbers(two):
    outline = Outline(page(two, target=0.8))
    uplink = outline.column("Summary", "Uplink")
    assert uplink == [["223.2 kB", str(9 * CLIENTS * RAW), "223,200 bytes"], ["27 kB", "27000", "27,000 bytes"]]
    assert outline.column("Summary", "Wire ratio")[0] == ["1.0×", "1.0", "1"]
    assert float(outline.column("Summary", "Accuracy, last 5")[1][1]) == pytest.approx(0.65)
    assert outline.column("Summary", "per client to 80%")[1][0] == "5.4 kB"
    total = [["446.4 kB", "446400", "446,400 bytes"], ["250.2 kB", "250200", "250,200 bytes"]]
    assert outline.column("Summary", "Total") == total
    assert outline.column("Summary", "Total ratio")[0] == ["1.0×", "1.0", "1"]
    assert outline.column("Summary", "Total to 80%")[1] == total[1]
    assert outline.column("Summary", "held") == 2 * [["–", None, None]]


def test_what_there_is_not_has_no_number(tmp_path):
    runs = read_runs([write_run(tmp_path / "run", [a_line(1, None, 0)], rounds=9, finished=False)])
    outline = Outline(page(runs, target=0.8))
    for title in ("final", "best", "held", "Wire ratio", "Claimed ratio", "Uplink to 80%", "Total to 80%"):
        assert outline.column("Summary", title) == [["–", None, None]]
    assert outline.column("Summary", "Rounds") == [["1 of 9", "1", None]]
    assert "unfinished" in outline.column("Summary", "Run")[0][0]


def test_curves(two):
    (setting,) = embedded(page(two, target=0.8))
    fedavg, fedfq = setting["runs"]
    assert setting["target"] == 0.8
    assert fedfq["label"] == "fedfq@8" and len(fedfq["points"]) == 9
    said = {"round": 2, "accuracy": 0.15000000000000002, "loss": 0.85}
    assert fedfq["points"][1] == said | {"uplink": 6000, "total": 6000 + 2 * CLIENTS * RAW}
    look = ("colour", "dashes", "marker")
    assert all(fedavg[key] != fedfq[key] for key in look)


def test_every_setting_has_three_charts(two):
    keys = [attributes["data-x"] for _, attributes in Outline(page(two)).tags if "data-x" in attributes]
    assert keys == ["round", "uplink", "total"]


def test_what_clients_hold_has_its_accuracy_where_it_is_another_model(tmp_path):
    write_run(tmp_path / "a", [a_line(1, 0.2, held_accuracy=0.15, left_out=0.5)], method="fedfq@8")
    assert Outline(page(read_runs([tmp_path]))).column("Summary", "held")[0][1] == "0.15"


def test_a_method_looks_the_same_in_every_setting(tmp_path):
    for split in ("iid", "shards:2"):
        write_run(tmp_path / split.replace(":", "-"), [a_line(1, 0.2)], split=split)
    html = page(read_runs([tmp_path]))
    first, second = (setting["runs"][0] for setting in embedded(html))
    assert first == second
    assert "<h2>digits, shards:2</h2>" in html
    assert [cell[0] for cell in Outline(html).column("Summary", "Run")] == [
        "fedavg digits, iid",
        "fedavg digits, shards:2",
    ]


def test_bytes_of_each_tensor(two):
    table = Outline(page(two)).tables["fedfq@8"]
    names = [row[0][0] for row in table]
    assert names == ["Tensor", "fc.bias", "fc.weight", "header", "all"]
    sizes = [int(row[1][1]) for row in table[1:-1]]
    assert sum(sizes) == two[1].sample.bytes == int(table[-1][1][0].replace(",", ""))


def test_what_differs_comes_first(tmp_path):
    write_run(tmp_path / "a", [a_line(1, 0.2)], method="fedfq@256:error_feedback=true:gain=true", lr=0.5)
    write_run(tmp_path / "b", [a_line(1, 0.2)], method="fedfq@64:error_feedback=true", lr=0.5)
    html = page(read_runs([tmp_path]))
    head, first, second = Outline(html).tables["What differs between the runs"]
    assert [cell[0] for cell in head] == ["Run", "option ratio", "option gain"]
    assert [cell[0] for cell in first[1:]] == ["256", "True"]
    assert [cell[0] for cell in second[1:]] == ["64", "norm"]
    assert "<dt>lr</dt><dd>0.5</dd>" in html and "toaster, 2 cores" in html


def test_every_method_on_one_page(tmp_path):
    """Options that some methods lack and that are empty for others are neither different nor an error."""
    for name in METHODS:
        write_run(tmp_path / name, [a_line(1, 0.2)], method=name)
    html = page(read_runs([tmp_path]))
    assert len(Outline(html).tables["What differs between the runs"]) == 1 + len(METHODS)
    assert "<dt>option sparsity</dt>" in html


def test_one_run_differs_from_nothing(tmp_path):
    html = page([read_runs([write_two(tmp_path)])[0]])
    assert "What differs between the runs" not in html and "<details open><summary>All of it" in html
    assert "<title>1 run: digits, iid</title>" in html


# Text from outside


def test_hostile_reasons_stay_text(two):
    html = page(two)
    outline = Outline(html)
    assert outline.column("Rejected uploads", "Reason") == [[HOSTILE, None, None]]
    assert outline.column("Rejected uploads", "Client")[0][0] == "3"
    assert [tag for tag, _ in outline.tags].count("script") == 2
    assert not [tag for tag, _ in outline.tags if tag == "img"]


def test_hostile_labels_stay_text(tmp_path):
    folder = tmp_path / "<img src=x onerror=alert(1)>"
    for name in ("<script>1", "<script>2"):
        write_run(folder / name, [a_line(1, 0.2)])
    html = page(read_runs([folder]))
    tags = [tag for tag, _ in Outline(html).tags]
    assert tags.count("script") == 2 and "img" not in tags
    assert "<script>1" in embedded(html)[0]["runs"][0]["label"]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("a & b", "a &amp; b"),
        ("\u202eback", "&#x27;\\u202eback&#x27;"),
        ("half \ud800", "&#x27;half \\ud800&#x27;"),
        ("x" * 400, "x" * 299 + "…"),
        (None, "None"),
    ],
)
def test_text(given, shown):
    assert text(given) == shown
    shown.encode()


def test_nobody_can_fill_the_page(tmp_path):
    rejected = [(client, "damaged") for client in range(CLIENTS)]
    runs = read_runs([write_run(tmp_path / "run", [a_line(n, 0.2, 10, rejected) for n in range(1, 101)])])
    html = page(runs)
    assert len(Outline(html).column("Rejected uploads", "Reason")) == MOST_REJECTED
    assert "And 300 more." in html


def test_no_rejected_uploads_no_section(tmp_path):
    assert "Rejected uploads" not in page(read_runs([write_run(tmp_path / "run", [a_line(1, 0.2)])]))


# Files and numbers


def test_write_report(tmp_path, two):
    out = tmp_path / "out.html"
    assert write_report([tmp_path / "compared"], out, target=0.5) == out
    assert out.read_text("utf-8").startswith("<!DOCTYPE html>")
    with pytest.raises(ValueError, match="rounds.jsonl: a report is named .html"):
        write_page(two, tmp_path / "compared" / "fedavg" / "rounds.jsonl")


@pytest.mark.parametrize("target", [0, -1, 1.5, 80, float("nan")])
def test_a_target_is_an_accuracy(two, target):
    with pytest.raises(ValueError, match="between 0 and 1"):
        page(two, target)


def test_short_bytes():
    sizes = (0, 999, 1000, 44_659, 999_949, 999_960, 28_701_600, 4.27e9, 5e12, 5e15)
    assert [short_bytes(size) for size in sizes] == [
        *("0 B", "999 B", "1 kB", "44.66 kB", "999.9 kB"),
        *("1 MB", "28.7 MB", "4.27 GB", "5 TB", "5,000 TB"),
    ]


def test_duration():
    assert [duration(seconds) for seconds in (0.04, 59.9, 59.96, 61, 3600, 90_000)] == [
        *("0.0 s", "59.9 s", "1 min 0 s", "1 min 1 s", "1 h 0 min", "25 h 0 min")
    ]
