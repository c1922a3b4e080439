"""Pushes over real HTTP, to a server that speaks what huggingface_hub's client asks of the Hub."""

import json
import os
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from hub_server import TOKEN, USER, HubServer
from huggingface_hub import ModelCard
from huggingface_hub.errors import HfHubHTTPError
from packaging.version import Version
from programs import run
from tiny import predicts_one_class
from transformers import TrainerCallback

import hf_cgd
from hf_cgd import GroupRobustTrainer, GroupRobustWarning
from hf_cgd.cards import load_run

from .conftest import NAMES, build_trainer

pytestmark = predicts_one_class
PUSHES = {"push_to_hub": True, "hub_model_id": "robust", "hub_token": TOKEN}
REPO = f"{USER}/robust"
ALWAYS = 1000
"""More often than a client tries."""


class OneAtATime(TrainerCallback):
    """Lets a push end before the next checkpoint writes over the files that it sends; steps take no time here."""

    trainer: GroupRobustTrainer

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the push that the checkpoint began."""
        if self.trainer.push_in_progress is not None:
            self.trainer.push_in_progress.wait_until_done()


def with_pushes_in_turn(trainer: GroupRobustTrainer) -> GroupRobustTrainer:
    callback = OneAtATime()
    callback.trainer = trainer
    trainer.add_callback(callback)
    return trainer


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than all the rest of a push."""
    monkeypatch.setattr("hf_cgd.cards.writing.write_pictures", lambda record, folder: {})


def test_a_push_brings_model_card_report_and_pictures(hub: HubServer, tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path / "out", PUSHES | {"save_strategy": "steps", "save_steps": 2})
    trainer.train()
    trainer.push_to_hub(tags=["mine"], license="mit")
    files = hub.repositories[REPO].files
    assert {"README.md", "config.json", "model.safetensors", "group_report.json", "group_run.json",
            "group_settings.yaml", "pictures/group_weights.png"} <= set(files)  # fmt: skip
    assert hub.repositories[REPO].commits[-1][0] == "End of training"
    assert len(hub.large) > 0, "the weights went through the storage of large files"
    card = ModelCard(files["README.md"].decode())
    assert {"mine", "group-robustness", "hf_cgd", "cgd"} <= set(card.data.tags) and card.data.license == "mit"
    # What was evaluated for the card is what the trainer says.
    expected = trainer.all_metrics["eval_worst_group_accuracy"]
    assert {r.metric_type: r.metric_value for r in card.data.eval_results}["worst_group_accuracy"] == expected

    report = hf_cgd.load_report(REPO)
    assert report == trainer.group_report()
    assert [row.name for row in report.rows] == sorted(NAMES)
    assert load_run(REPO).weights == pytest.approx(
        dict(zip(trainer.groups.names, trainer.group_weights.tolist(), strict=True))
    )
    args = torch.load(tmp_path / "out" / "training_args.bin", weights_only=False)
    assert args.hub_token is None and args.learning_rate == trainer.args.learning_rate
    assert trainer.args.hub_token == TOKEN, "the run itself still has it"
    everything = b"".join([*files.values(), *hub.large.values()])
    assert TOKEN.encode() not in everything
    assert TOKEN.encode() not in b"".join(hub.bodies)
    for name in ("README.md", "group_report.json", "group_run.json", "group_settings.yaml"):
        assert str(tmp_path).encode() not in files[name], name

    # Another program, without hf_cgd, loads it by HF_ENDPOINT and predicts the same.
    code = f"""
import sys, json, torch
from transformers import AutoModelForSequenceClassification
model = AutoModelForSequenceClassification.from_pretrained({REPO!r}).eval()
assert "hf_cgd" not in sys.modules
with torch.no_grad():
    logits = model(input_ids=torch.arange(1, 9)[None]).logits
print(json.dumps([model.config.id2label, logits.tolist()]))
"""
    home = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "home")}
    output, _ = run("-c", code, **home)
    labels, logits = json.loads(output.splitlines()[-1])
    assert labels == {"0": "no", "1": "yes | $"}
    with torch.no_grad():
        expected = trainer.model.eval()(input_ids=torch.arange(1, 9)[None]).logits
    assert torch.allclose(torch.tensor(logits), expected, atol=1e-6)


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("strategy", ["end", "every_save", "checkpoint"])
def test_hub_strategies(hub: HubServer, tmp_path: Path, strategy: str) -> None:
    saves = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
    pushes = PUSHES | saves | {"hub_strategy": strategy, "hub_always_push": True}
    trainer = with_pushes_in_turn(build_trainer(tmp_path / "out", pushes))
    trainer.train()
    commits = hub.repositories[REPO].commits
    written = {path for _, paths in commits for path in paths}
    if strategy == "end":
        assert commits == []
        trainer.save_model()
        assert [message for message, _ in commits] == ["Model save"]
        return
    assert {"Training in progress, step 2", "Training in progress, step 4"} <= {message for message, _ in commits}
    assert {"README.md", "group_report.json", "model.safetensors"} <= written
    assert any(path.startswith("last-checkpoint/") for path in written) == (strategy == "checkpoint")
    report = hf_cgd.load_report(REPO)
    assert report.weights_step == 4


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("how", ["500", "drop"])
@pytest.mark.parametrize("where", ["PUT /lfs", "/commit/"])
def test_a_push_that_fails_loses_nothing_and_the_next_one_succeeds(
    hub: HubServer, tmp_path: Path, where: str, how: Any
) -> None:
    trainer = build_trainer(tmp_path / "out", PUSHES)
    trainer.train()
    trainer.evaluate()
    # Every try of the client.
    hub.fail(where, times=ALWAYS, how=how)
    with pytest.raises(Exception) as caught:
        trainer.push_to_hub()
    told = str(caught.value) + "".join(getattr(caught.value, "__notes__", []))
    assert f"The push to {REPO} failed, the training did not" in told and str(tmp_path / "out") in told
    left = set(os.listdir(tmp_path / "out"))
    assert {"README.md", "model.safetensors", "group_report.json"} <= left
    assert hub.repositories[REPO].files == {}
    hub.failures.clear()
    trainer.push_to_hub()
    assert hub.repositories[REPO].files["model.safetensors"] == (tmp_path / "out" / "model.safetensors").read_bytes()


@pytest.mark.skipif(Version(huggingface_hub.__version__) < Version("2"), reason="older clients do not try again")
@pytest.mark.usefixtures("no_pictures")
def test_a_single_dropped_upload_is_tried_again(hub: HubServer, tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path / "out", PUSHES)
    hub.fail("PUT /lfs", times=1, how="drop")
    trainer.push_to_hub()
    assert "model.safetensors" in hub.repositories[REPO].files


@pytest.mark.usefixtures("no_pictures")
def test_a_push_that_fails_in_mid_training_is_told_of_and_training_goes_on(hub: HubServer, tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "hub_always_push": True}
    trainer = with_pushes_in_turn(build_trainer(tmp_path / "out", PUSHES | saves))
    hub.fail("/commit/", times=ALWAYS)
    with pytest.warns(GroupRobustWarning, match=f"A push to the Hub failed: .*500.*The push to {REPO} failed"):
        trainer.train()
    assert trainer.state.global_step == 4
    hub.failures.clear()
    trainer.push_to_hub()
    assert "README.md" in hub.repositories[REPO].files


@pytest.mark.usefixtures("no_pictures")
def test_the_hub_is_away_when_the_repository_is_to_be_made(hub: HubServer, tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path / "out")
    trainer.args.hub_token = TOKEN
    hub.fail("/api/repos/create", times=ALWAYS)
    with pytest.raises(HfHubHTTPError, match="The push to the Hub failed, the training did not"):
        trainer.push_to_hub()
    assert (tmp_path / "out" / "model.safetensors").exists() and (tmp_path / "out" / "README.md").exists()


@pytest.mark.usefixtures("no_pictures")
def test_front_matter_that_the_hub_refuses_does_not_hold_up_the_weights(hub: HubServer, tmp_path: Path) -> None:
    trainer = build_trainer(tmp_path / "out", PUSHES)
    with pytest.warns(GroupRobustWarning, match="refused the front matter.*license"):
        trainer.push_to_hub(license="no such licence")
    files = hub.repositories[REPO].files
    card = ModelCard(files["README.md"].decode())
    assert "model.safetensors" in files and card.data.license is None
    assert "How the groups fare" in card.text


def test_a_card_that_cannot_be_written_does_not_hold_up_the_weights(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build_trainer(tmp_path / "out", PUSHES)
    monkeypatch.setattr("hf_cgd.trainer.publishing.write_card", lambda *a, **k: 1 / 0)
    with pytest.warns(GroupRobustWarning, match="could not be written.*ZeroDivisionError"):
        trainer.push_to_hub()
    assert {"README.md", "model.safetensors"} <= set(hub.repositories[REPO].files)


def test_a_repository_that_cannot_be_made_is_told_of_before_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("transformers.Trainer.init_hf_repo", fail)
    with pytest.raises(OSError, match="Name or service"):
        build_trainer(tmp_path / "out", PUSHES)
    assert "nothing was trained" in caplog.text and "hf auth login" in caplog.text


@pytest.mark.usefixtures("no_pictures")
def test_a_repository_without_a_report(hub: HubServer, tmp_path: Path) -> None:
    build_trainer(tmp_path / "out", PUSHES)
    with pytest.raises(ValueError, match="holds no group_report.json"):
        hf_cgd.load_report(REPO)
    with pytest.raises(OSError):
        hf_cgd.load_report(f"{USER}/nothing-here")
