"""The CGD paper's Colored-MNIST: the digit's colour gives the class away, but for a minority of 1 in 1,001.

accelerate launch recipes/colored_mnist_cgd.py --objective cgd --step_size 0.1
python recipes/colored_mnist_cgd.py --data_dir my/mnist --objective group_dro --ratio 100 --num_train_epochs 10
python recipes/colored_mnist_cgd.py --train_size 10010 --group_column label group --group_sampling balanced
"""

from hf_cgd.cli import TaskRecipe, run_program
from hf_cgd.tasks.colored_mnist import ColoredMNIST

RECIPE = TaskRecipe(ColoredMNIST)

if __name__ == "__main__":
    run_program(RECIPE.main)
