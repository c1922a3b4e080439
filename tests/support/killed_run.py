"""A program that is killed by the system within its second save.

killed_run.py OUTPUT_DIR
"""

import os
import signal
import sys
from typing import Any

from tiny import text_dataset, tiny_distilbert

from hf_cgd import GroupRobustConfig, GroupRobustTrainer

SAVING: dict[str, Any] = {
    "objective": "cgd", "interaction_momentum": 0.5, "step_size": 0.5, "max_steps": 6, "save_strategy": "steps",
    "save_steps": 2, "optim": "adamw_torch", "learning_rate": 1e-3,
}  # fmt: skip


def killed_while_saving(output_dir: str) -> None:
    args = GroupRobustConfig(
        output_dir, group_column="group", per_device_train_batch_size=4, lr_scheduler_type="constant",
        max_grad_norm=0, use_cpu=True, report_to=[], logging_steps=1, disable_tqdm=True, seed=0, **SAVING,
    )  # fmt: skip
    run = GroupRobustTrainer(tiny_distilbert(), args, train_dataset=text_dataset(80, groups=40))
    save_rng_state = run._save_rng_state

    def kill(folder: str) -> None:
        if run.state.global_step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        save_rng_state(folder)

    run._save_rng_state = kill  # type: ignore[method-assign]
    run.train()


if __name__ == "__main__":
    killed_while_saving(sys.argv[1])
