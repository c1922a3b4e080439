"""Data for supervised fine-tuning of language models, prepared by trl's `SFTTrainer`, with groups.

Only the preparation is trl's: chat templates, end-of-text tokens, masks of completions or of the assistant's turns,
truncation, packing. Training is `GroupRobustTrainer`'s. A trainer that is both would depend on the inside of
`SFTTrainer`, whose `compute_loss` has been rewritten between releases: in 1.16 it takes log-probabilities of a head
that never forms logits, and `compute_loss_func` goes with 2.0. What is used here is public and old: the constructor,
`train_dataset`, `eval_dataset` and `data_collator`.
"""

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
from accelerate.state import AcceleratorState, GradientState, PartialState
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerBase

from hf_cgd.data.group_shares import GroupShares, told_of_cut_texts
from hf_cgd.data.lengths import lengths_of
from hf_cgd.data.training_groups import is_stream
from hf_cgd.monitors import GroupRobustWarning

logger = logging.getLogger(__name__)

PACKING = "wrapped"
"""The strategy of packing whose rows are examples of equal length."""
ROW = "row (hf_cgd)"
"""A column that holds, while rows are cut, which they were."""


@dataclass(frozen=True)
class SFTData:
    """What `GroupRobustTrainer` is given in the place of the raw data.

    Attributes:
        train_dataset: rows with `input_ids`, `labels` (-100 where a token does not count) and the group columns.
        eval_dataset: the same; None for none.
        data_collator: pads them.
        cautions: sentences on what was cut of the texts, for `GroupRobustTrainer.data_cautions`.
    """

    train_dataset: Any
    eval_dataset: Any
    data_collator: Any
    cautions: Sequence[str] = ()


def prepare_sft(
    train_dataset: Any,
    processing_class: PreTrainedTokenizerBase,
    group_column: str | Sequence[str],
    eval_dataset: Any = None,
    formatting_func: Callable[[dict[str, Any]], str] | None = None,
    **options: Any,
) -> SFTData:
    """Texts, chats or prompts with completions, made ready to train on by trl's `SFTTrainer`.

        data = prepare_sft(train, tokenizer, "source", assistant_only_loss=True, max_length=512)
        trainer = GroupRobustTrainer(model, args, train_dataset=data.train_dataset, data_collator=data.data_collator,
                                     group_column="source")
        trainer.data_cautions = data.cautions

    Texts longer than `max_length` tokens (by default trl's) are cut, and rows of which nothing is left that counts are
    dropped. How many of which groups is told, by a warning where it is one in a hundred or more.

    Args:
        train_dataset: in a format of trl: `text`, `messages`, or `prompt` and `completion`; and the group column(s).
        processing_class: the tokenizer.
        group_column: column(s) that hold the group. With `packing` every group is packed by itself, so that a row
            belongs to one group.
        eval_dataset: the same; None for none.
        formatting_func: see `SFTTrainer`.
        options: those of `SFTConfig` that concern the data: `max_length`, `completion_only_loss`,
            `assistant_only_loss`, `packing`, `packing_strategy`, `chat_template_path`, `dataset_text_field`, …

    Raises:
        ImportError: trl is not installed.
        ValueError: a group column is missing, or rows would not be examples: `padding_free`, or `packing` other than
            `packing_strategy="wrapped"`, whose batches are one row for all groups.
    """
    try:
        from trl import SFTConfig, SFTTrainer
    except ImportError as error:
        raise ImportError("prepare_sft needs trl: pip install 'hf-cgd[trl]'.") from error
    columns = [group_column] if isinstance(group_column, str) else list(group_column)
    packs = bool(options.get("packing"))
    _require_rows_that_are_examples(options, processing_class)
    for name, dataset in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):
        missing = [
            column for column in columns if dataset is not None and column not in (dataset.column_names or columns)
        ]
        if missing:
            raise ValueError(
                f"{name} has no column {missing}, which group_column names; it has {dataset.column_names}."
            )
    # A number of steps is asked for where a stream has no length; none is taken.
    quiet = {"bf16": False, "fp16": False, "report_to": [], "max_steps": 1, **options}

    def prepare(train: Any, evaluation: Any, **others: Any) -> SFTData:
        with tempfile.TemporaryDirectory() as folder, _state_of_accelerate_kept():
            trainer = SFTTrainer(
                model=_placeholder(processing_class),
                args=SFTConfig(folder, **{**quiet, **others}),
                train_dataset=train,
                eval_dataset=evaluation,
                processing_class=processing_class,
                formatting_func=None if _has_tokens(train) else formatting_func,
            )
        return SFTData(trainer.train_dataset, trainer.eval_dataset, trainer.data_collator)

    if not packs:
        return _prepared_and_cut(prepare, train_dataset, eval_dataset, columns, SFTConfig.max_length, options)
    packs_eval = options.get("eval_packing") in (None, True)
    whole = prepare(train_dataset.select(range(1)), None if packs_eval else eval_dataset)
    return SFTData(
        _packed_by_group(lambda rows: prepare(rows, None).train_dataset, train_dataset, columns),
        whole.eval_dataset
        if not packs_eval or eval_dataset is None
        else _packed_by_group(lambda rows: prepare(rows, None).train_dataset, eval_dataset, columns),
        whole.data_collator,
    )


def _require_rows_that_are_examples(options: dict[str, Any], processing_class: Any) -> None:
    if options.get("padding_free"):
        raise ValueError(
            "padding_free=True makes one row of a whole batch, whose examples are of different groups. Leave it unset."
        )
    if options.get("packing") and options.get("packing_strategy") != PACKING:
        raise ValueError(
            f"packing with packing_strategy={options.get('packing_strategy', 'bfd')!r} makes one row of a whole batch "
            f"(padding-free), whose examples belong to different groups. Use packing_strategy={PACKING!r}, where each "
            "group is packed by itself, or packing=False."
        )
    if not isinstance(processing_class, PreTrainedTokenizerBase):
        raise ValueError(
            f"prepare_sft prepares text and needs a tokenizer, got {type(processing_class).__name__}. Pass the "
            "processor's tokenizer, or prepare images in a collator of your own."
        )


def _has_tokens(dataset: Any) -> bool:
    return "input_ids" in (dataset.column_names or ())


def _prepared_and_cut(
    prepare: Callable[..., SFTData],
    train: Any,
    evaluation: Any,
    columns: Sequence[str],
    default: int | None,
    options: dict[str, Any],
) -> SFTData:
    """The rows made ready whole, and then cut, so that it can be told which were: trl itself says nothing."""
    max_length = options.get("max_length", default)
    if max_length is None:
        return prepare(train, evaluation)
    if is_stream(train) or (evaluation is not None and is_stream(evaluation)):
        logger.info("prepare_sft: the texts of a stream are cut at %d tokens, and not counted", max_length)
        return prepare(train, evaluation)
    whole = prepare(train, evaluation, max_length=None, shuffle_dataset=False)
    before = {"train_dataset": whole.train_dataset, "eval_dataset": whole.eval_dataset}
    before = {name: rows for name, rows in before.items() if rows is not None and _has_tokens(rows)}
    if "train_dataset" not in before:
        # trl was told to prepare nothing.
        return whole
    numbered = {name: rows.add_column(ROW, range(len(rows))) for name, rows in before.items()}
    # What counts has been marked.
    marked = {"assistant_only_loss": False, "completion_only_loss": False}
    found = prepare(numbered["train_dataset"], numbered.get("eval_dataset"), **marked)
    after = {"train_dataset": found.train_dataset, "eval_dataset": found.eval_dataset}
    cut: dict[str, GroupShares] = {}
    dropped: dict[str, GroupShares] = {}
    for name, rows in before.items():
        long = lengths_of(rows, "input_ids") > max_length
        gone = ~np.isin(np.arange(len(rows)), after[name][ROW][:])
        cut |= {name: GroupShares.of(long, rows, columns)} if long.any() else {}
        dropped |= {name: GroupShares.of(gone, rows, columns)} if gone.any() else {}
        after[name] = after[name].remove_columns([ROW])
    return SFTData(**after, data_collator=whole.data_collator, cautions=_told(cut, dropped, max_length))


def _told(cut: dict[str, GroupShares], dropped: dict[str, GroupShares], max_length: int) -> list[str]:
    """Tell of rows that were cut, and of those that were dropped then; the sentences."""
    cautions = []
    if cut:
        caution, advice, is_loud = told_of_cut_texts(cut, max_length)
        cautions.append(caution)
        _tell(f"{caution} {advice} max_length sets the number of tokens.", is_loud)
    if dropped:
        caution = "Rows of which the cut left no token that counts were dropped. "
        caution += "; ".join(f"{name}: {share}" for name, share in dropped.items()) + "."
        cautions.append(caution)
        _tell(f"{caution} Raise max_length, or set truncation_mode='keep_end'.", True)
    return cautions


def _tell(words: str, is_loud: bool) -> None:
    if is_loud:
        warnings.warn(words, GroupRobustWarning, stacklevel=5)
    else:
        logger.info(words)


def _packed_by_group(pack: Callable[[Any], Any], dataset: Any, columns: Sequence[str]) -> Any:
    """The rows of each group packed by themselves, with the group's values."""
    places: dict[tuple[Any, ...], list[int]] = {}
    for row, key in enumerate(zip(*(dataset[column][:] for column in columns), strict=True)):
        places.setdefault(key, []).append(row)
    parts = []
    for key, rows in places.items():
        packed = pack(dataset.select(rows)).select_columns(["input_ids", "labels"])
        for column, value in zip(columns, key, strict=True):
            packed = packed.add_column(column, [value] * len(packed)).cast_column(column, dataset.features[column])
        parts.append(packed)
    return datasets.concatenate_datasets(parts)


def _placeholder(tokenizer: PreTrainedTokenizerBase) -> GPT2LMHeadModel:
    """The smallest model that `SFTTrainer` takes; it is never run."""
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_positions=8, n_embd=2, n_layer=1, n_head=1,
                   bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    )  # fmt: skip


@contextmanager
def _state_of_accelerate_kept() -> Iterator[None]:
    """Afterwards accelerate knows the device and precision it knew: a second config would decide for the first."""
    kinds = (PartialState, AcceleratorState, GradientState)
    before = [dict(kind._shared_state) for kind in kinds]
    try:
        yield
    finally:
        for kind, state in zip(kinds, before, strict=True):
            kind._shared_state.clear()
            kind._shared_state.update(state)
