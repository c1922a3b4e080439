"""Training a language model on several sources, so that the one it does worst on does well."""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    default_data_collator,
    set_seed,
)

from hf_cgd.cli.command_line import parse_command_line, readable_errors
from hf_cgd.cli.text_length import require_room_for
from hf_cgd.cli.training import BEST_WORST_GROUP, run
from hf_cgd.data.text_sources import SOURCE, demo_sources, held_out, read_sources, splits_of
from hf_cgd.trainer.trainer import GroupRobustTrainer
from hf_cgd.whole_files import write_whole

logger = logging.getLogger(__name__)

MIXTURE_FILE = "mixture.json"
"""In output_dir: the mean weights of the sources over the run, as proportions to draw them in."""
END = "<|endoftext|>"


@dataclass
class LanguageModelOptions:
    """Options of training a language model on several sources."""

    sources: list[str] | None = field(
        default=None,
        metadata={
            "nargs": "+",
            "help": "name=path of each source: a folder of text files (a document each), a CSV, JSONL or Parquet "
            "table, or a file with a document in every line. Required, unless --demo.",
        },
    )
    text_column: str = field(default="text", metadata={"help": "Column of the texts in tables."})
    demo: bool = field(
        default=False, metadata={"help": "Train on docstrings, code and licences of installed packages instead."}
    )
    model: str | None = field(
        default=None,
        metadata={"help": "Hub id or local folder of a causal model; none for a small GPT-2 from scratch."},
    )
    reference_model: str | None = field(
        default=None,
        metadata={"help": "Causal model of the same tokenizer; group weights see the losses in excess of its own."},
    )
    block_length: int = field(default=128, metadata={"help": "Tokens of a row."})
    validation_share: float = field(default=0.1, metadata={"help": "Share of each source's documents held out."})
    vocab_size: int = field(default=4096, metadata={"help": "Tokens of the tokenizer of a model from scratch."})
    width: int = field(default=256, metadata={"help": "Width of a model from scratch."})
    depth: int = field(default=4, metadata={"help": "Layers of a model from scratch."})
    heads: int = field(default=4, metadata={"help": "Attention heads of a model from scratch."})


DEFAULTS: dict[str, Any] = BEST_WORST_GROUP | {
    "output_dir": "outputs/language_model",
    "metric_for_best_model": "worst_group_loss",
    "group_column": [SOURCE],
    "learning_rate": 1e-3,
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 64,
}


def main(arguments: Sequence[str] | None = None) -> GroupRobustTrainer:
    """Train, report every source's loss and perplexity, and write the mixture; the trainer."""
    own, config = parse_command_line(LanguageModelOptions, DEFAULTS, arguments)
    with readable_errors(own, config), config.main_process_first():
        _require_sensible(own)
        documents = demo_sources() if own.demo else read_sources(own.sources or (), own.text_column)
        parts = {name: held_out(texts, own.validation_share) for name, texts in documents.items()}
        train = {name: part[0] for name, part in parts.items()}
        tokenizer = tokenizer_for(own, train)
        assert isinstance(tokenizer.eos_token_id, int)
        splits = splits_of(
            train,
            {name: part[1] for name, part in parts.items()},
            lambda text: tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"],
            tokenizer.eos_token_id,
            own.block_length,
        )
        set_seed(config.seed)
        model = model_for(own, tokenizer)
        reference = None if own.reference_model is None else AutoModelForCausalLM.from_pretrained(own.reference_model)
        for one in (model, reference):
            if one is not None:
                require_room_for(one, splits, "block_length", own.block_length)
    options: dict[str, Any] = {} if reference is None else {"reference_losses": reference}
    trainer = run(config, model, splits, processing_class=tokenizer, data_collator=default_data_collator, **options)
    if trainer.group_weights is not None and trainer.is_world_process_zero():
        assert config.output_dir is not None
        text = json.dumps(trainer.mixture(), ensure_ascii=False, indent=2)
        write_whole(Path(config.output_dir) / MIXTURE_FILE, text + "\n")
    return trainer


def _require_sensible(own: LanguageModelOptions) -> None:
    if own.demo == bool(own.sources):
        raise ValueError(
            "Name the sources, such as --sources news=news.txt code=folder, or take --demo true; not both."
        )
    if own.block_length < 2:
        raise ValueError(f"block_length must be at least 2, got {own.block_length}.")
    if not 0 < own.validation_share < 1:
        raise ValueError(f"validation_share must lie between 0 and 1, got {own.validation_share}.")


def tokenizer_for(own: LanguageModelOptions, documents: Mapping[str, Iterable[str]]) -> PreTrainedTokenizerBase:
    """The tokenizer of the model, or one of bytes and pairs that is trained on the documents.

    Raises:
        ValueError: a tokenizer without a token for the end of a text.
    """
    if own.model is not None:
        known = AutoTokenizer.from_pretrained(own.model)
        if known.eos_token_id is None:
            raise ValueError(f"The tokenizer of {own.model} has no token for the end of a text (eos_token).")
        return known
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=own.vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator((text for texts in documents.values() for text in texts), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=END, bos_token=END, pad_token=END)


def model_for(own: LanguageModelOptions, tokenizer: PreTrainedTokenizerBase) -> nn.Module:
    """The causal model that is named, or a small GPT-2 with weights that are drawn, without dropout."""
    if own.model is not None:
        return AutoModelForCausalLM.from_pretrained(own.model)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=own.block_length, n_embd=own.width, n_layer=own.depth, n_head=own.heads,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)
