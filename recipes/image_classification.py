"""Fine-tune an image classifier on your own data so that its worst group does well: what `hf-cgd train image` does.

accelerate launch recipes/image_classification.py --dataset my/images --group_column label place
python recipes/image_classification.py --dataset table.csv --image_column file --model resnet18 --group_column hospital
python recipes/image_classification.py --dataset owner/name --model google/vit-base-patch16-224 --group_column place
"""

from hf_cgd.cli import run_program
from hf_cgd.cli.own_data import IMAGE

Options, main = IMAGE.options, IMAGE.main

if __name__ == "__main__":
    run_program(main)
