"""MultiNLI whose negated hypotheses do not all read as contradictions: six groups, label x negation.

accelerate launch recipes/multinli_cgd.py --objective cgd --step_size 0.01
python recipes/multinli_cgd.py --demo --objective group_dro      # offline, about a minute
python recipes/multinli_cgd.py recipes/configs/multinli_paper.yaml --data_dir my/multinli
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import DistilBertConfig, DistilBertForSequenceClassification, PreTrainedTokenizerFast

from hf_cgd import GroupRobustTrainer
from hf_cgd.cli import parse_command_line, readable_errors, run, task_options, text_classifier
from hf_cgd.tasks.multinli import MultiNLI
from hf_cgd.tasks.multinli_demo import LABELS, demo_tokenizer


@dataclass
class Options:
    model: str | None = field(default=None, metadata={"help": "Hub id or local folder; None for the preset's."})
    data_dir: str | None = field(
        default=None,
        metadata={"help": "Folder of train, validation_matched and validation_mismatched (JSONL or Parquet)."},
    )
    preset: Literal["group_dro", "paper"] = field(
        default="group_dro",
        metadata={"help": "Hyperparameters: 'group_dro' (BERT, AdamW) or 'paper' (DistilBERT, SGD)."},
    )
    resplit: bool = field(default=False, metadata={"help": "50/20/30 at random over all parts, by the run's seed."})
    max_length: int = field(default=128, metadata={"help": "Tokens of a pair; longer ones are cut."})
    demo: bool = field(default=False, metadata={"help": "Made-up sentences and a tiny untrained model; offline."})


def defaults(chosen: Namespace) -> dict[str, Any]:
    return task_options(MultiNLI(), "demo" if chosen.demo else chosen.preset, chosen.objective)


def demo_classifier() -> tuple[torch.nn.Module, PreTrainedTokenizerFast]:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=demo_tokenizer(),
        **{f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep")},
    )
    size: dict[str, Any] = {"dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4, "vocab_size": len(tokenizer)}
    size |= dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout"), 0.0)
    config = DistilBertConfig(id2label=dict(enumerate(LABELS)), **size)
    return DistilBertForSequenceClassification(config), tokenizer


def main(arguments: Sequence[str] | None = None) -> GroupRobustTrainer:
    own, config = parse_command_line(Options, defaults, arguments)
    task = MultiNLI(resplit=own.resplit, seed=config.seed)
    with readable_errors(own, config, spellings={"source=demo": "--demo"}), config.main_process_first():
        splits = task.load("demo") if own.demo else task.load(data_dir=own.data_dir)
        torch.manual_seed(config.seed)
        model, tokenizer = (
            demo_classifier() if own.demo and own.model is None else text_classifier(own.model, task.info.label_names)
        )
        splits = splits.map(
            lambda rows: tokenizer(rows["premise"], rows["hypothesis"], truncation=True, max_length=own.max_length),
            batched=True,
        )
    return run(config, model, splits, processing_class=tokenizer)


if __name__ == "__main__":
    main()
