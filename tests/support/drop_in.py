"""Training scripts as they are found beside transformers, in words of our own. Only two classes differ between a run on
the plain Trainer and one on hf_cgd: the trainer's and that of its arguments.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Image, load_dataset
from torchvision.transforms import v2
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint


@dataclass
class DataOptions:
    model: str = field(metadata={"help": "Folder of the model."})
    train_file: str
    validation_file: str
    test_file: str
    max_length: int = 12


@dataclass
class EntityOptions:
    model: str = field(metadata={"help": "Folder of the model."})
    train_file: str
    validation_file: str
    every_piece: bool = field(default=False, metadata={"help": "Label all pieces of a word, not the first alone."})


@dataclass
class ImageOptions:
    model: str = field(metadata={"help": "Folder of the model and of its image processor."})
    table: str = field(metadata={"help": "Columns image, label, and what else there is."})
    size: int = 16


Parsed = tuple[Any, Any]


def parsed(options: type, arguments_class: type, line: Sequence[str]) -> Parsed:
    found: Parsed = HfArgumentParser((options, arguments_class)).parse_args_into_dataclasses(list(line))
    set_seed(found[1].seed)
    return found


def last_checkpoint(arguments: Any) -> str | None:
    if arguments.resume_from_checkpoint is not None:
        return str(arguments.resume_from_checkpoint)
    return get_last_checkpoint(arguments.output_dir) if Path(arguments.output_dir).is_dir() else None


def share_right(prediction: EvalPrediction) -> dict[str, float]:
    scores = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    return {"share_right": float((np.argmax(scores, axis=1) == prediction.label_ids).mean())}


def text_script(
    trainer_class: Callable[..., Trainer], arguments_class: type, line: Sequence[str], **more: Any
) -> Trainer:
    """Fine-tunes on sentences of CSV files whose labels are words, evaluates, predicts a file without labels, pushes."""
    data, arguments = parsed(DataOptions, arguments_class, line)
    files = {"train": data.train_file, "validation": data.validation_file, "test": data.test_file}
    raw = load_dataset("csv", data_files=files, cache_dir=str(Path(arguments.output_dir).parent / "cache"))
    classes = sorted(raw["train"].unique("mood"))
    numbers = {name: number for number, name in enumerate(classes)}
    config = AutoConfig.from_pretrained(data.model, num_labels=len(classes), label2id=numbers,
                                        id2label=dict(enumerate(classes)))  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(data.model)
    model = AutoModelForSequenceClassification.from_pretrained(data.model, config=config, ignore_mismatched_sizes=True)

    def prepared(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        found = tokenizer(rows["sentence"], truncation=True, max_length=data.max_length)
        return {**found, "label": [numbers[name] for name in rows["mood"]]}

    raw = raw.map(prepared, batched=True)
    trainer = trainer_class(
        model=model,
        args=arguments,
        train_dataset=raw["train"] if arguments.do_train else None,
        eval_dataset=raw["validation"] if arguments.do_eval else None,
        compute_metrics=share_right,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        **more,
    )
    if arguments.do_train:
        result = trainer.train(resume_from_checkpoint=last_checkpoint(arguments))
        result.metrics["train_samples"] = len(raw["train"])
        trainer.save_model()
        trainer.log_metrics("train", result.metrics)
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if arguments.do_eval:
        metrics = trainer.evaluate(eval_dataset=raw["validation"])
        metrics["eval_samples"] = len(raw["validation"])
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)
    if arguments.do_predict:
        unlabelled = raw["test"].remove_columns("label")
        scores = trainer.predict(unlabelled, metric_key_prefix="predict").predictions
        lines = [classes[best] for best in np.argmax(scores, axis=1)]
        Path(arguments.output_dir, "predictions.txt").write_text("\n".join(lines))
    about = {"finetuned_from": "a-tiny-model", "tasks": "text-classification", "language": "en", "dataset": "made up"}
    if arguments.push_to_hub:
        trainer.push_to_hub(**about)
    else:
        trainer.create_model_card(**about)
    return trainer


def entity_script(
    trainer_class: Callable[..., Trainer], arguments_class: type, line: Sequence[str], **more: Any
) -> Trainer:
    """Finds entities in words of JSONL files, whose labels it gives to the words' pieces; evaluates and predicts."""
    options, arguments = parsed(EntityOptions, arguments_class, line)
    files = {"train": options.train_file, "validation": options.validation_file}
    raw = load_dataset("json", data_files=files, cache_dir=str(Path(arguments.output_dir).parent / "cache"))
    classes = sorted({tag for tags in raw["train"]["tags"] for tag in tags})
    numbers = {name: number for number, name in enumerate(classes)}
    within = [numbers.get(name.replace("B-", "I-"), number) for name, number in numbers.items()]
    config = AutoConfig.from_pretrained(options.model, num_labels=len(classes), label2id=numbers,
                                        id2label=dict(enumerate(classes)))  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForTokenClassification.from_pretrained(options.model, config=config, ignore_mismatched_sizes=True)

    def prepared(rows: dict[str, list[Any]]) -> dict[str, Any]:
        found = tokenizer(rows["words"], truncation=True, is_split_into_words=True)
        found["labels"] = []
        for row, tags in enumerate(rows["tags"]):
            before, labels = None, []
            for word in found.word_ids(row):
                if word is None:
                    labels.append(-100)
                elif word != before:
                    labels.append(numbers[tags[word]])
                else:
                    labels.append(within[numbers[tags[word]]] if options.every_piece else -100)
                before = word
            found["labels"].append(labels)
        return dict(found)

    def words_of(answers: np.ndarray, labels: np.ndarray) -> tuple[list[list[str]], list[list[str]]]:
        best = np.argmax(answers, axis=2)
        return tuple(
            [
                [classes[n] for n, label in zip(*rows, strict=True) if label != -100]
                for rows in zip(one, labels, strict=True)
            ]
            for one in (best, labels)
        )  # type: ignore[return-value]

    def entities(prediction: EvalPrediction) -> dict[str, float]:
        from seqeval.metrics import accuracy_score, f1_score

        found, true = words_of(prediction.predictions, prediction.label_ids)
        return {"f1": float(f1_score(true, found)), "share_right": float(accuracy_score(true, found))}

    raw = raw.map(prepared, batched=True, remove_columns=["words", "tags"])
    trainer = trainer_class(
        model=model,
        args=arguments,
        train_dataset=raw["train"],
        eval_dataset=raw["validation"],
        compute_metrics=entities,
        processing_class=tokenizer,
        data_collator=DataCollatorForTokenClassification(tokenizer),
        **more,
    )
    result = trainer.train(resume_from_checkpoint=last_checkpoint(arguments))
    trainer.save_model()
    trainer.save_metrics("train", result.metrics)
    trainer.save_metrics("eval", trainer.evaluate())
    answers, labels, metrics = trainer.predict(raw["validation"], metric_key_prefix="predict")
    trainer.save_metrics("predict", metrics)
    lines = [" ".join(tags) for tags in words_of(answers, labels)[0]]
    Path(arguments.output_dir, "predictions.txt").write_text("\n".join(lines))
    return trainer


def image_script(
    trainer_class: Callable[..., Trainer], arguments_class: type, line: Sequence[str], **more: Any
) -> Trainer:
    """Fine-tunes on image files of a table, which are opened and augmented when a batch is made; evaluates."""
    options, arguments = parsed(ImageOptions, arguments_class, line)
    raw = load_dataset("csv", data_files=options.table, cache_dir=str(Path(arguments.output_dir).parent / "cache"))
    raw = raw["train"].cast_column("image", Image()).class_encode_column("label")
    splits = raw.train_test_split(0.25, seed=0)
    classes = raw.features["label"].names
    processor = AutoImageProcessor.from_pretrained(options.model)
    config = AutoConfig.from_pretrained(options.model, num_labels=len(classes), id2label=dict(enumerate(classes)))
    model = AutoModelForImageClassification.from_pretrained(options.model, config=config, ignore_mismatched_sizes=True)
    end = [
        v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(processor.image_mean, processor.image_std),
    ]
    augmented = v2.Compose([v2.RandomResizedCrop(options.size), v2.RandomHorizontalFlip(), *end])
    plain = v2.Compose([v2.Resize(options.size), v2.CenterCrop(options.size), *end])

    def with_pixels(steps: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
        def transform(rows: dict[str, Any]) -> dict[str, Any]:
            rows["pixel_values"] = [steps(image.convert("RGB")) for image in rows["image"]]
            return rows

        return transform

    def collate(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        pixels = torch.stack([example["pixel_values"] for example in examples])
        return {"pixel_values": pixels, "labels": torch.tensor([example["label"] for example in examples])}

    splits["train"].set_transform(with_pixels(augmented))
    splits["test"].set_transform(with_pixels(plain))
    trainer = trainer_class(
        model=model,
        args=arguments,
        train_dataset=splits["train"] if arguments.do_train else None,
        eval_dataset=splits["test"] if arguments.do_eval else None,
        compute_metrics=share_right,
        processing_class=processor,
        data_collator=collate,
        **more,
    )
    if arguments.do_train:
        result = trainer.train(resume_from_checkpoint=last_checkpoint(arguments))
        trainer.save_model()
        trainer.save_metrics("train", result.metrics)
        trainer.save_state()
    if arguments.do_eval:
        trainer.save_metrics("eval", trainer.evaluate())
    return trainer


if __name__ == "__main__":
    from hf_cgd import GroupRobustConfig, GroupRobustTrainer

    text_script(GroupRobustTrainer, GroupRobustConfig, sys.argv[1:])
