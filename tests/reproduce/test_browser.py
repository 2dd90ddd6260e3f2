"""The page of a reproduction in a real browser."""

import pytest

from fedfq.report.page import write_html
from fedfq.reproduce import cells
from fedfq.reproduce.page import page, read
from fedfq.reproduce.results import claim
from tests.report.browser import opening, started
from tests.reproduce.small import COLUMNS, IID, SHARDS, write_cell

pytestmark = pytest.mark.browser

FIRST, SECOND = (f"#digits-iid [aria-label^='Table {number}']" for number in (1, 2))


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    out = tmp_path_factory.mktemp("reproduction")
    claim(out, "quick")
    for column in (IID, SHARDS):
        write_cell(out, column, "fedavg", [0.6, 0.8], uplink=11 * 2**20)
    write_cell(out, IID, "fedpaq", [0.6, 0.8], uplink=3 * 2**20)
    write_cell(out, IID, "fedfq@512", [0.6, 0.8], uplink=2**12)
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(cells.PROFILES, "quick", COLUMNS)
        return write_html(page(out, read(out)), out / "report.html")


@pytest.fixture(scope="module")
def browser():
    with started() as one:
        yield one


@pytest.fixture
def opened(browser, report):
    with opening(browser, report) as open_page:
        yield open_page


def test_a_click_on_a_column_sorts_one_table(opened):
    tab = opened()
    before = tab.locator(f"{FIRST} tbody th").all_inner_texts()
    tab.locator(f"{SECOND} thead button", has_text="MiB in all").click()
    methods = tab.locator(f"{SECOND} tbody th").all_inner_texts()
    assert methods[:3] == ["fedfq@512", "fedpaq", "fedavg"]  # 0.00781, 6.00 and 22.00, and then what has no number
    assert tab.locator(f"{FIRST} tbody th").all_inner_texts() == before


def test_pointing_at_a_curve_shows_its_value(opened):
    tab = opened()
    over_bytes = tab.locator("#digits-iid figure[data-x=uplink]").last
    over_bytes.scroll_into_view_if_needed()
    box = over_bytes.locator("g").last.locator(".marker").last.bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    shown = over_bytes.locator(".tip").inner_text().split("\n")
    assert shown[:3] == ["fedfq@512", "round 2", "accuracy 80.000%"] and "8,192 bytes up" in shown


def test_only_the_curves_of_table_2_have_a_target(opened):
    lines = [chart.locator(".target").count() for chart in opened().locator("#digits-iid figure").all()]
    assert lines == [0, 0, 0, 1, 1, 1]


def test_the_list_at_the_top_leads_to_the_columns(opened):
    tab = opened()
    tab.get_by_role("link", name="Digits, shards").click()
    assert tab.locator("#digits-shards h2").bounding_box()["y"] < 200


@pytest.mark.parametrize("width", [400, 1200])
def test_nothing_is_wider_than_the_screen(opened, width):
    assert opened(width).evaluate("document.documentElement.scrollWidth") <= width
