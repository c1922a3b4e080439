"""Camelyon17-WILDS: tumours in the patches of a hospital that was never seen. Groups: hospitals.

accelerate launch recipes/camelyon17_cgd.py --source wilds --data_dir my/wilds/folders --objective cgd
python recipes/camelyon17_cgd.py --data_dir my/camelyon17_v1.0 --preset wilds2.0 --objective group_dro
python recipes/camelyon17_cgd.py --demo                                   # offline, about a minute
"""

from hf_cgd.cli import TaskRecipe, run_program
from hf_cgd.tasks.camelyon17 import Camelyon17

RECIPE = TaskRecipe(Camelyon17)

if __name__ == "__main__":
    run_program(RECIPE.main)
