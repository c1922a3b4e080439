"""CivilComments-WILDS: toxic or not. Trained on label x black, evaluated on 16 subgroups that overlap.

accelerate launch recipes/civilcomments_cgd.py --data_dir my/civilcomments --objective cgd --step_size 0.01
python recipes/civilcomments_cgd.py --source wilds --data_dir my/wilds/folders --objective coral
python recipes/civilcomments_cgd.py --demo                          # offline, about a minute
python -m hf_cgd.experiments civilcomments -- --data_dir my/civilcomments     # the paper's column
"""

from hf_cgd.cli import TaskRecipe, run_program
from hf_cgd.tasks.civilcomments import CivilComments

RECIPE = TaskRecipe(CivilComments)

if __name__ == "__main__":
    run_program(RECIPE.main)
