"""`hf-cgd demo`: the quickstart, from the package alone."""

from collections.abc import Sequence

from hf_cgd.cli.parser import parser_of


def main(words: Sequence[str]) -> None:
    """Run it."""
    parser = parser_of(
        "demo",
        "A shortcut, a noisy group, and what ERM, equal weights, Group-DRO, CGD and CGD with consensus make of them:\n"
        "handwritten digits from seven sources, offline, about a minute on a CPU. Ends with a table and a picture.",
        ("demo", "demo --seeds 1", "demo --split validation --first_seed 100 --seeds 5 --step_size 0.003"),
    )
    parser.add_argument(
        "--output", default="out/quickstart/quickstart.png", help="The picture (default: %(default)s)."
    )
    parser.add_argument("--seeds", type=int, default=4, help="Runs of each method (default: 4).")
    parser.add_argument("--first_seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--split", choices=("validation", "test"), default="test", help="What is reported.")
    parser.add_argument("--step_size", type=float, help="Of Group-DRO and CGD; by default the package's.")
    own = parser.parse_args(words)
    if own.seeds < 1:
        parser.error(f"--seeds: expected at least 1, got {own.seeds}")
    from hf_cgd.cli.coloured_digits import run

    run(own)
