"""A recipe that trains nothing: it writes the report that it is told to, or does what else runs may do."""

import argparse
import json
import sys
import time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--objective")
parser.add_argument("--seed", type=int)
parser.add_argument("--output_dir", type=Path)
parser.add_argument("--resume_from_checkpoint")
parser.add_argument("--step_size", type=float, default=0.0)
parser.add_argument("--ratio", type=float, default=1.0)
parser.add_argument("--fail", help="Runs whose folder holds this text end with an error, as long as `broken` exists.")
parser.add_argument("--broken", type=Path)
parser.add_argument("--wait_for", type=int, help="Wait until this many runs have begun.")
parser.add_argument("--begun", type=Path, help="Folder in which each run leaves a file when it begins.")
parser.add_argument("--hang", action="store_true")
parser.add_argument("--group_column", nargs="+")
own, rest = parser.parse_known_args()

folder = own.output_dir
# Whoever was to end it may be gone.
last = time.monotonic() + 1800
folder.mkdir(parents=True, exist_ok=True)
with open(folder / "starts.txt", "a", encoding="utf-8") as file:
    file.write(f"{own.resume_from_checkpoint}\n")
if own.begun is not None:
    (own.begun / str(folder).replace("/", "_")).touch()
    while own.wait_for and len(list(own.begun.iterdir())) < own.wait_for and time.monotonic() < last:
        time.sleep(0.02)
while own.hang and time.monotonic() < last:
    time.sleep(0.1)
if own.fail and own.fail in str(folder) and own.broken.exists():
    sys.exit("the disk is full")
checkpoint = folder / "checkpoint-5"
checkpoint.mkdir(exist_ok=True)
(folder / "model.safetensors").write_text("weights")
score = round(0.5 + 0.1 * own.step_size + 0.01 * own.seed - 0.001 * own.ratio, 6)
evaluations = [{"step": step, "eval_worst_group_accuracy": score - 0.1 * step, "eval_loss": 1.0} for step in range(5)]
history = [{"step": 0, "loss": 2.0}, *evaluations]
for place in (folder, checkpoint):
    (place / "trainer_state.json").write_text(json.dumps({"log_history": history}))
report = {
    split: {
        "overall": {"accuracy": 0.9, "worst_group_accuracy": score - shift, "loss": 1 - score},
        "groups": [{"name": "a", "accuracy": 0.9}, {"name": "b", "accuracy": score - shift}],
    }
    for split, shift in (("validation", 0.0), ("test", 0.05))
}
(folder / "group_report.json").write_text(json.dumps(report))
