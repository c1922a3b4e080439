"""How many tokens a network takes: tried with the longest row, before a run or a device meets it."""

from collections.abc import Mapping
from typing import Any

import torch
from datasets import Dataset, DatasetDict
from torch import nn

from hf_cgd.data.lengths import lengths_of
from hf_cgd.models.modes import modes_kept

STATED = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len")
"""What configs call the number of positions."""
MARGIN = 8
"""Positions that some networks keep for other ends than tokens."""
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def require_room_for(model: nn.Module, splits: DatasetDict, option: str, value: int) -> None:
    """Raise a ValueError unless the network takes the longest row of tokens that there is.

    It is tried, since configs do not tell: some state positions of which they keep a few, others take more than they
    state. Rows well below what is stated are not tried.

    Args:
        model: the network.
        splits: of rows with `input_ids`.
        option, value: what sets the length of a row, for the message.
    """
    rows, place, length = _longest(splits)
    stated = {name: most for name in STATED if isinstance(most := getattr(model.config, name, None), int) and most > 0}
    if rows is None or length <= min(stated.values(), default=0) - MARGIN:
        return
    row = rows.with_format(None)[place]
    kept = {name: row[name] for name in INPUTS if name in row and len(row[name]) == length}
    problem = _problem(model, kept, length)
    if problem is None:
        return
    fits = _most_tokens(model, kept, length)
    if fits == 0:
        # Whatever it is, it is not the length; the run will say.
        return
    told = ", ".join(f"{name}={most}" for name, most in stated.items()) or "nothing"
    raise ValueError(
        f"{option}={value}: the longest row has {length} tokens, and the model takes {fits} (its config says {told}): "
        f"{problem}. Set {option}={fits} or less, or name a model of longer texts."
    )


def _longest(splits: Mapping[str, Dataset]) -> tuple[Dataset | None, int, int]:
    """The rows among which the longest one is, its place and its tokens."""
    found: tuple[Dataset | None, int, int] = (None, 0, 0)
    for rows in splits.values():
        lengths = lengths_of(rows, "input_ids")
        if len(lengths) and lengths.max() > found[2]:
            found = (rows, int(lengths.argmax()), int(lengths.max()))
    return found


def _most_tokens(model: nn.Module, row: Mapping[str, list[int]], length: int) -> int:
    """The greatest number of tokens below `length` that the network takes; 0 for none."""
    takes, fails = 0, length
    while fails - takes > 1:
        middle = (takes + fails) // 2
        if _problem(model, row, middle) is None:
            takes = middle
        else:
            fails = middle
    return takes


def _problem(model: Any, row: Mapping[str, list[int]], length: int) -> str | None:
    """What the network says of so many tokens of a row, the last one among them; None where it takes them."""
    # Some networks look for the end of a text.
    batch = {
        name: torch.tensor([[*values[: length - 1], values[-1]]], device=model.device) for name, values in row.items()
    }
    with modes_kept(model), torch.no_grad():
        model.eval()
        try:
            model(**batch)
        except (IndexError, RuntimeError, ValueError) as error:
            return " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return None
