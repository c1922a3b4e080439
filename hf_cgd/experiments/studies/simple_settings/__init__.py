"""The three simple settings of the CGD paper (section 4, appendix C): a linear classifier on points, three groups.

Noise-Simple: one training label in five of the first group is wrong. Rotation-Simple: the rule that gives the label
turns by 30 degrees from group to group, and the last group has two examples. Spurious-Simple: a third feature is the
label in the first group, tells little in the second and is the opposite label in the third. Metric: the cross-entropy
of the worst group on 10,000 test points.

Not in the text, and as in the authors' released data code: validation and test in thirds, 1,000 and 10,000 points
(there the validation set of Noise-Simple is 200 points in the shares of training); two class scores; in validation
and test of Spurious-Simple the first two features give the label in all groups. Group sizes are exact here, as in the
text; the released code draws the group of each point.
"""

from hf_cgd.experiments.studies.simple_settings.data import (
    SETTINGS,
    Points,
    Published,
    Setting,
    SettingName,
    SplitName,
    draw,
)
from hf_cgd.experiments.studies.simple_settings.tables import point_panels, search_table, table, weight_panels
from hf_cgd.experiments.studies.simple_settings.training import (
    EPOCHS,
    LEARNING_RATE,
    SEARCH,
    SEEDS,
    Fit,
    Result,
    chosen,
    evaluate,
    fit,
    search_values,
    solution_variance,
    worst_group_loss,
)

__all__ = [
    "EPOCHS",
    "LEARNING_RATE",
    "SEARCH",
    "SEEDS",
    "SETTINGS",
    "Fit",
    "Points",
    "Published",
    "Result",
    "Setting",
    "SettingName",
    "SplitName",
    "chosen",
    "draw",
    "evaluate",
    "fit",
    "point_panels",
    "search_table",
    "search_values",
    "solution_variance",
    "table",
    "weight_panels",
    "worst_group_loss",
]
