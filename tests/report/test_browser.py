"""The page in a real browser, from a file, as its readers open it."""

import pytest

from fedfq.report.page import write_report
from tests.report.browser import opening, started
from tests.report.folders import CLIENTS, RAW, a_line, write_run, write_two

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser():
    with started() as one:
        yield one


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = write_two(tmp_path_factory.mktemp("report") / "compared")
    write_run(folder / "unfinished", [a_line(n, 0.02 * n, 500) for n in range(1, 6)], rounds=9, method="fedfq@64")
    return write_report([folder], folder / "report.html", target=0.8)


@pytest.fixture
def opened(browser, report):
    with opening(browser, report) as open_page:
        yield open_page


def first_column(tab):
    return tab.locator("[aria-label=Summary] tbody th").all_inner_texts()


def header(tab, name):
    return tab.locator("[aria-label=Summary] thead button", has_text=name)


def test_it_opens_and_nothing_runs_that_a_client_wrote(opened):
    tab = opened()
    assert tab.title() == "3 runs: digits, iid"
    assert tab.locator(".chart").count() == 3 and tab.locator(".chart .curve").count() == 9
    assert tab.get_by_text("onerror=alert(1)").is_visible()


def test_pointing_at_a_curve_shows_exact_values(opened):
    tab = opened()
    over_bytes = tab.locator("figure").nth(1)
    box = over_bytes.locator("g").nth(1).locator(".marker").nth(2).bounding_box()
    assert not over_bytes.locator(".tip").is_visible()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    shown = over_bytes.locator(".tip").inner_text().split("\n")
    assert shown[:5] == ["fedfq@8", "round 3", "accuracy 25.000%", "loss 0.75", "9,000 bytes up"]
    assert shown[5] == f"{9_000 + 3 * CLIENTS * RAW:,} up and down"
    assert over_bytes.locator("g.faded").count() == 2
    tab.mouse.move(5, 5)
    assert not over_bytes.locator(".tip").is_visible()


def test_a_tap_shows_them_too_and_the_next_one_elsewhere_hides_them(opened):
    tab = opened(400, has_touch=True, is_mobile=True)
    tip = tab.locator("figure").nth(1).locator(".tip")
    marker = tab.locator("figure").nth(1).locator("g").nth(1).locator(".marker").nth(2)
    marker.scroll_into_view_if_needed()
    box = marker.bounding_box()
    tab.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tab.wait_for_timeout(100)  # a finger that was lifted must not hide it again
    assert tip.is_visible() and tip.inner_text().split("\n")[:2] == ["fedfq@8", "round 3"]
    caption = tab.locator("figcaption").nth(1).bounding_box()
    tab.touchscreen.tap(caption["x"] + 5, caption["y"] + 5)
    assert not tip.is_visible()


def test_arrow_keys_walk_along_the_curves(opened):
    tab = opened()
    over_rounds = tab.locator("figure").nth(0)
    over_rounds.locator(".chart").focus()

    def press(key):
        tab.keyboard.press(key)
        return over_rounds.locator(".tip").inner_text().split("\n")[:2]

    assert press("ArrowRight") == ["fedavg", "round 1"]
    assert press("ArrowRight") == ["fedavg", "round 2"]
    assert press("ArrowDown") == ["fedfq@8", "round 2"]
    assert press("ArrowUp") == ["fedavg", "round 2"]
    tab.keyboard.press("Escape")
    assert not over_rounds.locator(".tip").is_visible()


def test_a_click_on_a_column_sorts_by_its_numbers(opened):
    tab = opened()
    header(tab, "Uplink").first.click()  # as text, 223.2 kB would come before 27 kB
    assert first_column(tab) == ["fedfq@64 unfinished", "fedfq@8", "fedavg"]
    assert tab.locator("[aria-label=Summary] [aria-sort=ascending]").inner_text().startswith("Uplink")
    header(tab, "Uplink").first.click()
    assert first_column(tab) == ["fedavg", "fedfq@8", "fedfq@64 unfinished"]
    assert tab.locator("[aria-sort]").count() == 1


def test_the_keyboard_sorts_too_and_gaps_stay_last(opened):
    tab = opened()
    for key in ("Enter", "Space"):  # up, and down again
        header(tab, "Uplink to").focus()
        tab.keyboard.press(key)
        assert first_column(tab)[-1] == "fedfq@64 unfinished"
    assert first_column(tab)[0] == "fedavg"


def test_the_legend_hides_a_run_in_every_chart(opened):
    tab = opened()
    button = tab.locator(".legend button").first
    button.click()
    assert button.get_attribute("aria-pressed") == "false" and tab.locator(".chart .curve").count() == 6
    for other in tab.locator(".legend button").all()[1:]:
        other.click()
    assert tab.get_by_text("no run is selected").count() == 3
    button.click()
    assert tab.locator(".chart .curve").count() == 3


def test_light_and_dark(opened):
    def colours(scheme):
        read = "element => [getComputedStyle(element).color, getComputedStyle(element).backgroundColor]"
        return opened(color_scheme=scheme).locator("body").evaluate(read)

    assert colours("light") == ["rgb(27, 31, 36)", "rgb(255, 255, 255)"]
    assert colours("dark") == ["rgb(230, 232, 235)", "rgb(21, 24, 28)"]


@pytest.mark.parametrize("width", [400, 800, 1600])
def test_nothing_is_cut_off(opened, width):
    """Tables scroll by themselves; no text of a chart overlaps another or leaves the chart."""
    tab = opened(width)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    for chart in tab.locator(".chart").all():
        box = chart.bounding_box()
        boxes = [label.bounding_box() for label in chart.locator("text").all()]
        for place, one in enumerate(boxes):
            assert box["x"] - 0.5 <= one["x"] and one["x"] + one["width"] <= box["x"] + box["width"] + 0.5
            assert one["y"] + one["height"] <= box["y"] + box["height"] + 0.5
            assert not any(overlap(one, other) for other in boxes[:place])
    tab.locator(".chart").last.focus()
    for key in ("ArrowRight", *["ArrowDown"] * 2, *["ArrowRight"] * 8):
        tab.keyboard.press(key)
        tip = tab.locator("figure").last.locator(".tip").bounding_box()
        assert tip["x"] >= 0 and tip["x"] + tip["width"] <= width


def test_a_table_fades_where_there_is_more_of_it(opened):
    table = opened(400).locator("[aria-label=Summary]")
    mask = "element => getComputedStyle(element).maskImage"

    def is_faded(side):
        return table.evaluate(f"element => element.classList.contains('more-{side}')")

    assert is_faded("right") and not is_faded("left") and "gradient" in table.evaluate(mask)
    table.evaluate("element => { element.scrollLeft = element.scrollWidth; }")
    table.page.wait_for_selector("[aria-label=Summary].more-left:not(.more-right)")
    assert table.evaluate(mask) == "none"
    wide = opened(2400)
    wide.evaluate("document.body.style.maxWidth = 'none'")  # or there would always be more of so many columns
    wide.wait_for_selector(".more-left, .more-right", state="detached")


def test_a_method_has_one_colour_on_the_whole_page(opened):
    tab = opened()
    read = "all => all.map(one => [getComputedStyle(one).stroke, one.getAttribute('stroke-dasharray')])"
    charts = [chart.locator(".curve").evaluate_all(read) for chart in tab.locator(".chart").all()]
    legend = tab.locator(".legend .curve").evaluate_all(read)
    assert charts == [legend, legend, legend] and len(set(map(tuple, legend))) == 3
    rows = tab.locator("[aria-label=Summary] .curve").evaluate_all(read)
    assert rows == legend


def overlap(one, other):
    return all(
        one[start] < other[start] + other[size] - 1 and other[start] < one[start] + one[size] - 1
        for start, size in (("x", "width"), ("y", "height"))
    )


def test_paper_is_white_and_has_everything(opened):
    tab = opened(color_scheme="dark")
    tab.emulate_media(media="print")
    assert tab.locator("body").evaluate("element => getComputedStyle(element).backgroundColor") == "rgb(255, 255, 255)"
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert tab.locator("details:not([open])").count() == 0
    tab.evaluate("dispatchEvent(new Event('afterprint'))")
    assert tab.locator("details:not([open])").count() > 0
