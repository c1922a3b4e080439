"""How far the cosines of sketches are from those of the gradients themselves, on your own data.

    python benchmarks/sketch_error.py text --model path/to/model --dataset path/to/folder --group_column label negation
    python benchmarks/sketch_error.py mnist --data_dir path/to/mnist

The text dataset is what recipes/text_classification.py takes, with columns text and label. MNIST is Colored-MNIST with
four groups (label x colour, ratio 10) and timm's resnet18, trained for 60 steps and then taken with frozen BatchNorm,
so that examples do not interact. Prints, for each sketch size, the root mean square error over pairs of different
groups, batches and draws of the projections, beside the range of the true cosines.
"""

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from transformers import DataCollatorWithPadding, default_data_collator

from hf_cgd import gradient_scope
from hf_cgd.cli import image_classifier, text_classifier
from hf_cgd.data import sources
from hf_cgd.data.columns import read_columns
from hf_cgd.data.groups import GroupInfo
from hf_cgd.functional import cosine_gram
from hf_cgd.gradients import PerGroupEngine, SketchEngine
from hf_cgd.models.example_losses import CLASSIFICATION, example_losses
from hf_cgd.tasks import mnist
from hf_cgd.tasks.colored_mnist import ColoredMNIST

Batch = tuple[dict[str, Tensor], Tensor]
"""Inputs with labels, and group ids."""


def text_batches(options: argparse.Namespace) -> tuple[nn.Module, Iterator[Batch]]:
    columns = {"text_column": "text", "label_column": "label"}
    train = sources.load_labelled(options.dataset, None, columns, options.group_column, 0)["train"]
    model, tokenizer = text_classifier(options.model, train.features["label"].names)

    def collate(rows: dict[str, list]) -> dict[str, Tensor]:
        encoded = [tokenizer(text, truncation=True, max_length=64) for text in rows["text"]]
        return {**DataCollatorWithPadding(tokenizer)(encoded), "labels": torch.tensor(rows["label"])}

    return model.train(), batches_of(train, options.group_column, collate, options)


def mnist_batches(options: argparse.Namespace) -> tuple[nn.Module, Iterator[Batch]]:
    columns = ["label", "group"]
    task = ColoredMNIST(ratio=10, train_size=4400, validation_size=1000, seed=0)
    train = task.load(options.data_dir)["train"]
    torch.manual_seed(0)
    model, _ = image_classifier("resnet18", task.info.label_names, pretrained=False, **mnist.IMAGE_FORMAT)

    def collate(rows: dict[str, list]) -> dict[str, Tensor]:
        batch = default_data_collator([dict(zip(rows, row, strict=True)) for row in zip(*rows.values(), strict=True)])
        return {"pixel_values": batch["pixel_values"], "labels": batch["labels"]}

    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    training = argparse.Namespace(batches=60, batch_size=64, seed=1)
    for inputs, _ in batches_of(train, columns, collate, training):
        labels = inputs.pop("labels")
        optimizer.zero_grad()
        nn.functional.cross_entropy(model.train()(**inputs).logits, labels).backward()
        optimizer.step()
    return model.eval(), batches_of(train, columns, collate, options)


def batches_of(data, group_column: list[str], collate: Callable, options: argparse.Namespace) -> Iterator[Batch]:
    groups = GroupInfo.from_columns(read_columns(data, group_column))
    data = data.shuffle(seed=options.seed)
    for batch in range(options.batches):
        places = [place % len(data) for place in range(batch * options.batch_size, (batch + 1) * options.batch_size)]
        rows = data.select(places)
        ids = torch.as_tensor(groups.encode_columns(read_columns(rows, group_column)))
        if len(ids.unique()) == len(groups):
            yield collate(rows[:]), ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    text, mnist = kinds.add_parser("text"), kinds.add_parser("mnist")
    text.add_argument("--model", required=True)
    text.add_argument("--dataset", required=True)
    text.add_argument("--group_column", nargs="+", default=["group"])
    mnist.add_argument("--data_dir", required=True)
    for kind in (text, mnist):
        kind.add_argument("--sizes", type=int, nargs="+", default=[16, 32, 64])
        kind.add_argument("--batches", type=int, default=4)
        kind.add_argument("--batch_size", type=int, default=64)
        kind.add_argument("--draws", type=int, default=3)
        kind.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model, batches = text_batches(options) if options.kind == "text" else mnist_batches(options)
    scope = list(gradient_scope(model, 3).values())
    truths: list[Tensor] = []
    errors: dict[int, list[Tensor]] = {size: [] for size in options.sizes}
    for place, (inputs, ids) in enumerate(batches):
        labels = inputs.pop("labels")
        present = ids.unique().tolist()
        upper = torch.triu(torch.ones(len(present), len(present), dtype=torch.bool), diagonal=1)
        for draw in range(options.draws):
            for size in options.sizes:
                engine = SketchEngine(model, scope, size, seed=draw)
                torch.manual_seed(place)
                with engine.recording():
                    losses = example_losses(model(**inputs).logits, labels, CLASSIFICATION)
                if draw == 0 and size == options.sizes[0]:
                    exact = cosine_gram(PerGroupEngine(scope).group_gradients(losses, ids, present).gram())
                    truths.append(exact[upper])
                estimate = cosine_gram(engine.group_gradients(losses, ids, present).gram())
                errors[size].append((estimate - exact)[upper])
    true = torch.cat(truths)
    print(f"{len(truths)} batches, true cosines from {true.min():.3f} to {true.max():.3f}")
    for size, found in errors.items():
        difference = torch.cat(found)
        print(f"r = {size:3}: rms error {difference.square().mean().sqrt():.4f}, mean error {difference.mean():+.4f}")


if __name__ == "__main__":
    main()
