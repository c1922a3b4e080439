"""`hf-cgd train`: the recipes for one's own data, with a help that is short and comes at once."""

from collections.abc import Sequence
from dataclasses import fields
from textwrap import fill
from typing import Any

from hf_cgd.cli.own_data_options import GROUP_OPTIONS, KINDS, TRAINING_OPTIONS, WIDTH
from hf_cgd.visible_text import did_you_mean

EXAMPLES = {
    "text": (
        "--dataset reviews.csv --group_column label place",
        "--dataset my/folder --model my/minilm --objective group_dro --step_size 0.01",
        "--dataset reviews.csv --group_column place --compare erm erm_uw group_dro cgd",
        "my_run.yaml --seed 1",
    ),
    "image": (
        "--dataset my/images --group_column label place",
        "--dataset table.csv --image_column file --model resnet18 --group_column hospital",
        "--dataset my/images --group_column place --compare erm erm_uw group_dro cgd",
        "my_run.yaml --seed 1",
    ),
}


def main(words: Sequence[str]) -> dict[str, Any]:
    """Train; what was left, JSON-ready: {"output_dir": …, "reports": {…}, "files": {…}}, or that of each objective."""
    kind = words[0] if words else "--help"
    if kind in ("-h", "--help"):
        print(
            "usage: hf-cgd train text|image [FILE.yaml] [options]\n\nTrain a classifier on your own data so that its "
            "worst group does well.\n\n  hf-cgd train text --help\n  hf-cgd train image --help"
        )
        raise SystemExit(0 if words else 2)
    if kind not in KINDS:
        meant = did_you_mean(kind, KINDS)
        raise SystemExit(f"hf-cgd train: expected text or image, got {kind!r}.{meant}")
    rest = list(words[1:])
    if any(word in ("-h", "--help") for word in rest):
        print(short_help(kind))
        raise SystemExit(0)
    from hf_cgd.cli.own_data import RECIPES

    return RECIPES[kind].train(rest, f"hf-cgd train {kind}")


def short_help(kind: str) -> str:
    """The options that matter most."""
    own = {one.name: one for one in fields(KINDS[kind])}
    about = {
        name: str(one.metadata["help"]) + ("" if one.default is None else f" (default: {one.default})")
        for name, one in own.items()
    }
    sections = {
        f"the {kind}s and the network": about,
        "the groups": GROUP_OPTIONS,
        "training": TRAINING_OPTIONS,
        "all": {"help-all": "Every option, also those of transformers' TrainingArguments.",
                "json": "The result as JSON on the standard output, and nothing else there."},
    }  # fmt: skip
    width = max(len(name) for options in sections.values() for name in options) + 2
    text = (
        f"usage: hf-cgd train {kind} [FILE.yaml] [--option value …]\n\nTrain a classifier of {kind}s so that its "
        "worst group does well.\nFILE.yaml holds `option: value`; what stands behind it on the command line wins.\n"
    )
    gap = " " * (width + 4)
    for title, options in sections.items():
        text += f"\n{title}:\n"
        for name, line in options.items():
            text += fill(line, WIDTH, initial_indent=f"  {'--' + name:{width}}  ", subsequent_indent=gap) + "\n"
    return text + "\nexamples:" + "".join(f"\n  hf-cgd train {kind} {line}" for line in EXAMPLES[kind])
