"""`hf-cgd report`: one page about one or several runs, to hand on."""

from collections.abc import Sequence
from typing import Any

from hf_cgd.cli.parser import parser_of


def main(words: Sequence[str]) -> dict[str, Any]:
    """Write the page; {"page": where it is}."""
    parser = parser_of(
        "report",
        "Write one page about one or several runs, to hand on: groups with their intervals, the gap, weights over "
        "time,\nwho helps whom, settings, and what the numbers do not tell. It needs no other file and no network.",
        ("report outputs/text_classification", "report out/erm out/cgd user/model --output report.html"),
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="Folder of a run, or id of a model on the Hub.")
    parser.add_argument("--output", default="report.html", help="The page (default: report.html).")
    parser.add_argument("--title", help="Its title; by default the names of the runs.")
    own = parser.parse_args(words)
    from hf_cgd.cards import html_report, load_run

    records = []
    for run in own.runs:
        try:
            records.append(load_run(run))
        except OSError as error:
            raise OSError(
                f"RUN: expected the folder of a run, or the id of a model on the Hub, got {run!r}. {error}"
            ) from error
    page = html_report(records, own.output, title=own.title)
    print(f"Page: {page}")
    return {"page": str(page)}
