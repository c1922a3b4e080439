"""MultiNLI whose negated hypotheses do not all read as contradictions: six groups, label x negation.

accelerate launch recipes/multinli_cgd.py --objective cgd --step_size 0.01
python recipes/multinli_cgd.py --demo --objective group_dro      # offline, about a minute
python recipes/multinli_cgd.py --data_dir my/multinli --split group_dro --preset group_dro --objective group_dro
python recipes/multinli_cgd.py recipes/configs/multinli_paper.yaml --data_dir my/multinli
"""

from hf_cgd.cli import TaskRecipe, run_program
from hf_cgd.tasks.multinli import MultiNLI

RECIPE = TaskRecipe(MultiNLI)

if __name__ == "__main__":
    run_program(RECIPE.main)
