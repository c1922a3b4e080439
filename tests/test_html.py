"""Elements that no text can break out of."""

from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from hf_cgd import GroupInfo
from hf_cgd.html import interval_bar, raw, tag


class Read(HTMLParser):
    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.feed(content)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data


@given(st.text(st.characters(exclude_categories=("C",))), st.text(st.characters(exclude_categories=("C",))))
def test_any_text_comes_back_as_it_was(content: str, attribute: str) -> None:
    read = Read(tag("p", content, tag("b", content), title=attribute, class_=None, data_x=1))
    assert read.tags == [("p", {"title": attribute, "data-x": "1"}), ("b", {})]
    assert read.words == 2 * content


def test_only_what_is_marked_as_html_is_taken_as_it_is() -> None:
    assert tag("p", raw("<i>x</i>"), "<i>", [tag("b", "y")]) == "<p><i>x</i>&lt;i&gt;<b>y</b></p>"
    # Put together by hand it is text again.
    assert tag("p", "" + tag("b", "y")) == "<p>&lt;b&gt;y&lt;/b&gt;</p>"


def test_a_bar_stays_inside_its_frame() -> None:
    bar = interval_bar(1.5, -1.0, 0.25)
    assert "width:100.0%" in bar and "left:0.0%;width:25.0%" in bar


def test_groups_in_a_notebook() -> None:
    page = GroupInfo(("<b>", "rare"), (30, 10), ("place",))._repr_html_()
    assert "&lt;b&gt;" in page and "75.0%" in page and "2 groups by place" in page
    bold = page.split("font-weight:bold")
    assert len(bold) == 2 and "rare" in bold[1].split("</tr>")[0]
    assert "not counted" in GroupInfo(("a",))._repr_html_()
