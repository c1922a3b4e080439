"""Fine-tune a text classifier on your own data so that its worst group does well.

accelerate launch recipes/text_classification.py --dataset reviews.csv --group_column label place
python recipes/text_classification.py --dataset my/folder --label_column mood --model my/minilm --objective group_dro
python recipes/text_classification.py recipes/configs/text_classification.yaml --dataset owner/name
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import set_seed

from hf_cgd import GroupRobustTrainer
from hf_cgd.cli import BEST_WORST_GROUP, parse_command_line, readable_errors, run, text_classifier
from hf_cgd.cli.data_check import DATA_CHECK_HELP, DataCheck, load_checked
from hf_cgd.data import sources

DEFAULTS = BEST_WORST_GROUP | {
    "output_dir": "outputs/text_classification",
    "learning_rate": 2e-5,
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 64,
}


@dataclass
class Options:
    dataset: str | None = field(
        default=None,
        metadata={"help": "CSV, JSONL or Parquet file; folder of train/validation/test files; or Hub id. Required."},
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of a dataset on the Hub."})
    model: str = field(default="distilbert-base-uncased", metadata={"help": "Hub id or local folder."})
    text_column: str = field(default="text", metadata={"help": "Column of the texts."})
    text_pair_column: str | None = field(default=None, metadata={"help": "Column of second texts, for pairs."})
    label_column: str = field(default="label", metadata={"help": "Column of the classes: integers or strings."})
    max_length: int = field(default=128, metadata={"help": "Tokens of a text; longer ones are cut."})
    data_check: DataCheck = field(default="stop", metadata={"help": DATA_CHECK_HELP})


def main(arguments: Sequence[str] | None = None) -> GroupRobustTrainer:
    own, config = parse_command_line(Options, DEFAULTS, arguments)
    with readable_errors(own, config), config.main_process_first():
        columns = {name: getattr(own, name) for name in ("text_column", "text_pair_column", "label_column")}
        texts = [column for column in (own.text_column, own.text_pair_column) if column is not None]
        splits = load_checked(own.dataset, own.dataset_config, columns, config, own.data_check, texts)
        sources.require_text(splits, [own.text_column, own.text_pair_column])
        set_seed(config.seed)
        model, tokenizer = text_classifier(own.model, splits["train"].features["label"].names)
        splits = splits.map(
            lambda rows: tokenizer(*(rows[column] for column in texts), truncation=True, max_length=own.max_length),
            batched=True,
        )
    return run(config, model, splits, processing_class=tokenizer)


if __name__ == "__main__":
    main()
