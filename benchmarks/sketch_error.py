"""How far the cosines of sketches are from those of the gradients themselves, on your own text model and data.

    python benchmarks/sketch_error.py --model path/to/model --dataset path/to/folder --group_column label negation

The dataset is what recipes/text_classification.py takes, with columns text and label. Prints, for each sketch size,
the root mean square error over pairs of different groups, batches and draws of the projections, beside the range of
the true cosines.
"""

import argparse

import torch
from transformers import DataCollatorWithPadding

from hf_cgd import gradient_scope
from hf_cgd.columns import read_columns
from hf_cgd.functional import cosine_gram
from hf_cgd.gradients import PerGroupEngine, SketchEngine, gram_matrix
from hf_cgd.groups import GroupInfo
from hf_cgd.launch import text_classifier
from hf_cgd.losses import CLASSIFICATION, example_losses
from hf_cgd.tasks import files


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--group_column", nargs="+", default=["group"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--draws", type=int, default=3)
    options = parser.parse_args()
    columns = {"text_column": "text", "label_column": "label"}
    train = files.load_labelled(options.dataset, None, columns, options.group_column, 0)["train"].shuffle(seed=0)
    groups = GroupInfo.from_columns(read_columns(train, options.group_column))
    model, tokenizer = text_classifier(options.model, train.features["label"].names)
    model.train()
    scope = list(gradient_scope(model, 3).values())
    upper = torch.triu(torch.ones(len(groups), len(groups), dtype=torch.bool), diagonal=1)
    truths, errors = [], {size: [] for size in options.sizes}
    for batch in range(options.batches):
        rows = train.select(range(batch * options.batch_size, (batch + 1) * options.batch_size))
        encoded = [tokenizer(text, truncation=True, max_length=64) for text in rows["text"]]
        inputs = DataCollatorWithPadding(tokenizer)(encoded)
        labels = torch.tensor(rows["label"])
        ids = torch.as_tensor(groups.encode_columns(read_columns(rows, options.group_column)))
        present = ids.unique().tolist()
        if len(present) < len(groups):
            continue
        for draw in range(options.draws):
            for size in options.sizes:
                engine = SketchEngine(model, scope, size, seed=draw)
                torch.manual_seed(batch)
                with engine.recording():
                    losses = example_losses(model(**inputs).logits, labels, CLASSIFICATION)
                if draw == 0 and size == options.sizes[0]:
                    exact = cosine_gram(PerGroupEngine(scope).group_gradients(losses, ids, present).gram())
                    truths.append(exact[upper])
                estimate = cosine_gram(gram_matrix(engine.group_gradients(losses, ids, present).rows))
                errors[size].append((estimate - exact)[upper])
    true = torch.cat(truths)
    print(f"{len(truths)} batches, true cosines from {true.min():.3f} to {true.max():.3f}")
    for size, found in errors.items():
        difference = torch.cat(found)
        print(f"r = {size:3}: rms error {difference.square().mean().sqrt():.4f}, mean error {difference.mean():+.4f}")


if __name__ == "__main__":
    main()
