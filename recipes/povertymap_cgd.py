"""PovertyMap-WILDS: how wealthy is a village in a country that was never seen, by satellite? Groups: countries.

accelerate launch recipes/povertymap_cgd.py --source wilds --data_dir my/wilds/folders --fold A --objective cgd
python recipes/povertymap_cgd.py --data_dir my/poverty_v1.1 --preset wilds2.0 --objective group_dro
python recipes/povertymap_cgd.py --demo                                   # offline, about a minute
"""

from hf_cgd.cli import TaskRecipe, run_program
from hf_cgd.tasks.povertymap import PovertyMap

RECIPE = TaskRecipe(PovertyMap)

if __name__ == "__main__":
    run_program(RECIPE.main)
