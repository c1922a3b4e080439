"""Names of metrics: which there will be, and which one was meant."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from hf_cgd.metrics.group_metrics import is_group_metric

CLOSE = 0.75
"""How alike (in [0, 1]) two names have to be for one to be taken for a slip of the pen."""
SHOWN = 12


def require_known_metric(
    wanted: str, by_set: Mapping[str, Sequence[str]], refuses_unlike: bool, hint: str = ""
) -> None:
    """Raise a ValueError unless one of the evaluation sets will have that metric.

    Args:
        wanted: `metric_for_best_model`, with or without "eval_".
        by_set: names of the metrics of each evaluation set, without prefix; "" names a single one.
        refuses_unlike: whether a name that is like none of them is refused as well; it may be one of the user's own
            metrics, which are not known yet.
        hint: a sentence for the end of the message.
    """
    names = [f"{prefix}_{name}" if prefix else name for prefix, of_set in by_set.items() for name in of_set]
    name = wanted.removeprefix("eval_")
    if name in names or name.endswith(("runtime", "per_second")):
        return
    exact = [known for known in names if known.endswith(f"_{name}")] if list(by_set) != [""] else []
    close = exact or get_close_matches(name, names, n=3, cutoff=CLOSE)
    if not (close or refuses_unlike or is_group_metric(name)):
        return
    meant = f" Did you mean {' or '.join(map(repr, close[:3]))}?" if close else ""
    raise ValueError(
        f"metric_for_best_model={wanted!r} is none of the metrics that the evaluation gives: "
        f"{', '.join(names[:SHOWN])}{', …' if len(names) > SHOWN else ''}.{meant} {hint}".rstrip()
    )
