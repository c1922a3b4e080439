"""CivilComments: odd comments come through, and the 16 subgroups are those of a rule that is written out."""

from pathlib import Path

import numpy as np
import pytest
import raw_layouts as raw

from hf_cgd import GroupRobustWarning
from hf_cgd.data.columns import read_columns
from hf_cgd.data.evaluation_groups import EvaluationGroups
from hf_cgd.metrics import named_metrics
from hf_cgd.tasks import load_task

# The files that the tests write are small.
pytestmark = pytest.mark.filterwarnings("ignore:The splits of")


def test_labels_identities_and_comments_row_by_row(tmp_path: Path) -> None:
    table = raw.civilcomments_rows()
    splits, info = load_task("civilcomments", raw.write_civilcomments(tmp_path))
    for raw_name, name in (("train", "train"), ("val", "validation"), ("test", "test")):
        part = table[table["split"] == raw_name].to_dict("records")
        assert splits[name]["text"][:] == [row["comment_text"] for row in part]
        for place, row in enumerate(part):
            found = splits[name][place]
            toxic = row["toxicity"] >= 0.5
            assert found["label"] == toxic and found["black"] == (row["black"] >= 0.5)
            for identity in raw.IDENTITIES:
                mentions = row[identity] >= 0.5
                assert found[f"{identity} toxic"] == (mentions and toxic)
                assert found[f"{identity} non-toxic"] == (mentions and not toxic)
    assert {"NA", "null", "line one\nline two"} <= set(splits["train"]["text"])
    assert info.evaluation_group_columns is not None and len(info.evaluation_group_columns) == 16


def test_the_worst_of_sixteen_overlapping_subgroups(tmp_path: Path) -> None:
    """A network that is wrong on toxic comments about Muslims alone, against accuracies counted one by one."""
    splits, info = load_task("civilcomments", raw.write_civilcomments(tmp_path))
    test, columns = splits["test"], info.evaluation_group_columns
    groups = EvaluationGroups(info.group_columns, columns, None)
    known = groups.add(test)
    assert known is not None and groups.overlapping
    members = groups.ids_of(known, read_columns(test, columns))
    labels = np.asarray(test["label"][:])
    wrong = np.asarray(test["muslim toxic"][:]) == 1
    predictions = np.where(wrong, 1 - labels, labels)
    with np.testing.suppress_warnings():
        metrics = named_metrics(predictions, labels, members, groups.names)
    expected = {}
    for name in columns:
        rows = [row for row in range(len(test)) if test[name][row] == 1]
        expected[name] = sum(int(predictions[row] == labels[row]) for row in rows) / len(rows)
    assert {name: metrics[f"group_accuracy/{name}"] for name in columns} == pytest.approx(expected)
    assert metrics["worst_group_accuracy"] == 0 == expected["muslim toxic"]
    # A comment that mentions Muslims mentions another identity too, which suffers as well.
    assert 0 < expected["other_religions toxic"] < 1 and expected["black toxic"] == 1
    assert members is not None and members.sum(axis=1).max() == 2 and members.sum(axis=1).min() == 0


def test_no_number_for_an_identity_counts_as_not_mentioned_and_is_told(tmp_path: Path) -> None:
    table = raw.civilcomments_rows()
    row = int(np.flatnonzero((table["white"] >= 0.5) & (table["split"] == "train"))[0])
    table.loc[row, "white"] = None
    raw.write_civilcomments(tmp_path, table)
    with pytest.warns(GroupRobustWarning, match="'white' has no number in 1 rows"):
        splits, _ = load_task("civilcomments", tmp_path)
    assert sum(splits["train"]["white"]) == int((table.loc[table["split"] == "train", "white"] >= 0.5).sum())


def test_in_made_up_comments_an_identity_goes_along_with_toxicity() -> None:
    splits, info = load_task("civilcomments", "demo")
    for rows in splits.values():
        assert all(sum(rows[name]) >= 5 for name in info.evaluation_group_columns or ())
    label, black = (np.asarray(splits["train"][name][:]) for name in ("label", "black"))
    assert label[black == 1].mean() > 1.3 * label.mean()
