"""`hf-cgd groups`: what there is to know of groups before anything is trained."""

from collections.abc import Sequence
from typing import Any

from hf_cgd.cli.parser import add_columns, add_data, parser_of


def main(words: Sequence[str]) -> dict[str, Any]:
    """Print what there is to know of the groups, and return it, JSON-ready."""
    parser = parser_of(
        "groups",
        "Look at the groups of a data set before anything is trained: counts, label x group, suspicious correlations\n"
        "of label and group, groups too small to trust, and what to do. Without --group_column it looks at every\n"
        "column that may be one.",
        (
            "groups reviews.csv",
            "groups reviews.csv --label_column mood --group_column place",
            "groups my/images --group_column hospital sex --json",
        ),
    )
    add_data(parser)
    add_columns(parser)
    parser.add_argument("--split", help="train, validation or test; by default train, else all there is.")
    own = parser.parse_args(words)
    from hf_cgd.cli.group_facts import look, told

    found = look(own.data, own.dataset_config, own.label_column, own.group_column, own.split)
    print(told(found))
    return found.to_dict()
