"""The report page: what stands in it, that nothing breaks out of it, and how a browser shows it."""

import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from programs import HANGS
from tiny import predicts_one_class

from hf_cgd import GroupReport, GroupRobustTrainer
from hf_cgd.cards import RunRecord, html_report
from hf_cgd.cards.html_report import SHOWN_GROUPS
from hf_cgd.cards.svg import line_chart
from hf_cgd.metrics import GroupRow

from .conftest import NAMES

pytestmark = predicts_one_class
BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
VOID = {"meta", "img", "br", "link"}


class Page(HTMLParser):
    """Counts the elements, collects the text, and checks that all that is opened is closed."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.open: list[str] = []
        self.words: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(content)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements[tag] += 1
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def page(trained: GroupRobustTrainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page about two runs: one from its trainer, one from its folder."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    return html_report([trained.run_record(name="first"), trained.args.output_dir], path)


def test_it_holds_the_runs_own_numbers_and_explains_them(page: Path, trained: GroupRobustTrainer) -> None:
    read = Page(page.read_text(encoding="utf-8"))
    report = trained.group_report()
    for row in report.rows:
        assert " ".join(row.name.split()) in read.text
        assert f"{row.accuracy:.3f} ({row.accuracy_low:.3f} to {row.accuracy_high:.3f})" in read.text
    assert report.gap() is not None and f"{report.gap():.3f} gap between best and worst" in read.text
    for words in ("Who helps whom", "Weights of the groups over", "What these numbers do not tell", "step_size",
                  "fewer than 100 examples", "The runs side by side"):  # fmt: skip
        assert words in read.text, words
    assert read.elements["polyline"] == 2 * len(NAMES), "a line for each group of each run"


def test_it_loads_nothing_and_names_are_no_markup(page: Path) -> None:
    content = page.read_text(encoding="utf-8")
    read = Page(content)
    assert read.elements["script"] == 0 and read.elements["img"] == 0 and read.elements["link"] == 0
    assert not [value for name, value in read.attributes if name in ("src", "href", "onerror", "onload")]
    assert "url(" not in content and "@import" not in content
    assert "<script>alert(1)</script>" in " ".join(read.words).replace("\n", " ")[:100_000]


def test_of_many_groups_those_of_the_highest_perplexity_are_shown(tmp_path: Path) -> None:
    rows = tuple(GroupRow(f"g{n}", count=200, others={"perplexity": 1.0 + n}) for n in range(100))
    record = RunRecord("m", {"name": "erm"}, reports={"test": GroupReport((*rows, GroupRow("none")), {}, "erm")})
    text = Page(html_report(record, tmp_path / "one.html").read_text(encoding="utf-8")).text
    assert text.rindex(" g99 ") < text.index(" g70 ")
    assert text.index(" g70 ") < text.index("The other 71 groups") < text.index(" g69 ") < text.index(" g0 ")
    assert text.index(" g0 ") < text.rindex(" none ")


def test_many_groups_and_runs_without_weights(tmp_path: Path) -> None:
    rows = tuple(GroupRow(f"g{n}", count=200, accuracy=n / 100) for n in range(100))
    erm = RunRecord("erm", {"name": "erm", "knobs": {}}, reports={"test": GroupReport(rows, {"accuracy": 0.5}, "erm")})
    read = Page(html_report(erm, tmp_path / "one.html").read_text(encoding="utf-8"))
    assert f"The other {100 - SHOWN_GROUPS} groups" in read.text and "Weights of the groups" not in read.text
    assert read.text.index(" g29 ") < read.text.index("The other 70 groups") < read.text.index(" g30 ")
    Page(html_report([erm, RunRecord("nothing")], tmp_path / "two.html").read_text(encoding="utf-8"))
    with pytest.raises(ValueError, match="at least one run"):
        html_report([], tmp_path / "none.html")
    with pytest.raises(ValueError, match="holds no group_report.json"):
        html_report(tmp_path, tmp_path / "none.html")


def test_the_table_of_runs_says_how_many_groups_are_worst(tmp_path: Path) -> None:
    rows = tuple(GroupRow(name, count=200, accuracy=value) for name, value in (("a", 0.5), ("b", 0.9), ("c", 0.5)))
    tied = RunRecord("tied", reports={"test": GroupReport(rows, {"accuracy": 0.6}, "erm")})
    alone = RunRecord("alone", reports={"test": GroupReport(rows[:2], {"accuracy": 0.7}, "erm")})
    text = Page(html_report([tied, alone], tmp_path / "two.html").read_text(encoding="utf-8")).text
    assert (
        "with another seed it may come out otherwise" in text
        and " test a and 1 more 0.500 " in text
        and " test a 0.500 " in text
    )


def test_of_many_groups_under_several_runs_the_worst_are_shown(tmp_path: Path) -> None:
    rows = tuple(GroupRow(f"g{place:02}", count=200, accuracy=1 - place / 100) for place in range(50))
    runs = [RunRecord(name, reports={"test": GroupReport(rows, {"accuracy": 0.7}, "erm")}) for name in ("one", "two")]
    text = Page(html_report(runs, tmp_path / "two.html").read_text()).text
    (table,) = re.findall(r"the 30 of 50 that fare worst in one(.*?)How the groups fare", text, flags=re.DOTALL)
    assert re.findall(r"g\d\d", table) == [f"g{place}" for place in range(49, 19, -1)]


def test_runs_are_compared_on_a_set_that_all_have(tmp_path: Path) -> None:
    def run(name: str, **accuracies: float) -> RunRecord:
        reports = {
            where: GroupReport((GroupRow("g", count=200, accuracy=value),), {"accuracy": value}, "erm")
            for where, value in accuracies.items()
        }
        return RunRecord(name, {"name": "erm", "knobs": {}}, reports=reports)

    def told(*runs: RunRecord) -> str:
        return Page(html_report(runs, tmp_path / "page.html").read_text(encoding="utf-8")).text

    both, only = run("both", validation=0.91, test=0.72), run("only", validation=0.83)
    text = told(both, only)
    assert "accuracy of each group under each run, validation" in text
    assert text.index("0.910") < text.index("0.830") < text.index("0.720"), "the test set has a table of its own only"
    assert "each run, test" in told(both, run("also", test=0.5))
    # Of sets with different names the groups do not compare.
    assert "under each run" not in told(run("one", a=0.9), run("two", b=0.8))


def test_lines_stand_where_their_numbers_are() -> None:
    chart = line_chart(np.array([0.0, 10.0]), {"a": np.array([0.0, 1.0]), "b": np.array([1.0, np.nan])}, "weights")
    (x0, y0), (x1, y1) = (tuple(map(float, pair.split(","))) for pair in re.findall(r'points="(\S+) (\S+)"', chart)[0])
    levels = sorted({float(y) for y in re.findall(r'class="grid"[^>]* y1="([\d.]+)"', chart)})
    assert (y1, y0) == (levels[0], levels[-1]) and x0 < x1
    # A single value is a dot.
    assert f'cy="{levels[0]:.1f}"' in chart


@pytest.mark.skipif(BROWSER is None, reason="no Chromium; Debian: apt-get install chromium")
@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1300, "light")])
def test_a_browser_shows_it(page: Path, tmp_path: Path, width: int, scheme: str) -> None:
    shot, height = tmp_path / "shot.png", 1500
    probe = page.with_name(f"probe_{width}.html")
    # What the browser measured stands in the title of what it dumps.
    script = "<script>document.title=[innerWidth,document.documentElement.scrollWidth].join()</script></html>"
    probe.write_text(page.read_text(encoding="utf-8").replace("</html>", script), encoding="utf-8")
    common = [str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
              f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},{height}",
              f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}"]  # fmt: skip
    subprocess.run([*common, f"--screenshot={shot}", page.as_uri()], check=True, capture_output=True, timeout=HANGS)
    pixels = np.asarray(Image.open(shot).convert("L"))
    background = float(np.median(pixels))
    assert background < 60 if scheme == "dark" else background > 230
    assert pixels.std() > 5, "something is drawn"
    dumped = subprocess.run(
        [*common, "--dump-dom", probe.as_uri()], check=True, capture_output=True, timeout=HANGS, text=True
    )
    inner, scrolled = map(int, re.findall(r"<title>(\d+),(\d+)</title>", dumped.stdout)[0])
    assert scrolled <= inner, "the page itself never scrolls sideways"
    assert "&lt;script&gt;alert(1)" in dumped.stdout
