"""One method, one look."""

import itertools
from pathlib import Path

import pytest

from fedfq import methods
from fedfq.report import styles as module
from fedfq.report.styles import COLOURS, DASHES, INK, MARKER_PATHS, MARKERS, METHODS, SHADES, style, styles
from fedfq.reproduce.cells import TABLE_1, TABLE_2

RATIOS = [f"fedfq@{2**power}" for power in range(2, 14)]


@pytest.mark.parametrize("label", ["fedavg", "fedfq@64", "fedfq@1024", "stc", "fedavg-2bit", "something-new@8"])
def test_a_method_looks_the_same_whatever_is_beside_it(label):
    alone = styles([label])[label]
    for others in (TABLE_1, TABLE_2, RATIOS, (f"{label}:gain=true", f"{label}, seed=1")):
        assert styles([*others, label])[label] == styles([label, *others])[label] == alone


@pytest.mark.parametrize("labels", [TABLE_1, TABLE_2, tuple(methods.METHODS), RATIOS])
def test_all_of_a_page_differ(labels):
    looks = styles(list(labels))
    assert set(looks) == set(labels) and len(set(looks.values())) == len(labels)


def test_ratios_keep_colour_and_marker_and_differ_otherwise():
    looks = styles(RATIOS).values()
    assert {(look.colour, look.marker) for look in looks} == {METHODS["fedfq"]}
    assert len({(look.shade, look.dashes) for look in looks}) == len(RATIOS)
    usual = [styles([f"fedfq@{2**power}"]).popitem()[1] for power in range(4, 12)]
    assert len({(look.dashes, look.hollow) for look in usual}) == len(usual)
    assert len({look.hex for look in looks}) == len({look.css for look in looks}) == len(SHADES)


def test_every_method_has_a_colour_and_marker_of_its_own():
    families = {name: styles([name])[name][::2] for name in methods.METHODS}
    widths = {families.pop(f"fedavg-{bits}bit") for bits in (2, 4, 8)}
    assert len(widths) == 1 and len({*families.values(), *widths}) == len(families) + 1
    assert len(set(METHODS.values())) == len(METHODS)


def test_runs_of_one_method_differ_however_many_there_are():
    labels = [f"fedfq@64, seed={seed}" for seed in range(200)]
    assert len(set(styles(labels[:50]).values())) == 50 and list(styles(labels)) == labels
    assert styles(["fedfq@100", "fedfq@128"])["fedfq@100"] != styles(["fedfq@100", "fedfq@128"])["fedfq@128"]


def test_curves_that_are_not_of_methods_differ_without_colour():
    assert len({style(number) for number in range(28)}) == 28
    assert len({style(number)[2:] for number in range(28)}) == 28
    assert len(MARKERS) == len(MARKER_PATHS) == 7 and len(DASHES) == 4


def test_colours_stand_out_from_white():
    def luminance(colour):
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    looks = [module.Style(colour, shade, "o", ()) for colour, shade in itertools.product(range(len(COLOURS)), range(3))]
    assert all(1.05 / (luminance(look.hex) + 0.05) >= 3 for look in looks)
    assert f"--ink: {INK};" in Path(module.__file__).with_name("page.css").read_text()
