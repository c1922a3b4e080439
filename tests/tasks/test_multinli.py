"""MultiNLI: hand sentences, small files that the tests write themselves, and the made-up corpus."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import raw_layouts as raw
from datasets import Dataset
from made_files import nli_rows, write_jsonl

from hf_cgd.objectives import OBJECTIVES
from hf_cgd.tasks import build_task, load_task, multinli, multinli_demo

# The files that the tests write are small.
pytestmark = pytest.mark.filterwarnings("ignore:The splits of")


@pytest.mark.parametrize(
    ("sentence", "negated"),
    [
        ("No.", True), ("NOBODY came", True), ("There was no-one there.", True), ("Nothing's left", True),
        ("He said: 'never'", True), ("I do not know", False), ("I don't", False),
        ("nowhere to go", False), ("He knows, notes nothingness and knobs", False), ("", False),
    ],
)  # fmt: skip
def test_negation_rule(sentence: str, negated: bool) -> None:
    assert multinli.has_negation(sentence) is negated


def test_multinli_of_local_files(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train.jsonl", nli_rows(["It never rains", "It rains", "Odd", "No"], [2, 0, -1, 1]))
    Dataset.from_dict(nli_rows(["nothing", "something"], [0, -1])).to_parquet(tmp_path / "validation_matched.parquet")
    names = ["entailment", "-", "contradiction"]
    write_jsonl(tmp_path / "validation_mismatched.jsonl", nli_rows(["a", "b", "c"], names))
    splits = multinli.splits_of(multinli.load(tmp_path))
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 3, "validation": 1, "test": 2}
    assert splits["train"]["label"][:] == [2, 0, 1]
    assert splits["train"]["negation"][:] == [1, 0, 1]
    assert splits["test"]["label"][:] == [0, 2]
    assert splits["train"].features["label"].names == list(multinli.LABELS)
    assert splits["train"].features["negation"].names == ["no", "yes"]


def test_resplit_is_a_partition_in_the_published_shares() -> None:
    parts = {
        name: Dataset.from_dict(nli_rows([f"{name} {i}" for i in range(size)], [i % 3 for i in range(size)]))
        for name, size in (("train", 60), ("validation_matched", 20), ("validation_mismatched", 20))
    }
    splits = multinli.splits_of(parts, "regenerated", seed=3)
    assert [len(splits[name]) for name in ("train", "validation", "test")] == [50, 20, 30]
    everything = [sentence for rows in splits.values() for sentence in rows["hypothesis"]]
    assert sorted(everything) == sorted(f"{name} {i}" for name, part in parts.items() for i in range(len(part)))
    again, other = (multinli.splits_of(parts, "regenerated", seed=seed)["train"]["hypothesis"][:] for seed in (3, 4))
    assert splits["train"]["hypothesis"][:] == again != other


def test_multinli_says_what_it_misses(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="^data_dir: expected a folder"):
        multinli.load(tmp_path / "nowhere")
    write_jsonl(tmp_path / "train.jsonl", nli_rows(["a"], [0]))
    with pytest.raises(FileNotFoundError, match=r"named validation_matched, found \['train.jsonl'\]"):
        multinli.load(tmp_path)
    write_jsonl(tmp_path / "validation_matched.jsonl", {"premise": ["a"], "label": [1]})
    with pytest.raises(ValueError, match="'hypothesis' in the validation_matched split, which has"):
        multinli.load(tmp_path)
    with pytest.raises(ValueError, match="row 1: expected 0, 1, 2 or entailment"):
        multinli.splits_of({"train": Dataset.from_dict(nli_rows(["a", "b"], [0, 7]))})


def test_multinli_offline_is_three_lines_that_say_what_to_pass() -> None:
    with pytest.raises(ConnectionError) as error:
        load_task("multinli")
    lines = str(error.value).splitlines()
    assert len(lines) == 3
    assert "nyu-mll/multi_nli" in lines[0] and "connection" in lines[0]
    assert "HF_HUB_OFFLINE is set" in lines[1]
    assert "Pass data_dir= with" in lines[2] and "source=demo" in lines[2]


def test_demo_negation_goes_with_contradiction_in_training_only() -> None:
    parts = multinli_demo.demo(seed=1)
    assert parts["train"].to_dict() == multinli_demo.demo(seed=1)["train"].to_dict()
    splits = multinli.splits_of(parts)
    shares = {}
    for split, rows in splits.items():
        labels, negation = np.asarray(rows["label"][:]), np.asarray(rows["negation"][:])
        shares[split] = [float(negation[labels == code].mean()) for code in range(3)]
    assert shares["train"] == pytest.approx([0.02, 0.02, 0.8], abs=0.05)
    assert shares["test"] == pytest.approx([0.5, 0.5, 0.5], abs=0.12)


def test_demo_labels_follow_from_the_words() -> None:
    """Read back by another rule: what the premise says, what the hypothesis says, and whether that is denied."""
    opposites = multinli_demo.OPPOSITES | {value: key for key, value in multinli_demo.OPPOSITES.items()}
    for row in multinli_demo.demo(seed=0, sizes={"train": 400})["train"]:
        said = next(word for word in row["premise"].split() if word in opposites)
        claimed = next(word for word in row["hypothesis"].split() if word in opposites)
        if " with a " in row["hypothesis"]:
            expected = "neutral"
        else:
            expected = (
                "contradiction" if (claimed == said) == multinli.has_negation(row["hypothesis"]) else "entailment"
            )
        assert multinli.LABELS[row["label"]] == expected, row


# ---- The published split ----------------------------------------------------------------------------------------------


def test_the_split_of_the_file_with_labels_in_its_own_order(tmp_path: Path) -> None:
    """Read back row by row from what was written: the split, the label by name, the negation of the file."""
    raw.write_multinli(tmp_path)
    raw.hub_multinli(tmp_path / "hub", tmp_path)
    splits, info = load_task("multinli", tmp_path, split="group_dro")
    rows = [row for part in range(3) for row in raw.multinli_rows(part) if row["gold_label"] != "-"]
    for code, split in enumerate(raw.SPLITS):
        expected = [row for number, row in enumerate(rows) if number // 6 % 3 == code]
        found = splits[split]
        assert found["hypothesis"][:] == [row["sentence2"] for row in expected]
        assert [info.label_names[label] for label in found["label"]] == [row["gold_label"] for row in expected]
        assert found["negation"][:] == [int("never" in row["sentence2"]) for row in expected]
    assert info.caveat == ""
    settings = {"split": "group_dro", "split_file": str(tmp_path / "metadata_random.csv")}
    again, _ = load_task("multinli", "hub", tmp_path / "hub", **settings)
    assert {name: part.to_dict() for name, part in again.items()} == {
        name: part.to_dict() for name, part in splits.items()
    }


def test_negation_is_what_the_file_says(tmp_path: Path) -> None:
    """Its rule splits words in another way than ours; the published groups are its."""
    raw.write_multinli(tmp_path)
    table = pd.read_csv(tmp_path / "metadata_random.csv", index_col=0)
    table["sentence2_has_negation"] = 1 - table["sentence2_has_negation"]
    table.to_csv(tmp_path / "metadata_random.csv")
    splits, _ = load_task("multinli", tmp_path, split="group_dro")
    assert all(negated == ("never" not in text) for rows in splits.values()
               for negated, text in zip(rows["negation"], rows["hypothesis"], strict=True))  # fmt: skip


def test_a_split_file_that_does_not_fit(tmp_path: Path) -> None:
    raw.write_multinli(tmp_path)
    path = tmp_path / "metadata_random.csv"
    text = path.read_text()
    lines = text.splitlines()
    path.write_text("\n".join(lines[:-1]))
    with pytest.raises(ValueError, match="a row for each of the 36 labelled pairs, got 35"):
        load_task("multinli", tmp_path, split="group_dro")
    path.write_text("\n".join([lines[0], lines[2], lines[1], *lines[3:]]))
    with pytest.raises(
        ValueError, match=r"row 0 says 'neutral', the corpus 'entailment' \(2 such rows\).*order of the corpus"
    ):
        load_task("multinli", tmp_path, split="group_dro")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"(?s)expected metadata_random.csv in .*kohpangwei/group_DRO"):
        load_task("multinli", tmp_path, split="group_dro")


def test_a_split_of_our_own_says_that_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    raw.write_multinli(tmp_path)
    with caplog.at_level("INFO"):
        splits, info = load_task("multinli", tmp_path)
    assert "a 50/20/30 split of our own (seed 0), not that of metadata_random.csv" in caplog.text
    assert "only that of metadata_random.csv has the published rows" in info.caveat
    # 38 pairs, drawn before the two that nobody agreed on are dropped.
    assert sum(map(len, splits.values())) == 36 and 18 <= len(splits["train"]) + 1 <= 20


@pytest.mark.parametrize("source", ["paper", "group_dro", "demo"])
def test_groups_are_drawn_as_those_who_state_the_hyperparameters_do(source: str) -> None:
    """Group-DRO's authors: `--reweight_groups`, on MultiNLI as on Waterbirds and CelebA."""
    for task in ("multinli", "waterbirds", "celeba"):
        drawn = {o: build_task(task).hyperparameters(source, objective=o).get("group_sampling") for o in OBJECTIVES}
        assert {o for o, sampling in drawn.items() if sampling == "weighted"} == {"group_dro", "cgd"}


def test_settings_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="split must be one of 'regenerated', 'group_dro', 'genres', got 'random'"):
        load_task("multinli", tmp_path, split="random")
    raw.write_multinli(tmp_path)
    with pytest.raises(ValueError, match="is for split='group_dro' and would not be read with split='genres'"):
        load_task("multinli", tmp_path, split="genres", split_file="a.csv")
