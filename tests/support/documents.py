"""Code in the documents: the blocks of a page, the cells of a notebook, and what they print.

python tests/support/documents.py        writes docs/reference/options.md
"""

import json
import re
from collections.abc import Iterable
from contextlib import redirect_stdout
from dataclasses import MISSING, dataclass, fields
from io import StringIO
from pathlib import Path

from paths import ROOT

DOCS = ROOT / "docs"
OPTIONS = DOCS / "reference/options.md"


@dataclass(frozen=True)
class Piece:
    """Code, and what the document says that it prints; None where it says nothing."""

    code: str
    printed: str | None


def pieces_of_page(path: Path) -> list[Piece]:
    """Python blocks of a page; a block of text right behind one is its output."""
    found = re.findall(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", path.read_text(encoding="utf-8"), re.DOTALL)
    return [Piece(code, printed or None) for code, printed in found]


def pieces_of_notebook(path: Path) -> list[Piece]:
    """Code cells of a notebook with what they print; lines for IPython alone (`%…`) are left out."""
    pieces = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        lines = "".join(cell["source"]).splitlines()
        printed = "".join("".join(out["text"]) for out in cell["outputs"] if out["output_type"] == "stream")
        pieces.append(Piece("\n".join(line for line in lines if not line.startswith("%")), printed or None))
    return pieces


def run(pieces: Iterable[Piece]) -> list[tuple[str, str]]:
    """Run them in order in one namespace; (said, printed) of each that says what it prints."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    outputs = []
    for piece in pieces:
        output = StringIO()
        with redirect_stdout(output):
            exec(compile(piece.code, "<document>", "exec"), namespace)
        if piece.printed is not None:
            outputs.append((piece.printed, _without_log(output.getvalue())))
    return outputs


def _without_log(text: str) -> str:
    # The Trainer prints its log entries as dictionaries.
    return "\n".join(line for line in text.splitlines() if not line.startswith("{'"))


def words_and_numbers(text: str) -> tuple[str, list[float]]:
    """Text with # for each number, and the numbers; blanks, rules and the mark of the worst group do not count."""
    text = re.sub(r"-{3,}| \(worst\)", " ", text)
    numbers = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]
    return " ".join(re.sub(r"\d+(?:\.\d+)?", "#", text).split()), numbers


def options_page() -> str:
    """The options of group-robust training, from their definitions."""
    from hf_cgd.trainer.config import GroupOptions

    rows = []
    for option in fields(GroupOptions):
        assert option.default is not MISSING, option.name
        words = option.metadata["help"].replace("|", "\\|")
        rows.append(f"| `{option.name}` | `{option.default!r}` | {words} |")
    head = """# Options

Fields of `GroupRobustConfig` beside those of `transformers.TrainingArguments`; options of the text, image and benchmark recipes under the same names
(`--step_size 0.1`). `None` means the default that is named in the text, or none. The options of an objective are refused beside an objective that does not have them.

| option | default | meaning |
| --- | --- | --- |
"""
    return head + "\n".join(rows) + "\n"


if __name__ == "__main__":
    OPTIONS.write_text(options_page(), encoding="utf-8")
