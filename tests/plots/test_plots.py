"""What holds for all figures: nothing overlaps, colours are told apart, files are written, errors say what is wrong."""

import itertools
import warnings
from pathlib import Path

import numpy as np
import pytest
from figures import LONG, NAMES, assert_fits, axes_of, evaluated, history, report
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from programs import run

from hf_cgd.plots import (
    EXTREMES,
    MUTED,
    PALETTE,
    WORST,
    accuracies_figure,
    comparison_figure,
    draw_group_weights,
    group_colors,
    interactions_figure,
    points_figure,
    save_figure,
    sweep_figure,
    weights_figure,
)
from hf_cgd.plots.style import lowest_groups


@pytest.mark.parametrize("count", [2, 60])
def test_no_texts_overlap(count: int) -> None:
    names = [f"label:{number % 2} place:{number}" for number in range(count)]
    runs = [report(dict.fromkeys(names, 0.2 + 0.3 * seed)) for seed in range(3)]
    weights = [history({name: [1 / count, 1 / count] for name in names})] * 3
    figure = comparison_figure(dict.fromkeys(("ERM", "Group-DRO", "CGD"), runs), {"CGD": weights}, title="a title")
    assert_fits(figure)


@pytest.mark.parametrize(("count", "name"), [(2, "g"), (2, LONG), (8, LONG), (60, LONG)])
def test_every_figure_is_readable_with_few_and_many_groups_of_short_and_long_names(count: int, name: str) -> None:
    names = [f"{name} {number}" for number in range(count)]
    weights = [history({group: [1 / count, 1 / count] for group in names}, every=60_000)] * 2
    runs = [evaluated({group: [0.2 + seed / 5, 0.4] for group in names}, every=60_000) for seed in range(2)]
    single = weights_figure({"CGD": {"": weights}}, title="a title")
    assert_fits(single)
    # Legends go down rather than make a figure broad.
    assert single.get_figwidth() < 5
    assert_fits(weights_figure({"CGD": {"small steps": weights, "large steps": weights}, "DRO": {"": weights}}))
    assert_fits(accuracies_figure({"CGD": runs}))
    assert_fits(accuracies_figure({f"method {number}": runs for number in range(8)}, title="a title"))
    assert_fits(comparison_figure({"CGD": [report(dict.fromkeys(names, 0.5))]}, {"CGD": weights}))
    assert_fits(points_figure({"train": dict.fromkeys(names[:8], (np.eye(2), np.arange(2)))}))
    matrix = interactions_figure(np.eye(count), names, title="a title")
    matrix.draw_without_rendering()
    rows = [label.get_window_extent() for label in matrix.axes[0].get_yticklabels()]
    assert not any(above.overlaps(below) for above, below in itertools.pairwise(rows))
    assert min(label.get_fontsize() for label in matrix.axes[0].get_yticklabels()) >= 6


# Machado, Oliveira and Fernandes, 2009: what is seen of linear RGB, severity 1.
VISION = {
    "normal": np.eye(3),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
}


def lab(linear: np.ndarray) -> np.ndarray:
    """CIELAB under D65 of linear sRGB."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ linear.clip(0, 1) / to_xyz.sum(axis=1)
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISION)
def test_colours_are_told_apart_without_red_or_green_cones(vision: str) -> None:
    assert WORST == EXTREMES
    seen = []
    for color in (*PALETTE, MUTED, WORST):
        srgb = np.array([int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)])
        linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
        seen.append(lab(VISION[vision] @ linear))
    # A distance of 2.3 is just seen; 15 is far more, also for thin lines.
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 15


def test_group_colors() -> None:
    assert group_colors(NAMES) == {"land": PALETTE[0], "water": PALETTE[1]}
    assert group_colors(NAMES, ["water"]) == {"land": MUTED, "water": PALETTE[0]}
    assert set(group_colors([str(number) for number in range(60)]).values()) == {MUTED}


def test_of_many_groups_all_that_share_the_lowest_value_are_in_colour() -> None:
    best = dict.fromkeys(map(str, range(12)), 0.9)
    tied = best | {"7": 0.0, "3": 0.0, "5": 0.1}
    figure = comparison_figure({"ERM": [report(tied)], "CGD": [report(best | {"11": 0.5})]})
    grey = to_rgb(MUTED)
    for axes in figure.axes:
        assert [n for n, bar in enumerate(axes.patches) if bar.get_facecolor()[:3] != grey] == [3, 7, 11]
    # Every method's first one comes before the second one of any; there are no more colours than eight.
    many = [best | dict.fromkeys("0123456789", 0.0), best | {"11": 0.0}]
    assert lowest_groups(many) == ["0", "11", "1", "2", "3", "4", "5", "6"]
    assert lowest_groups([best, {}]) == [], "none stands out"


def test_save_writes_png_and_vector_and_makes_the_folder(tmp_path) -> None:
    figure = comparison_figure({"CGD": [report({"land": 0.9, "water": 0.6})]})
    files = save_figure(figure, tmp_path / "new" / "groups.png")
    assert [file.name for file in files] == ["groups.png", "groups.svg"]
    assert files[0].read_bytes().startswith(b"\x89PNG") and "<svg" in files[1].read_text(encoding="utf-8")
    assert save_figure(figure, tmp_path / "groups.pdf", vector="pdf") == [tmp_path / "groups.pdf"]


def test_characters_that_the_font_lacks_are_named_once(tmp_path: Path) -> None:
    figure = Figure()
    figure.suptitle("\ue000 and \ue001, \ue000")  # Private characters, which no font has.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save_figure(figure, tmp_path / "groups.png")
    (message,) = (str(one.message) for one in caught)
    assert "'\\ue000\\ue001'" in message and "boxes in groups.png" in message and "font.family" in message


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: comparison_figure({}), "at least one method"),
        (lambda: comparison_figure({"CGD": []}), "at least one run"),
        (lambda: comparison_figure({"CGD": [report({"a": 0.5})]}, {"ERM": []}), r"histories of \['ERM'\]"),
        (
            lambda: comparison_figure({"CGD": [report({"a": 0.5})], "ERM": [report({"b": 0.5})]}),
            r"'ERM' reports the groups \['b'\], the first method \['a'\]",
        ),
        (lambda: comparison_figure({"CGD": [report({"a": 0.5}), report({"b": 0.5})]}), r"lacks .*\['a'\]"),
        (lambda: comparison_figure({"CGD": [report({})]}), "no group accuracies"),
        (lambda: comparison_figure({"CGD": [report({"a": 0.5})]}, highlight=["z"]), r"\['z'\], which are not among"),
        (lambda: group_colors(list("abcdefghi"), list("abcdefghi")), "At most 8 groups"),
        (lambda: draw_group_weights(axes_of(Figure()), [], {}), "at least one run"),
        (
            lambda: draw_group_weights(
                axes_of(Figure()), [history({"a": [1.0]}), history({"a": [1.0]}, every=5)], {"a": MUTED}
            ),
            "different steps, 10 and 5",
        ),
        (
            lambda: draw_group_weights(axes_of(Figure()), [history({"a": [1.0]}), history({"b": [1.0]})], {}),
            r"different groups, \['a'\] and \['b'\]",
        ),
        (lambda: accuracies_figure({}), "at least one method"),
        (lambda: accuracies_figure({"CGD": []}), "at least one run"),
        (
            lambda: accuracies_figure({"CGD": [history({"a": [1.0]})]}),
            "no eval_group_accuracy/<name>.* eval_strategy",
        ),
        (
            lambda: accuracies_figure({"CGD": [evaluated({"a": [0.5]}, prefix="eval_b")]}),
            r"its prefixes are \['eval_b'\]",
        ),
        (
            lambda: accuracies_figure({"CGD": [evaluated({"a": [0.5] * 2}), evaluated({"a": [0.5] * 3})]}),
            "different steps, 50, 100 and 50, 100, 150; .*eval_steps",
        ),
        (
            lambda: accuracies_figure({"CGD": [evaluated({"a": [0.5]}), evaluated({"b": [0.5]})]}),
            r"different groups, \['a'\] and \['b'\]",
        ),
        (
            lambda: accuracies_figure({"CGD": [evaluated({"a": [0.5]})], "ERM": [evaluated({"b": [0.5]})]}),
            r"'ERM' reports the groups \['b'\], the first method \['a'\]",
        ),
        (
            lambda: accuracies_figure(
                {"CGD": [evaluated({"a": [0.5]})], "ERM": [evaluated({"a": [0.5]}, metric="pearson")]}
            ),
            "'ERM' has another metric than the accuracy",
        ),
        (lambda: accuracies_figure({"CGD": [evaluated({"a": [0.5]})]}, highlight=["z"]), r"\['z'\], which are not"),
        (lambda: sweep_figure({}, xlabel="x", ylabel="y"), "at least one method"),
        (lambda: sweep_figure({"CGD": {}}, xlabel="x", ylabel="y"), "'CGD': expected values at one x"),
        (
            lambda: sweep_figure({"CGD": {0.5: np.array([])}}, xlabel="x", ylabel="y"),
            r"'CGD', x = 0.5: expected one finite value or more, got \[\]",
        ),
        (lambda: sweep_figure({"CGD": {2: np.array([1, np.nan])}}, xlabel="x", ylabel="y"), r"got \[1.0, nan\]"),
    ],
)
def test_errors_say_what_is_wrong(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_pyplot_is_never_imported() -> None:
    code = (
        "import sys, hf_cgd.plots as p; from hf_cgd.metrics import GroupReport, report; "
        "row = report.GroupRow('a', accuracy=0.5); "
        "p.comparison_figure({'CGD': [GroupReport((row,), {}, 'cgd')]}).draw_without_rendering(); "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    run("-c", code)
