"""Run by every process of tests/test_distributed.py: trains and evaluates, and writes what came out."""

import json
import os
import sys

import torch
from tiny import parameters_of, text_dataset, tiny_distilbert

from hf_cgd import GroupRobustConfig, GroupRobustTrainer

OBJECTIVES = ("erm", "erm_uw", "group_dro", "cgd", "pgi", "irm", "coral")
KNOBS: dict[str, dict] = {
    "group_dro": {"step_size": 0.5},
    "cgd": {"step_size": 0.5},
    "pgi": {"penalty_weight": 2.0},
    "irm": {"penalty_weight": 5.0, "penalty_anneal_steps": 2},
    "coral": {"penalty_weight": 2.0},
}


def run(objective: str, output_dir: str) -> dict:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    args = GroupRobustConfig(
        output_dir, objective=objective, group_column="group", max_steps=5, use_cpu=True, report_to=[],
        per_device_train_batch_size=8 // world, per_device_eval_batch_size=2, optim="sgd", learning_rate=0.1,
        lr_scheduler_type="constant", max_grad_norm=0, save_strategy="no", logging_steps=1, disable_tqdm=True,
        train_sampling_strategy="sequential", **KNOBS.get(objective, {}),
    )  # fmt: skip
    # Groups 0 and 2 fill the first rows of each batch, so that the processes hold different groups.
    data = text_dataset(40)
    data = data.remove_columns("group").add_column("group", [0, 0, 0, 2, 1, 1, 2, 1] * 5)
    trainer = GroupRobustTrainer(tiny_distilbert(), args, train_dataset=data, eval_dataset=text_dataset(7, groups=3))
    trainer.train()
    metrics = trainer.evaluate()
    others = trainer.accelerator.gather(parameters_of(trainer.model)[None])
    weights = trainer.group_weights
    trainer.predict(text_dataset(7, groups=3))
    reports = [str(trainer.group_report(prefix)) for prefix in ("eval", "test")]
    return {
        "world": trainer.accelerator.num_processes,
        "wrapped": type(trainer.model_wrapped).__name__,
        "parameters": parameters_of(trainer.model).tolist(),
        "spread": (others - others[0]).abs().max().item(),
        "weights": None if weights is None else weights.tolist(),
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "group_losses": [
            {k: v for k, v in entry.items() if k.startswith("group_loss")}
            for entry in trainer.state.log_history
            if "loss" in entry
        ],
        "reports": reports,
        "metrics": {k: v for k, v in metrics.items() if "accuracy" in k or "loss" in k or "count" in k},
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = {objective: run(objective, os.path.join(sys.argv[1], objective)) for objective in OBJECTIVES}
    rank = os.environ.get("RANK", "0")
    with open(os.path.join(sys.argv[1], f"rank{rank}.json"), "w") as file:
        json.dump(results, file)
