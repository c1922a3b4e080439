"""`hf-cgd evaluate`: how each group fares under a model that is there already, trained here or not."""

from collections.abc import Sequence
from typing import Any

from hf_cgd.cli.own_data_options import MAX_LENGTH
from hf_cgd.cli.parser import add_columns, add_data, parser_of

KINDS = ("text", "image")


def main(words: Sequence[str]) -> dict[str, Any]:
    """Evaluate; what was left, JSON-ready, see `hf_cgd.cli.results.summary_of`."""
    parser = parser_of(
        "evaluate",
        "How each group fares under a model that is there already: any text or image classifier of transformers or\n"
        "timm. Writes the table of groups, the report, a card and pictures; the model is left as it is.",
        (
            "evaluate outputs/text_classification new_reviews.csv --group_column place",
            "evaluate my/vit my/images --group_column hospital --split validation --predictions",
            "evaluate user/model new_reviews.csv --label_column mood --labels glad sad --group_column mood place",
        ),
    )
    parser.add_argument("model", metavar="MODEL", help="Local folder, or id of a model on the Hub.")
    add_data(parser)
    add_columns(parser)
    columns = parser.add_argument_group("inputs")
    columns.add_argument("--text_column", default="text", help="Column of the texts (default: text).")
    columns.add_argument("--text_pair_column", help="Column of second texts, for pairs.")
    columns.add_argument("--image_column", default="image", help="Column of images or their paths (default: image).")
    columns.add_argument(
        "--max_length", type=int, help=f"Tokens of a text (default: those of its training, else {MAX_LENGTH})."
    )
    more = parser.add_argument_group("evaluation")
    more.add_argument(
        "--split", help="train, validation or test; by default test, else validation, else all there is."
    )
    more.add_argument(
        "--labels", nargs="+", metavar="NAME", help="Names of the model's outputs, in order, where it has none itself."
    )
    more.add_argument("--kind", choices=KINDS, help="What the inputs are; by default what the model says.")
    more.add_argument("--batch_size", type=int, default=64, help="(default: 64)")
    more.add_argument("--output_dir", help="Folder of the results (default: outputs/evaluate/<model>).")
    more.add_argument("--overwrite_output_dir", action="store_true", help="Write over the report that is there.")
    more.add_argument("--predictions", action="store_true", help="Write the model's answer for each row to a file.")
    more.add_argument("--no_pictures", action="store_true", help="Draw none.")
    more.add_argument("--use_cpu", action="store_true", help="Even where there is a GPU.")
    own = parser.parse_args(words)
    if own.group_column is None:
        parser.error("--group_column: which column(s) tell the group? hf-cgd groups DATA lists what there is")
    from hf_cgd.cli.evaluation import evaluate

    return evaluate(own)
