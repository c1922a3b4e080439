"""Tables of the simple settings, and what their pictures show."""

from collections.abc import Iterable, Sequence

import numpy as np

from hf_cgd.experiments.studies.simple_settings.data import SETTINGS, SettingName, draw
from hf_cgd.experiments.studies.simple_settings.training import Result, chosen, solution_variance
from hf_cgd.metrics.tables import markdown, mean_and_deviation
from hf_cgd.objectives import searched_knob


def table(results: Sequence[Result]) -> str:
    """The paper's Table 1 in Markdown: a row for each objective, under it the paper's where it has one.

    Args:
        results: at most one of each setting and objective, as `chosen` gives them.
    """
    settings = [name for name in SETTINGS if any(result.setting == name for result in results)]
    titles = [SETTINGS[name].title for name in settings]
    rows = [["", *(f"{title} {column}" for title in titles for column in ("variance", "worst loss"))]]
    for objective in dict.fromkeys(result.objective for result in results):
        own, papers = [objective], [f"{objective}, paper"]
        for name in settings:
            result = next((r for r in results if (r.setting, r.objective) == (name, objective)), None)
            paper = SETTINGS[name].published.get(objective)
            own += ["", ""] if result is None else _cells(result)
            papers += ["", ""] if paper is None else paper.cells()
        rows += [own, papers] if any(papers[1:]) else [own]
    return markdown(rows)


def search_table(results: Sequence[Result]) -> str:
    """Every value that was tried, in Markdown: losses on validation and test, and where the group weight went.

    The value that validation chooses is in bold. Group weights are means over epochs and seeds.
    """
    best = chosen(results)
    rows = [["setting", "objective", "value", "validation", "test", "variance", "group weights"]]
    for result in results:
        value = "" if result.value is None else f"{result.value:g}"
        weights = result.mean_weights()
        rows.append(
            [
                SETTINGS[result.setting].title,
                result.objective,
                f"**{value}**" if value and any(result is other for other in best) else value,
                mean_and_deviation(result.validation),
                mean_and_deviation(result.test),
                f"{solution_variance(result.solutions):.3f}",
                "" if weights is None else " / ".join(f"{weight:.2f}" for weight in weights),
            ]
        )
    return markdown(rows)


def weight_panels(results: Iterable[Result]) -> dict[str, dict[str, list[list[dict[str, float]]]]]:
    """Log histories by objective and value, for `hf_cgd.plots.weights_figure`; without objectives without weights."""
    panels: dict[str, dict[str, list[list[dict[str, float]]]]] = {}
    for result in results:
        if histories := result.log_histories():
            knob = (searched_knob(result.objective) or "").replace("_", " ")
            variant = "" if result.value is None else f"{knob} {result.value:g}"
            panels.setdefault(result.objective, {})[variant] = histories
    return panels


def point_panels(settings: Iterable[SettingName], seed: int) -> dict[str, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """The first two features and the labels of the training points by setting and group, for `points_figure`."""
    panels: dict[str, dict[str, tuple[np.ndarray, np.ndarray]]] = {}
    for setting in settings:
        points = draw(setting, "train", seed)
        panels[SETTINGS[setting].title] = {
            group: (points.features[points.group_ids == place, :2], points.labels[points.group_ids == place])
            for place, group in enumerate(SETTINGS[setting].groups)
        }
    return panels


def _cells(result: Result) -> list[str]:
    return [f"{solution_variance(result.solutions):.3f}", mean_and_deviation(result.test)]
