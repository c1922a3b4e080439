"""FMoW-WILDS: 62 kinds of land use in later years, judged by the worst region of the world. Groups: years.

accelerate launch recipes/fmow_cgd.py --source wilds --data_dir my/wilds/folders --objective cgd --step_size 0.01
python recipes/fmow_cgd.py --data_dir my/fmow_v1.1 --preset wilds2.0 --objective group_dro
python recipes/fmow_cgd.py --demo                                         # offline, about a minute
"""

from hf_cgd.cli import TaskRecipe, run_program
from hf_cgd.tasks.fmow import FMoW

RECIPE = TaskRecipe(FMoW)

if __name__ == "__main__":
    run_program(RECIPE.main)
