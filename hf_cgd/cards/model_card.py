"""The model card: which groups there are, how each fares, and how the model was trained."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from huggingface_hub import ModelCardData

from hf_cgd.cards import markdown as md
from hf_cgd.cards.formulas import citations, explained
from hf_cgd.cards.record import REPORT_FILE, RUN_FILE, SETTINGS_FILE, RunRecord
from hf_cgd.cards.words import headline, limits
from hf_cgd.metrics import ONE_CLASS, GroupReport
from hf_cgd.metrics.tables import markdown
from hf_cgd.visible_text import quoted_name, visible_name

NOTE = "<!-- Written by hf_cgd from the run's own numbers. Read it, and say what it cannot know. -->"
OVERALL = {
    "accuracy": "Average over all examples",
    "worst_group_accuracy": "Worst group",
    "adjusted_accuracy": "Adjusted average (groups weighted by their shares of the training set)",
    "mean_group_accuracy": "Mean over the groups",
    "perplexity": "Perplexity over all tokens",
    "worst_group_perplexity": "Worst group, perplexity (lower is better)",
    "loss": "Mean loss (lower is better)",
    "worst_group_loss": "Worst group, loss (lower is better)",
}
"""What the numbers over all groups are called; others go by their own name."""
LOADERS = {"text-classification": ("ForSequenceClassification", "AutoTokenizer"),
           "token-classification": ("ForTokenClassification", "AutoTokenizer"),
           "question-answering": ("ForQuestionAnswering", "AutoTokenizer"),
           "text-generation": ("ForCausalLM", "AutoTokenizer"),
           "image-classification": ("ForImageClassification", "AutoImageProcessor")}  # fmt: skip
"""By task, the end of the names of what loads a model with its head, and what makes its inputs."""


def model_card(
    record: RunRecord, data: ModelCardData, pictures: Mapping[str, str] | None = None, repo_id: str | None = None
) -> str:
    """The text of a card, front matter first.

    Args:
        record: the run.
        data: its front matter (see `hf_cgd.cards.metadata.card_data`).
        pictures: by name, where they are in the repository.
        repo_id: what the model is loaded by; None for the record's name.
    """
    pictures = dict(pictures or {})
    parts = [f"---\n{data.to_yaml()}\n---", NOTE, f"# {md.text(record.name)}", _introduction(record)]
    for name, report in record.reports.items():
        parts += _evaluation(name, report, pictures)
    if record.groups is not None:
        parts += _training_groups(record)
    parts += ["## What these numbers do not tell", _list(md.text(line) for line in limits(record))]
    if record.objective is not None:
        parts += _objective(record, record.objective, pictures)
    if record.training:
        parts += ["## Training", "What differs from the defaults of `TrainingArguments`:"]
        parts.append(_table(("option", "value"), record.training.items()))
    parts += ["## How to load it", *_loading(record, repo_id or record.name)]
    parts += ["## Files", _files(record)]
    if record.versions:
        parts += ["## Framework versions", _list(f"{md.text(k)} {md.text(v)}" for k, v in record.versions.items())]
    parts += ["## Citation", *(f"```bibtex\n{entry}\n```" for entry in citations(record.objective))]
    return "\n\n".join(part for part in parts if part) + "\n"


def _introduction(record: RunRecord) -> str:
    base, ids = record.model.base_model, record.data.ids
    what = f"a fine-tuned version of [{md.text(base)}](https://huggingface.co/{base})" if base else "a model"
    kind = f" (`{record.model.kind}`)" if record.model.kind else ""
    data = record.data.name if not ids else ", ".join(ids)
    on = f" on {md.text(data)}" if data else ""
    if record.objective is None:
        return f"This is {what}{kind}. It was evaluated group by group{on}; how it was trained is not known here."
    title = explained(record.objective).title
    aim = (
        "with the aim that its worst group does well"
        if record.objective_name != "erm"
        else "and evaluated group by group"
    )
    return f"This is {what}{kind}, trained{on} with hf_cgd under **{md.text(title)}**, {aim}."


def _evaluation(name: str, report: GroupReport, pictures: Mapping[str, str]) -> list[str]:
    parts = [f"## How the groups fare: {md.text(name)}", md.text(headline(report))]
    cells = report.cells()
    head = ["training examples" if cell == "train" else "evaluated" if cell == "eval" else cell for cell in cells[0]]
    if head:
        parts.append(markdown([head, *([md.text(cell) for cell in row] for row in cells[1:])]))
    numbers = [(OVERALL.get(key, key), md.number(value)) for key, value in report.overall.items() if key != ONE_CLASS]
    parts.append(_table(("over all groups", "value"), numbers, as_code=False) if numbers else "")
    step = report.weights_step
    parts.append("" if step is None else f"Weights are those after optimizer step {step}.")
    picture = pictures.get(f"group_accuracies_{name}")
    parts.append(f"![Accuracy of each group with its 95 % interval]({picture})" if picture else "")
    picture = pictures.get(f"group_perplexities_{name}")
    parts.append(f"![Perplexity of each group over the training steps, lower is better]({picture})" if picture else "")
    return parts


def _training_groups(record: RunRecord) -> list[str]:
    groups = record.groups
    assert groups is not None
    weights = [record.weights.get(name) for name in groups.names]
    counts = groups.counts or (None,) * len(groups)
    shown = any(weight is not None for weight in weights)
    rows = [["group", "training examples", *(["weight"] if shown else [])]]
    for name, count, weight in zip(groups.names, counts, weights, strict=True):
        number = "not counted" if count is None else f"{count:,}"
        rows.append([md.text(visible_name(name)), number, *([md.number(weight)] if shown else [])])
    by = ", ".join(md.code(column) for column in groups.columns)
    total = "" if groups.counts is None else f" with {sum(groups.counts):,} examples"
    sentence = f"{len(groups)} groups{total}, by {by}."
    told = any(row.train_count is not None for report in record.reports.values() for row in report.rows)
    return ["## Training groups", f"{sentence} Their sizes are above.", ""] if told else [
        "## Training groups", sentence, markdown(rows)]  # fmt: skip


def _objective(record: RunRecord, objective: Mapping[str, Any], pictures: Mapping[str, str]) -> list[str]:
    told = explained(objective)
    parts = [f"## Objective: {md.text(told.title)}", told.words]
    if told.loss:
        parts += ["What is minimised:", f"$$\n{told.loss}\n$$"]
    if told.weights is not None:
        parts += ["How the group weights move, once per optimizer step:", f"$$\n{told.weights}\n$$"]
    parts.append(f"Here {told.symbols}." if told.symbols else "")
    knobs = {name: value for name, value in objective.get("knobs", {}).items() if name not in record.settings}
    settings = {name: value for name, value in {**record.settings, **knobs}.items() if value is not None}
    parts.append(_table(("setting", "value"), settings.items()))
    if "group_weights" in pictures:
        parts.append(f"![Weights of the groups over the training steps]({pictures['group_weights']})")
    if "group_interactions" in pictures:
        parts.append(
            "Who helps whom: the mean cosine of two groups' gradients. Blue (above 0): a step for one group also "
            "lowers the loss of the other. Red (below 0): it raises it."
        )
        parts.append(f"![Mean cosines between the groups' gradients]({pictures['group_interactions']})")
    return parts


def _loading(record: RunRecord, repo_id: str) -> list[str]:
    where, model = json.dumps(repo_id, ensure_ascii=False), record.model
    if model.library == "timm":
        lines = ["import timm", "", f'model = timm.create_model("hf-hub:" + {where}, pretrained=True).eval()']
    elif model.library == "peft":
        head, inputs = LOADERS.get(model.task or "", ("", ""))
        kind = f"AutoPeftModel{head if inputs == 'AutoTokenizer' else ''}"
        lines = [f"from peft import {kind}", "", f"model = {kind}.from_pretrained({where})"]
    elif model.library == "transformers":
        head, inputs = LOADERS.get(model.task or "", ("", "")) if model.module == "transformers" else ("", "")
        # AutoModel would load the body alone.
        kind = f"AutoModel{head}" if head else model.kind
        names = ", ".join(name for name in (kind, inputs) if name)
        lines = [f"from {model.module} import {names}", "", f"model = {kind}.from_pretrained({where})"]
        lines += [f"inputs = {inputs}.from_pretrained({where})"] if inputs else []
    else:
        lines = ["from huggingface_hub import hf_hub_download", "from safetensors.torch import load_file", "",
                 f'weights = load_file(hf_hub_download({where}, "model.safetensors"))']  # fmt: skip
    classes = ", ".join(md.text(quoted_name(label)) for label in model.labels)
    labels = f"Classes, in the order of the outputs: {classes}." if model.labels else ""
    return ["hf_cgd is not needed for that.", "```python\n" + "\n".join(lines) + "\n```", labels]


def _files(record: RunRecord) -> str:
    lines = [
        f"`{REPORT_FILE}`: the tables above; `hf_cgd.load_report(…)` reads them from a folder or a repository.",
        f"`{RUN_FILE}`: settings, weights over time, interactions, versions.",
    ]
    if record.settings:
        lines.append(
            f"`{SETTINGS_FILE}`: the settings; `GroupRobustConfig(output_dir, **yaml.safe_load(text))` starts an "
            "equal run on the same data."
        )
    return _list(lines)


def _table(head: Sequence[str], rows: Iterable[tuple[str, Any]], as_code: bool = True) -> str:
    shown = md.code if as_code else md.text
    return markdown([list(head), *([shown(name), shown(value)] for name, value in rows)])


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
