"""Fine-tune a text classifier on your own data so that its worst group does well: what `hf-cgd train text` does.

accelerate launch recipes/text_classification.py --dataset reviews.csv --group_column label place
python recipes/text_classification.py --dataset my/folder --label_column mood --model my/minilm --objective group_dro
python recipes/text_classification.py recipes/configs/text_classification.yaml --dataset owner/name
"""

from hf_cgd.cli import run_program
from hf_cgd.cli.own_data import TEXT

Options, main = TEXT.options, TEXT.main

if __name__ == "__main__":
    run_program(main)
