"""Waterbirds: birds whose place gives them away, but for 5 % of them. Four groups, label x place.

accelerate launch recipes/waterbirds_cgd.py --data_dir my/waterbirds --objective cgd --step_size 0.01
python recipes/waterbirds_cgd.py --source wilds --data_dir my/wilds/folders --preset group_dro --objective group_dro
python recipes/waterbirds_cgd.py --demo                                   # offline, about a minute
python -m hf_cgd.experiments waterbirds -- --data_dir my/waterbirds       # the paper's column
"""

from hf_cgd.cli import TaskRecipe, run_program
from hf_cgd.tasks.waterbirds import Waterbirds

RECIPE = TaskRecipe(Waterbirds)

if __name__ == "__main__":
    run_program(RECIPE.main)
