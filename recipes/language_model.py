"""Train or fine-tune a language model on several sources so that the one it does worst on does well.

python recipes/language_model.py --demo --objective group_dro --max_steps 200
python recipes/language_model.py --sources news=news.txt code=src/ chats=chats.jsonl --objective cgd
python recipes/language_model.py --sources ... --objective group_dro --reference_model outputs/erm
accelerate launch recipes/language_model.py --sources ... --model my/gpt2 --group_sampling weights
"""

from hf_cgd.cli import run_program
from hf_cgd.cli.language_model import DEFAULTS, LanguageModelOptions, main

Options, defaults = LanguageModelOptions, DEFAULTS

if __name__ == "__main__":
    run_program(main)
