"""Markdown and HTML of the templates; reports from records, with hostile names in them."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from browser import CHROMIUM, browser
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import UndefinedError
from reproduce.synthetic import TABLES, by_name, collapsed, diverged, epoch, plan, record, table_records

from ddnn.reproduce.entries import fit_shared_times
from ddnn.reproduce.report import Report, build_report, report_templates
from ddnn.reproduce.tables import paper
from ddnn.util.text import environment

EVIL = "<script>alert(1)</script> | *a* _b_ `c` [d](e) $f$ &lt; \n# g \x1b[31m \u202e \ud800"
TEXT = st.text(max_size=40)


def report_with(text: str, command: str = "ddnn reproduce") -> Report:
    """A report with this text in all places where text of users or files is shown: notes, reasons, machines."""
    runs = by_name([diverged("sgd", 16, 1, text), record("base", 16, 1, 0.6, machine=text, version=text)])
    corpus = plan().model_copy(update={"notes": {"all": text, "table6": text}})
    return build_report(corpus, [TABLES["table6"]], runs, command, [])


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


@settings(deadline=None, max_examples=10)
@given(TEXT)
def test_html_holds_text_and_no_more(text: str) -> None:
    shapes = [[tag for tag, _ in Reader(report_with(t, t).html("a b", {})).tags] for t in (f"x{text}", "plain")]
    assert shapes[0] == shapes[1]


@settings(deadline=None, max_examples=10)
@given(TEXT)
def test_markdown_holds_text_and_no_more(text: str) -> None:
    """As many lines as with plain text, and no bar that is not escaped."""
    lines, plain = (report_with(t).markdown("a b").split("\n") for t in (f"x{text}", "plain"))
    assert len(lines) == len(plain)
    bars = [[len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) for line in page] for page in (lines, plain)]
    assert bars[0] == bars[1]


def test_evil_text_is_text() -> None:
    page = report_with(EVIL, EVIL).html("a b", {})
    assert "<script" not in page and "\x1b" not in page and "\u202e" not in page
    page.encode()
    shown = "".join(Reader(page).text)
    assert "<script>alert(1)</script> | *a* _b_ `c` [d](e) $f$ &lt;" in shown, "as it was written"
    text = report_with(EVIL, EVIL).markdown("a b")
    outside = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    assert r"\<script\>" in outside and "<script" not in outside.replace(r"\<", "")
    assert "(a%20b/table6.svg)" in text
    text.encode()


@pytest.mark.parametrize("start", ["- a", "1. a", "1) a", "+ a", "=== a", "# a", "> a"])
def test_a_line_begins_no_block(start: str) -> None:
    template = report_templates().from_string("{{ text | md_line }}")
    assert "\\" in template.render(text=start)[:3]


def test_code_is_fenced_by_more_than_it_holds() -> None:
    assert "\n````\na\n```\nb\n````\n" in report_with("text", "a\n```\nb").markdown("x")


def test_a_name_that_nobody_gave_is_an_error() -> None:
    with pytest.raises(UndefinedError):
        environment().from_string("{{ absent }}").render()


def test_report_of_a_table(tmp_path: Path) -> None:
    corpus = plan(name="a corpus")
    records = table_records(corpus, [TABLES["table6"]], {"sgd": 0.03, "sgd-half": 0.001})
    records |= by_name([diverged("sgd", 16, 3, EVIL)])
    del records["sgd-half-16-1"]
    found = build_report(corpus, [TABLES["table6"]], records, "ddnn reproduce table6", ["sgd-half-16-1"])
    files = found.write(tmp_path / "results" / "an.4")
    assert [path.name for path in files] == ["an.4.md", "an.4.html", "table6.svg", "table6-learning.svg", "summary.svg"]
    text = files[0].read_text()
    for piece in (
        "NG-SGD is better than SGD, on many | SWB +1.2, CH +1.3 (16 GPUs)",
        "not tested (2 common seeds, expected 3 or more; 1 of 3 runs of SGD, 16 workers failed: seed 3)",
        "Verdicts: 1 confirmed; 2 not tested.",
        "1 run of this table is missing",
        "| SGD at half the learning rate † | 16 | 2 of 3 |",
        "| 3, 1 failed |",
        "of which 1 failed, 16 of unknown baseline",
        "| SGD | 16 | 16.3 | 28.3 |",
        "(an.4/table6.svg)",
        "(an.4/summary.svg)",
        "ddnn reproduce table6",
    ):
        assert piece in text
    tags = Reader(files[1].read_text()).tags
    assert {"script", "link", "iframe"}.isdisjoint(tag for tag, _ in tags)
    assert [tag for tag, _ in tags].count("svg") == 3 and "img" not in [tag for tag, _ in tags]
    summary = json.loads(json.dumps(found.summary, allow_nan=False))
    assert [c["verdict"] for c in summary["hypotheses"]][:2] == ["confirmed", "not tested"]
    assert summary["hypotheses"][0]["metrics"][1]["interval"][0] > 0.0


def test_the_labels_of_a_corpus_are_those_of_its_report() -> None:
    corpus = plan(labels={"closing": "half a minibatch"})
    runs = by_name([record("closing", 16, seed, 0.6) for seed in (1, 2, 3)])
    text = build_report(corpus, [TABLES["table1"]], runs, "c", []).markdown("x")
    assert "| half a minibatch † | 16 |" in text
    assert "half a minibatch, on many workers, is better than the paper's choice on one worker" in text
    assert "{" not in build_report(plan(), list(TABLES.values()), {}, "c", []).markdown("x")


def test_a_section_begins_with_its_plots() -> None:
    corpus, table = plan(), TABLES["table6"]
    text = build_report(corpus, [table], table_records(corpus, [table]), "c", []).markdown("x")
    for heading in ("## Summary", "## table6"):
        section = text.partition(heading)[2]
        assert 0 < section.index("![Plot") < section.index("| --- |")


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """The page of a table with three verdicts."""
    corpus = plan()
    records = table_records(corpus, [TABLES["table6"]], {"sgd": 0.03, "sgd-half": 0.001})
    records |= by_name([collapsed("sgd", 16, seed) for seed in (1, 2, 3)])
    command = "ddnn reproduce table6 --records " + "folder/" * 60
    return build_report(corpus, [TABLES["table6"]], records, command, []).write(tmp_path / "page")[1]


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian's package chromium)")
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1600])
def test_a_browser_shows_the_page(published: Path, tmp_path: Path, width: int, dark: bool) -> None:
    with browser(tmp_path / "profile") as tab:
        tab.open(published, width, dark=dark)
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is wider than the screen"
        assert tab.evaluate("document.querySelector('pre').scrollWidth <= document.querySelector('pre').clientWidth")
        verdicts = "[...document.querySelectorAll('.plot [id^=verdict-]')].map((row) => row.textContent.trim())"
        assert tab.evaluate(verdicts) == ["confirmed", "not comparable", "confirmed"]
        words = "[...document.querySelectorAll('table')][0].querySelectorAll('td:last-child b')"
        assert tab.evaluate(f"[...{words}].map((word) => word.textContent)") == tab.evaluate(verdicts)
        colors = tab.evaluate(f"[...{words}].map((word) => getComputedStyle(word).color)")
        assert colors[0] == colors[2] != colors[1]
        text = "getComputedStyle(document.querySelector('.plot svg text')).fill"
        assert tab.evaluate(text) == ("rgb(230, 237, 243)" if dark else "rgb(31, 35, 40)")
        folded = "[...document.querySelectorAll('details')].map((part) => [part.open, part.innerText.trim()])"
        assert tab.evaluate(folded) == [[False, "Method"], [False, "Runs"]]
        assert tab.problems == [] and tab.requests == [published.as_uri()]


def test_what_did_not_train_has_no_figures_in_the_report(tmp_path: Path) -> None:
    corpus, table = plan(), TABLES["table6"]
    records = table_records(corpus, [table], {"sgd": 0.03, "sgd-half": 0.001})
    records |= by_name([collapsed("sgd", 16, seed) for seed in (1, 2, 3)])
    found = build_report(corpus, [table], records, "c", [])
    text = found.markdown("x")
    for piece in (
        "| SGD | 16 | 3, 3 failed | - | - | - | - | - |",
        "| SWB +1.2, CH +1.3 (16 GPUs) | - | not comparable: SGD on 16 workers did not train (3 of 3 runs; seed 1: CV frame",
        "Verdicts: 2 confirmed; 1 not comparable.",
        "Runs that failed have no figure: 3 of 3 of SGD, 16 workers.",
        "| sgd-16-1 | 10 | 8.30 | 8.30 |",
        "11.0 % by always choosing the most frequent pdf |",
        "Runs that failed are not shown.",
    ):
        assert piece in text
    assert found.summary["verdicts"] == {"confirmed": 2, "not comparable": 1}
    assert {name for name, loss in degraded(found) if loss > 20} == set()


def degraded(report: Report) -> list[tuple[str, float]]:
    return [(entry.condition.name, loss.difference or 0.0) for entry, loss in report.context["degradations"]]


def test_standard_deviations_are_of_n_minus_1() -> None:
    """50 % and 52 % in two runs: 51 with a deviation of sqrt(2)."""
    runs = by_name(record("base", 1, seed, accuracy) for seed, accuracy in ((1, 0.50), (2, 0.52)))
    text = build_report(plan(seeds=(1, 2)), [TABLES["table1"]], runs, "c", []).markdown("x")
    assert "51.00 ± 1.41" in text


def test_report_without_runs(tmp_path: Path) -> None:
    found = build_report(plan(), list(TABLES.values()), {}, "ddnn reproduce all", ["base-1-1"])
    text = found.write(tmp_path / "empty")[0].read_text()
    assert "| RBM | 16 | 0 of 3 | - |" in text and "No runs." in text
    assert "not tested (no runs of: " in text and "Degradation against" not in text


def test_report_of_speed() -> None:
    corpus = plan()
    records = table_records(corpus, [TABLES["figure2"]])
    for name, seconds in (("base-1-1", 19.0), ("base-2-1", 10.0)):
        records[name] = records[name].model_copy(update={"measured": epoch(records[name].workers, seconds)})
    found = build_report(corpus, [TABLES["figure2"]], records, "c", [])
    text = found.markdown("x")
    assert "| all-reduce | measured | 1.00 | 1.90 | - |" in text
    assert "| all-reduce | predicted | - | - | 3.74 | - | 14.86 | - |" in text
    assert "| all-reduce | measured | 100.0 | 95.0 | - |" in text
    assert "| all-reduce | predicted | - | - | 93.5 | - | 92.9 | - |" in text
    assert "4 workers on 2" in text and "(x/figure2-speed.svg)" in text
    assert "| all-reduce | 2 | 3 | 450 | 2.222 | 55.0 | 81.8 | 5.5 | 1.8 |" in text


def test_report_of_workers_that_share_a_model() -> None:
    """Figures by hand from the formula, with its constants as they were fitted elsewhere; all within 5 % of the paper's."""
    table = TABLES["convnets"]
    assert table.times is not None
    of_all, of_three = fit_shared_times(table.times)
    assert of_all.image_seconds == pytest.approx(5.5e-3, rel=0.01)
    assert of_all.update_seconds == pytest.approx(0.385, rel=0.001)
    assert of_all.byte_seconds == pytest.approx(1 / 3.0e9, rel=0.005)
    assert [round(days, 2) for days in of_all.days] == [10.43, 6.45, 7.27, 7.11, 4.81]
    assert [round(days, 2) for days in of_three.days] == [10.5, 6.6, 7.0, 5.94, 4.82]
    published = [row.days for row in table.times.rows]
    assert max(abs(days / known - 1) for days, known in zip(of_all.days, published, strict=True)) < 0.05
    speed_ups = paper().published_speed_ups["data-parallel"] | {
        20 * n: value for n, value in paper().published_speed_ups["columns"].items()
    }
    keys = [row.replicas * row.columns * (20 if row.columns > 1 else 1) for row in table.times.rows]
    assert speed_ups == pytest.approx({key: 10.5 / days for key, days in zip(keys, published, strict=True)}, abs=0.005)
    text = build_report(plan(), [table], {}, "c", []).markdown("x")
    assert "| model parallel | 2 | 6.6 | 6.45 | -2.3 % | 6.60 | +0.0 % |" in text
    assert "| data parallel | 4 | 7.2 | 7.11 | -1.3 % | 5.94 | predicted, -17.5 % |" in text
    assert "| hybrid | 4 | 4.8 | 4.81 | +0.2 % | 4.82 | predicted, +0.4 % |" in text
    assert "5.5 ms for an image, 385 ms of each update that are not divided, 3.0 GB/s" in text


def test_speed_ups_of_workers_that_divide_a_minibatch() -> None:
    """They compare with the table's own base, though each worker has fewer frames in a minibatch."""
    corpus, table = plan(), TABLES["convnets"]
    records = table_records(corpus, [table])
    assert {run.workers for run in records.values()} == {1, 2, 4}
    for name, seconds in (("data-parallel-1-1", 20.0), ("data-parallel-2-1", 10.0)):
        run = records[name]
        measured = epoch(run.workers, seconds).model_copy(update={"minibatch_size": 256 // run.workers})
        records[name] = run.model_copy(update={"measured": measured})
    two = records["columns-2-1"]
    shared = epoch(2, 12.5).model_copy(update={"minibatch_size": 256, "columns": 2})
    records["columns-2-1"] = two.model_copy(update={"measured": shared})
    text = build_report(corpus, [table], records, "c", []).markdown("x")
    assert "with 4 workers hybrid | measured | 1.00 | 1.60 | - |" in text, "one replica has all of the minibatch"
    assert "| data: gradients, every minibatch | paper | 1.00 | 1.50 | 1.46 |" in text
    assert "| data: gradients, every minibatch | measured | 1.00 | 2.00 | - |" in text
    assert "| data: gradients, every minibatch | predicted" not in text


def test_times_are_medians_without_runs_on_overloaded_cores() -> None:
    corpus = plan()
    records = table_records(corpus, [TABLES["figure2"]])
    for seed, factor in ((1, 1.0), (2, 1.25), (3, 6.0)):
        run = records[f"base-2-{seed}"]
        assert run.time is not None
        time = run.time.model_copy(update={"seconds": 100.0 * factor, "compute_seconds": 90.0 * factor})
        records[run.name] = run.model_copy(update={"time": time, "measured": epoch(2, 10.0 * factor)})
    text = build_report(corpus, [TABLES["figure2"]], records, "c", []).markdown("x")
    assert text.startswith("# synthetic: Speed-up\n")
    assert "| all-reduce | 2 | 2 of 3 | 450 | 2.222 | 112.5 | 90.0 | 2.7 | 0.9 |" in text
    assert "Without 1 run on overloaded cores" in text and "| 600.0 (overloaded) |" in text


def test_the_hours_of_all_runs_are_summed_for_each_machine() -> None:
    runs = []
    for seed, machine, hours in ((1, "a CPU", 1.5), (2, "a CPU", 2.25), (3, "a GPU", 0.5)):
        run = record("base", 1, seed, 0.6, machine=machine)
        assert run.time is not None
        runs.append(run.model_copy(update={"time": run.time.model_copy(update={"seconds": 3600 * hours})}))
    text = build_report(plan(), [TABLES["table1"]], by_name(runs), "c", []).markdown("x")
    assert "- training time, summed: 3.8 h on a CPU; 0.5 h on a GPU;" in text


def test_the_aim_is_met_or_not() -> None:
    corpus = plan(workers=(1, 16))
    runs = [record("base", n, seed, 0.6 - 0.003 * (n > 1)) for n in (1, 16) for seed in (1, 2, 3)]
    closing = [record("closing", n, seed, 0.6) for n in (1, 16) for seed in (1, 2, 3)]
    for extra, sentence in (([], "in: none of these conditions"), (closing, "in: closing (+0.00, 3 seeds)")):
        text = build_report(corpus, [TABLES["table1"]], by_name(runs + extra), "c", []).markdown("x")
        assert sentence in text
    longer = [run.model_copy(update={"epochs": 11}) for run in closing]
    text = build_report(corpus, [TABLES["table1"]], by_name(runs + longer), "c", []).markdown("x")
    assert "in: none of these conditions" in text and "+0.00 (+0.00 to +0.00) ‡" in text


def test_what_a_corpus_says_of_a_table_stands_in_the_report() -> None:
    corpus = plan(notes={"table2": "An hour | of speech.", "all": "Small."})
    document = build_report(corpus, [TABLES["table2"]], {}, "ddnn reproduce", [])
    markdown = document.markdown("x")
    assert "Small." in markdown and "An hour" in markdown and "of speech." in markdown


def test_costs_are_shown_where_a_table_names_a_network() -> None:
    corpus, table = plan(), TABLES["schemes"]
    records = table_records(corpus, [table])
    measured = [run.model_copy(update={"measured": epoch(run.workers, 10.0)}) for run in records.values()]
    text = build_report(corpus, [table], by_name(measured), "c", []).markdown("x")
    header = (
        "| condition | workers | accuracy (%) | averagings | GB sent by a worker | CPU cores (s) | H200, NVLink (s) |"
    )
    assert header in text and "of 440-6x2048-8806 with these minibatches" in " ".join(text.split())
    assert header not in build_report(corpus, [table], records, "c", []).markdown("x")
