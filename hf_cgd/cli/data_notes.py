"""What a program finds out about its data that bears on the numbers: told once, and kept in card and record."""

import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset

from hf_cgd.cards import load_run
from hf_cgd.data.columns import column_names, read_columns
from hf_cgd.data.groups import GroupInfo
from hf_cgd.data.row_digests import RowDigests
from hf_cgd.monitors import GroupRobustWarning
from hf_cgd.visible_numbers import per_cent
from hf_cgd.visible_text import quoted_name

logger = logging.getLogger(__name__)

LOUD = 0.01
"""From this share of the rows, or of those of one group, on a caution is a warning."""
NAMED = 5
"""Groups that a caution names."""


@dataclass
class DataNotes:
    """What is known of the data of a run.

    Attributes:
        name: what it is called.
        preparation: how inputs were made of the rows, by name: "text_columns", "max_length".
        cautions: sentences on what that keeps the numbers from telling.
        training_rows: by which rows are known again; None where nobody has looked.
        speaks: whether this process tells of cautions.
    """

    name: str | None = None
    preparation: dict[str, Any] = field(default_factory=dict)
    cautions: list[str] = field(default_factory=list)
    training_rows: RowDigests | None = None
    speaks: bool = True

    def add(self, caution: str, advice: str = "", is_loud: bool = True) -> None:
        """Keep a caution, and tell it with what to do."""
        self.cautions.append(caution)
        if not self.speaks:
            return
        told = f"{caution} {advice}".strip()
        if is_loud:
            warnings.warn(told, GroupRobustWarning, stacklevel=3)
        else:
            logger.info(told)

    def add_cut_texts(
        self, cut: Mapping[str, np.ndarray], splits: Mapping[str, Dataset], groups: Sequence[str], max_length: int
    ) -> None:
        """Tell how many texts are longer than `max_length` tokens, in all and of which groups.

        Args:
            cut: by split, which were cut; bool [N].
            splits: the rows.
            groups: columns whose crossing makes the groups.
            max_length: the tokens that are left of them.
        """
        self.preparation["max_length"] = max_length
        shares = {split: GroupShares.of(one, splits[split], groups) for split, one in cut.items() if one.any()}
        if shares:
            told = "; ".join(f"{split}: {share}" for split, share in shares.items())
            self.add(
                f"Texts of more than {max_length} tokens were cut, and the rest was not read. {told}.",
                "Groups with longer texts are hurt more. --max_length sets the number of tokens.",
                any(share.greatest >= LOUD for share in shares.values()),
            )

    def add_other_texts(
        self, trained_as: Mapping[str, Any], columns: Sequence[str], max_length: int | None = None
    ) -> None:
        """Tell where a model is given other texts than in its training.

        Args:
            trained_as: how inputs were made then, see `preparation_of`.
            columns: of the texts.
            max_length: of them; None where another one is meant.
        """
        then, length = trained_as.get("text_columns", columns), trained_as.get("max_length")
        if len(then) != len(columns):
            self.add(
                f"The model was trained on {', '.join(then)}, and is given {', '.join(columns)} here.",
                "Name as many columns: --text_column, and --text_pair_column for pairs.",
            )
        if None not in (length, max_length) and length != max_length:
            self.add(
                f"The model was trained on texts of at most {length} tokens, and is given up to {max_length} here.",
                f"Repeat the option of its training: --max_length {length}.",
            )

    def add_training_rows(self, split: str, digests: np.ndarray, rows: Dataset, groups: Sequence[str]) -> None:
        """Tell how many rows of a split are training rows.

        Args:
            split: its name.
            digests: of its rows, [N].
            rows: the split.
            groups: columns whose crossing makes the groups.
        """
        if self.training_rows is None:
            return
        looked_up, seen = self.training_rows.found_in(digests)
        if not seen.any():
            return
        share = GroupShares.of(seen, rows, groups, None if looked_up.all() else looked_up)
        part = "" if looked_up.all() else f" Of {len(rows):,} rows {share.rows:,} could be looked up."
        self.add(
            f"The model was trained on inputs that are in the {split} set as well, so its numbers there flatter it. "
            f"{split}: {share}.{part}",
            "Take such rows out of one of the two.",
            share.greatest >= LOUD,
        )


def preparation_of(model: str | Path) -> Mapping[str, Any]:
    """How inputs were made when a model was trained; {} where that is not known.

    Args:
        model: folder of a run or of one of its checkpoints, or id on the Hub.
    """
    place = Path(model)
    try:
        record = load_run(place.parent if place.is_dir() and place.name.startswith("checkpoint-") else model)
    except (OSError, ValueError):
        # No run of ours, or the Hub cannot be asked.
        return {}
    return {} if record.objective is None else record.data.preparation


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

    def __str__(self) -> str:
        whole = f"{self.hits:,} of {self.rows:,} ({per_cent(self.hits / max(self.rows, 1))})"
        found = sorted(((h / size, size, name) for name, (h, size) in self.by_group.items() if h), reverse=True)
        if len(self.by_group) < 2:
            return whole
        told = [f"{quoted_name(name)} {per_cent(share)} of {size:,}" for share, size, name in found[:NAMED]]
        more = f" and {len(found) - NAMED} more groups" if len(found) > NAMED else ""
        none = len(self.by_group) - len(found)
        return f"{whole}; {', '.join(told)}{more}{f', no row of {none} other(s)' if none else ''}"
