"""How many rows something concerns, in all and of each group, in numbers and words."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from datasets import Dataset

from hf_cgd.data.columns import column_names, read_columns
from hf_cgd.data.groups import GroupInfo
from hf_cgd.monitors import GroupRobustWarning
from hf_cgd.visible_numbers import per_cent
from hf_cgd.visible_text import quoted_name

LOUD = 0.01
"""From this share of the rows, or of those of one group, on a caution is a warning."""
NAMED = 5
"""Groups that a caution names."""


@dataclass(frozen=True)
class GroupShares:
    """How many rows are concerned, in all and of each group."""

    hits: int
    rows: int
    by_group: Mapping[str, tuple[int, int]]
    """Hits and rows of each group; {} where the groups are not known."""

    @classmethod
    def of(
        cls, hit: np.ndarray, rows: Dataset, columns: Sequence[str], among: np.ndarray | None = None
    ) -> "GroupShares":
        """Count.

        Args:
            hit: which rows are concerned; bool [N].
            rows: the N rows.
            columns: group columns.
            among: which of the rows count; bool [N], None for all.
        """
        counted = np.ones(len(rows), dtype=bool) if among is None else among
        by_group = {}
        if columns and set(columns) <= set(column_names(rows) or ()):
            try:
                with warnings.catch_warnings():
                    # Whoever evaluates the groups tells these things.
                    warnings.simplefilter("ignore", GroupRobustWarning)
                    read = read_columns(rows, columns)
                    groups = GroupInfo.from_columns(read)
                    ids = groups.encode_columns(read)
            except ValueError:
                # Of values that name no group it is told elsewhere.
                return cls(int(hit.sum()), int(counted.sum()), {})
            hits, sizes = (np.bincount(ids[one], minlength=len(groups)).tolist() for one in (hit, counted))
            by_group = {n: (h, size) for n, h, size in zip(groups.names, hits, sizes, strict=True) if size}
        return cls(int(hit.sum()), int(counted.sum()), by_group)

    @property
    def greatest(self) -> float:
        """The greatest share, of all rows or of one group."""
        return max([self.hits / max(self.rows, 1), *(hits / size for hits, size in self.by_group.values())])

    @property
    def is_loud(self) -> bool:
        """Whether so many are concerned that it is to be warned of."""
        return self.greatest >= LOUD

    def __str__(self) -> str:
        whole = f"{self.hits:,} of {self.rows:,} ({per_cent(self.hits / max(self.rows, 1))})"
        found = sorted(((h / size, size, name) for name, (h, size) in self.by_group.items() if h), reverse=True)
        if len(self.by_group) < 2:
            return whole
        told = [f"{quoted_name(name)} {per_cent(share)} of {size:,}" for share, size, name in found[:NAMED]]
        more = f" and {len(found) - NAMED} more groups" if len(found) > NAMED else ""
        none = len(self.by_group) - len(found)
        return f"{whole}; {', '.join(told)}{more}{f', no row of {none} other(s)' if none else ''}"


def told_of_cut_texts(shares: Mapping[str, GroupShares], max_length: int) -> tuple[str, str, bool]:
    """That texts were cut: the sentences, what to think of, and whether it is to be warned of.

    Args:
        shares: of the rows that were, by split.
        max_length: the tokens that are left of them.
    """
    told = "; ".join(f"{split}: {share}" for split, share in shares.items())
    return (
        f"Texts of more than {max_length} tokens were cut, and the rest was not read. {told}.",
        "Groups with longer texts are hurt more.",
        any(share.is_loud for share in shares.values()),
    )
