"""CelebA: blond or not, where few of the men are. Four groups, label x gender.

accelerate launch recipes/celeba_cgd.py --data_dir my/celeba --objective cgd --step_size 0.01
python recipes/celeba_cgd.py --source wilds --data_dir my/wilds/folders --preset group_dro --objective group_dro
python recipes/celeba_cgd.py --demo                                 # offline, about a minute
python -m hf_cgd.experiments celeba -- --data_dir my/celeba         # the paper's column
"""

from hf_cgd.cli import TaskRecipe, run_program
from hf_cgd.tasks.celeba import CelebA

RECIPE = TaskRecipe(CelebA)

if __name__ == "__main__":
    run_program(RECIPE.main)
