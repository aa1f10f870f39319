"""Documents as Markdown and HTML; reports from records, with hostile names in them."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reproduce.synthetic import by_name, diverged, plan, record, table_records

from ddnn.reproduce.document import Bullets, Code, Document, Grid, Heading, Paragraph, Picture
from ddnn.reproduce.render import to_html, to_markdown
from ddnn.reproduce.report import build_report, write_report
from ddnn.reproduce.speed import SpeedUp
from ddnn.reproduce.tables import TABLES

EVIL = "<script>alert(1)</script> | *a* _b_ `c` [d](e) $f$ &lt; \n# g \x1b[31m \u202e \ud800"
TEXT = st.text(max_size=40)


def document(text: str) -> Document:
    """Every kind of block, with this text in it."""
    blocks = (
        Heading(2, text),
        Paragraph(text),
        Bullets((text, text)),
        Code(text),
        Grid((text, "b"), ((text, "1"), ("c", text)), "lr"),
        Picture("a.png", text, text, lambda path: path),
    )
    return Document(text, blocks)


class Reader(HTMLParser):
    """The tags and the text of a page; complains of a tag that is not closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@given(TEXT)
def test_html_holds_text_and_no_more(text: str) -> None:
    shapes = [[tag for tag, _ in Reader(to_html(document(t), {"a.png": b"x"})).tags] for t in (text, "plain")]
    assert shapes[0] == shapes[1]


@given(TEXT)
def test_markdown_holds_text_and_no_more(text: str) -> None:
    """As many lines as with plain text but for the code, and no bar that is not escaped."""
    without_code = [
        Document(t, tuple(b for b in document(t).blocks if not isinstance(b, Code))) for t in (f"x{text}", "plain")
    ]
    lines, plain = (to_markdown(d, "pictures").split("\n") for d in without_code)
    assert len(lines) == len(plain)
    bars = [[len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in page] for page in (lines, plain)]
    assert bars[0] == bars[1]


def test_evil_text_is_text() -> None:
    page = to_html(document(EVIL), {"a.png": b"x"})
    assert "<script" not in page and "\x1b" not in page and "\u202e" not in page
    page.encode()
    text = to_markdown(document(EVIL), "a b")
    outside = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert r"\<script\>" in outside and "<script" not in outside.replace(r"\<", "")
    assert "(a%20b/a.png)" in text
    text.encode()


@pytest.mark.parametrize("start", ["- a", "1. a", "1) a", "+ a", "=== a", "# a", "> a"])
def test_a_line_begins_no_block(start: str) -> None:
    assert "\\" in to_markdown(Document("t", (Paragraph(start),)), "x").split("\n")[2][:3]


def test_code_is_fenced_by_more_than_it_holds() -> None:
    assert to_markdown(Document("t", (Code("a\n```\nb"),)), "x").endswith("````\na\n```\nb\n````\n")


def test_uneven_tables_are_refused() -> None:
    with pytest.raises(ValueError, match="2 cells"):
        Grid(("a", "b"), (("c",),), "ll")


def test_report_of_a_table(tmp_path: Path) -> None:
    corpus = plan(name="a corpus")
    records = table_records(corpus, [TABLES["table6"]], {"sgd": 0.03, "sgd-half": 0.001})
    records |= by_name([diverged("sgd", 16, 3, EVIL)])
    del records["sgd-half-16-1"]
    found = build_report(corpus, [TABLES["table6"]], records, "ddnn reproduce table6", ["sgd-half-16-1"], [])
    files = write_report(found, tmp_path / "results" / "an.4")
    assert [path.name for path in files] == ["an.4.md", "an.4.html", "table6.png", "table6-learning.png"]
    text = files[0].read_text()
    for piece in (
        "NG-SGD is better than SGD, on many | SWB +1.2, CH +1.3 (16 GPUs)",
        "not tested (2 common seeds, expected 3 or more; 1 of 3 runs of SGD, 16 workers diverged)",
        "| runs that diverged (%) | 0.00 | 33.33 | +33.33 | +0.00 to +100.00 |",
        "1 run of this table is missing",
        "| SGD at half the rate † | 16 | 2 of 3 |",
        "| 3, 1 diverged |",
        "| SGD | 16 | 16.3 | 28.3 |",
        "(an.4/table6.png)",
        "ddnn reproduce table6",
    ):
        assert piece in text
    tags = Reader(files[1].read_text()).tags
    assert {"script", "link", "iframe"}.isdisjoint(tag for tag, _ in tags)
    sources = [attributes["src"] for tag, attributes in tags if tag == "img"]
    assert len(sources) == 2 and all(source and source.startswith("data:image/png;base64,") for source in sources)
    summary = json.loads(json.dumps(found.summary, allow_nan=False))
    assert [c["verdict"] for c in summary["contrasts"]][:2] == ["reproduces", "not tested"]
    assert summary["contrasts"][0]["measures"][1]["interval"][0] > 0.0


def test_report_without_runs(tmp_path: Path) -> None:
    found = build_report(plan(), list(TABLES.values()), {}, "ddnn reproduce all", ["base-1-1"], [])
    text = write_report(found, tmp_path / "empty")[0].read_text()
    assert "| RBM | 16 | 0 of 3 | - |" in text and "No runs." in text
    assert "not tested (no runs of: " in text and "Loss against" not in text


def test_report_of_speed() -> None:
    corpus = plan()
    records = table_records(corpus, [TABLES["figure2"]])
    speeds = [SpeedUp("base", "all-reduce", 16, 13.5, "predicted"), SpeedUp("base", "all-reduce", 2, 1.9, "measured")]
    found = build_report(corpus, [TABLES["figure2"]], records, "c", [], speeds)
    text = to_markdown(found, "x")
    assert "| all-reduce | predicted | - | 13.50 |" in text and "| all-reduce | measured | 1.90 | - |" in text
    assert "4 workers on 2" in text and "(x/figure2-speed.png)" in text
    assert "| all-reduce | 2 | 450 | 2.222 | 55.0 | 81.8 | 5.5 | 1.8 |" in text


def test_the_aim_is_met_or_not() -> None:
    corpus = plan(workers=(1, 16))
    runs = [record("base", n, seed, 0.6 - 0.003 * (n > 1)) for n in (1, 16) for seed in (1, 2, 3)]
    closing = [record("closing", n, seed, 0.6) for n in (1, 16) for seed in (1, 2, 3)]
    for extra, sentence in (([], "in none of these settings"), (closing, "in: closing (+0.00, 3 seeds)")):
        text = to_markdown(build_report(corpus, [TABLES["table1"]], by_name(runs + extra), "c", [], []), "x")
        assert sentence in text
    longer = [run.model_copy(update={"epochs": 11}) for run in closing]
    text = to_markdown(build_report(corpus, [TABLES["table1"]], by_name(runs + longer), "c", [], []), "x")
    assert "in none of these settings" in text and "+0.00 (+0.00 to +0.00) ‡" in text


def test_what_a_corpus_says_of_a_table_stands_in_the_report() -> None:
    corpus = plan(notes={"table2": "An hour | of speech.", "all": "Small."})
    document = build_report(corpus, [TABLES["table2"]], {}, "ddnn reproduce", [], [])
    markdown = to_markdown(document, "x")
    assert "Small." in markdown and "An hour" in markdown and "of speech." in markdown
