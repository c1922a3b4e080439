"""Noise-, Rotation- and Spurious-MNIST of the CGD paper (appendix D): ResNet-18 from scratch, one run.

accelerate launch recipes/mnist_settings.py --setting noise --objective cgd --step_size 0.1 --seed 0
python recipes/mnist_settings.py --setting rotation --classes 10 --objective group_dro --data_dir my/mnist
python -m hf_cgd.experiments mnist_settings -- --data_dir my/mnist        # the paper's Table 2
"""

from hf_cgd.cli import TaskRecipe, run_program
from hf_cgd.tasks.mnist_settings import MNISTSettings

RECIPE = TaskRecipe(MNISTSettings)

if __name__ == "__main__":
    run_program(RECIPE.main)
