"""The page of `ddnn report --html`: its figures and its safety without a browser, what it does in a headless Chromium."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser, browser
from jobs import make_job
from report_runs import epoch_row, rows_of, worker_row, write_run

from ddnn.recipe.load import load_recipe
from ddnn.report import write_run_page
from ddnn.report.figures import learning_points
from ddnn.report.page import render_page, write_page
from ddnn.report.runs import read_runs
from ddnn.report.table import report
from ddnn.runs.metrics import read_metrics
from ddnn.runs.rows import MetricsRow
from ddnn.training.job import run_training
from ddnn.training.step import EagerStep
from ddnn.util.errors import DivergedError

RunCli = Callable[..., Any]
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian's package chromium)")
MARKUP = "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'>"
ALONE = {"averagings": 0, "consensus_distance": None, "bytes_sent": 0}


class Page(HTMLParser):
    """Elements by name with their attributes, and the texts in them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self.texts.setdefault(tag, []).append("")
        if tag not in ("meta", "input", "img", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, "elements are closed in order"

    def handle_data(self, data: str) -> None:
        for tag in dict.fromkeys(self._open):
            self.texts[tag][-1] += data

    def of(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for tag, attributes in self.elements if tag == name]

    @property
    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.texts["script"][0], parse_constant=lambda name: pytest.fail(name))
        return found


def three_runs(folder: Path) -> list[Path]:
    """One worker, two, and two that are slow and whose last epoch is rejected; the second and third have word error rates."""
    slow = rows_of(2)
    for row in slow:
        row |= {"frames_per_second": 950.0} if row["type"] == "epoch" and row["split"] == "train" else {}
    slow[-1] |= {"accepted": False, "loss": 3.0}
    slow.append({"type": "event", "event": "restarted", "epoch": 2, "world_size": 2, "number": 1, "reason": "SIGKILL"})
    runs = [
        write_run(folder / "one", rows_of(1, **ALONE)),
        write_run(folder / "two", rows_of(2), "{workers: 2}", "seed: 7\n"),
        write_run(folder / "slow", slow, "{workers: 2}"),
    ]
    score = {"best": 0.1, "wer": 3.5, "scales": [
        {"acoustic_scale": 0.07, "word_insertion_penalty": 0.0, "wer": 3.5, "interval": [0.1, 0.2]},
        {"acoustic_scale": 0.1, "word_insertion_penalty": 0.0, "wer": 3.5, "interval": [2.25, 4.75]},
    ]}  # fmt: skip
    (runs[1] / "score_test.json").write_text(json.dumps(score))
    (runs[2] / "score_test.json").write_text(json.dumps({"wer": 10.5}))
    return runs


def hostile_runs(folder: Path) -> list[Path]:
    """Runs whose names and files try to be markup and script."""
    names = (f"a{MARKUP}", f"b{MARKUP}")
    rows = rows_of(2, start={"machine": MARKUP, "host": MARKUP})
    rows.append({"type": "event", "event": "restarted", "epoch": 2, "world_size": 2, "number": 1, "reason": MARKUP})
    runs = []
    for number, name in enumerate(names):  # a slash in the name is one in the path
        path = write_run(
            folder / name / "\u202ex' onclick='window.pwned = 3", rows, "{workers: 2}", f"seed: {number}\n"
        )
        recipe = (path / "recipe.yaml").read_text()
        train = json.dumps(f"/{number}/{MARKUP}")
        (path / "recipe.yaml").write_text(recipe.replace("train: /gone", f"train: {train}"))
        (path / "<b>${7*7}{{ 7*7 }}.json").write_text('{"wer": 1.0}')
        runs.append(path)
    return runs


def page_of(runs: list[Path]) -> Page:
    return Page(render_page(report(runs, None)))


def table_of(page: str, kind: str = "") -> list[list[str]]:
    """The cells of the first table whose tag has this text."""
    table = re.search(rf"<table{kind}>(.*?)</table>", page, re.DOTALL)
    assert table is not None
    lines = re.findall(r"<tr>(.*?)</tr>", table[1], re.DOTALL)
    return [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", line) for line in lines]


def test_a_page_needs_nothing_else_and_runs_no_other_script(tmp_path: Path) -> None:
    for runs in (three_runs(tmp_path), three_runs(tmp_path / "again")[:1]):
        text = render_page(report(runs, None))
        page = Page(text)
        data, script = page.texts["script"]
        assert page.of("script") == [{"type": "application/json", "id": "data"}, {}]
        assert not {"link", "img", "iframe", "object", "base", "form", "a"} & {tag for tag, _ in page.elements}
        assert not re.search(
            r"\b(src|href|srcset|action)\b\s*=|@import|\burl\((?!#)", text.replace("url(#${clip})", "")
        )
        assert not re.search(
            r"\beval\b|\bFunction\b|innerHTML|outerHTML|document\.write|insertAdjacent|fetch|XMLHttp", script
        )
        policy = next(
            meta["content"] for meta in page.of("meta") if meta.get("http-equiv") == "Content-Security-Policy"
        )
        digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert policy == (
            f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
        )
        assert not [attributes for _, attributes in page.elements if any(name.startswith("on") for name in attributes)]
        assert "<" not in data


def test_names_and_values_from_disk_are_text(tmp_path: Path) -> None:
    runs = hostile_runs(tmp_path)
    assert {"recipe", "restart"} <= set(re.findall("recipe|restart", render_page(report(runs, None))))
    page = page_of(runs)
    tags = {tag for tag, _ in page.elements}
    assert len(page.of("script")) == 2 and not {"img", "b>"} & tags
    assert all("pwned" not in str(attributes) for _, attributes in page.elements)
    names = [run.name for run in report(runs, None).runs]
    assert [run["name"] for run in page.data["runs"]] == names and all("</script>" in name for name in names)
    text = "".join(page.texts["body"])
    assert text.count(names[0]) >= 3 and "{{ 7*7 }}" in text and "49" not in text.split("frames/s")[0]
    assert "\u202e" not in render_page(report(runs, None))


def test_settings_that_differ_are_columns_and_best_values_are_marked(tmp_path: Path) -> None:
    text = render_page(report(three_runs(tmp_path), None))
    header, *rows = table_of(text, ' class="runs"')
    columns = {label: [row[n] for row in rows] for n, label in enumerate(header)}
    assert columns["run"] == ["one", "two", "slow"]
    assert columns["workers"] == ["1", "2", "2"] and columns["seed"] == ["1", "7", "1"]
    assert columns["score_test: WER (%)"] == ["-", "3.50", "10.50"]
    assert columns["frames/s"] == ["9,500", "18,050", "950"]
    shared = dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", text))
    assert (shared["activation"], shared["machine"], shared["epochs"]) == ("sigmoid", "Intel(R) Xeon(R) 8481C", "4")
    assert not set(shared) & set(header)
    best = re.findall(r'class="[^"]*best">(.*?)</td>', text)
    loss = f"{epoch_row(4, 'cv')['loss']:.4f}"
    assert best.count(loss) == 2, "two runs have the lowest cross-validation loss, as shown"
    assert "3.50" in best and "10.50" not in best and "18,050" in best and "9,500" not in best
    assert not [value for value in best if value in columns["workers"]]
    assert 'data-number="18050.0"' in text and "<td class=" in text


def test_cross_validation_on_other_utterances_or_by_another_criterion_has_no_best(tmp_path: Path) -> None:
    one = write_run(tmp_path / "one", rows_of(1))
    other = write_run(tmp_path / "other", rows_of(1, 6, start={"cv_digest": "dddd4444"}))
    sequence = "criterion: {name: smbr, lattices: /gone, silence_phones: /gone}\nschedule: {name: passes}\ninit: {model: /gone}\n"
    smbr = write_run(tmp_path / "smbr", rows_of(1, 6), more=sequence)
    for second in (other, smbr):
        text = render_page(report([one, second], None))
        assert "the CV sets or the criteria differ: losses do not compare" in text
        assert not re.findall(r'best">\d\.\d{4}</td>', text)
    assert "lowest CV loss" in render_page(report([one, write_run(tmp_path / "same", rows_of(1, 6))], None))


def test_cards(tmp_path: Path) -> None:
    runs = three_runs(tmp_path)

    def cards(paths: list[Path]) -> dict[str, tuple[str, str]]:
        text = render_page(report(paths, None))
        found = re.findall(r"<li>(.*?)<b>(.*?)</b><small>(.*?)</small></li>", text, re.DOTALL)
        return {title: (value, remark) for title, value, remark in found}

    loss = f"{epoch_row(4, 'cv')['loss']:.4f}"
    assert cards(runs) == {
        "lowest CV loss": (loss, "epoch 4 of one"),
        "best WER": ("3.50 %", "score_test\ntwo\n95 % interval 2.25 .. 4.75"),
        "fastest": ("18,050 frames/s", "two, 2 workers"),
        "warnings": ("none", ""),
    }
    assert cards(runs[1:2]) == {
        "CV loss": (loss, "epoch 4"),
        "WER": ("3.50 %", "score_test\n95 % interval 2.25 .. 4.75"),
        "speed": ("18,050 frames/s", "2 workers"),
        "warnings": ("none", ""),
    }
    busy = write_run(tmp_path / "busy", rows_of(1, compute_cpu_seconds=1.0))
    end = {"type": "end", "reason": "diverged", "detail": "it was not finite", "epoch": 1, "kept_epoch": 1}
    bad = write_run(tmp_path / "bad", [*rows_of(1, 1), end])
    assert cards([runs[0], busy, bad])["warnings"] == ("2", "of 2 of the runs: see the remarks below")
    text = render_page(report([runs[0], busy, bad], None))
    assert "<li>busy: warning: only 35 % of its compute time was CPU time: the cores were overloaded</li>" in text
    assert "<li>bad: warning: diverged: it was not finite</li>" in text


def test_curves_are_those_of_the_plots(tmp_path: Path) -> None:
    """Values in full; what is not finite is null, and nothing is left out."""
    paths = three_runs(tmp_path)
    rows = rows_of(1, 3)
    rows[-1] |= {"loss": None}
    paths.append(write_run(tmp_path / "nan", rows))
    page, runs = page_of(paths), read_runs(paths)
    panels = {panel["label"]: panel for panel in page.data["panels"]}
    assert list(panels) == ["loss per frame (nats)", "frame accuracy", "applied learning rate (log scale)"]
    loss = panels["loss per frame (nats)"]
    for run, curves in zip(runs, loss["curves"], strict=True):
        for split, own in (("cv", run.metrics.cv), ("train", run.metrics.train)):
            points = learning_points(run, own, "loss").tolist()
            assert len(points) == len(own)
            assert [[None if x != x else x for x in point] for point in points] == curves[split]
    assert loss["curves"][2]["cv"][-1][2:] == [3.0, 0.0], "rejected"
    assert loss["curves"][3]["cv"][-1][2] is None
    assert loss["limit"] == pytest.approx(2 * epoch_row(2, "cv")["loss"]), "twice a typical run's median"
    assert [panel["log"] for panel in panels.values()] == [False, False, True]
    assert panels["frame accuracy"]["percent"] and not loss["percent"]
    assert len({(run["color"], run["line"]) for run in page.data["runs"]}) == 4


def test_the_time_of_workers_and_restarts(tmp_path: Path) -> None:
    runs = three_runs(tmp_path)
    text = render_page(report(runs, None))
    assert "<li>slow: restart 1 after epoch 2: SIGKILL</li>" in text
    titles = re.findall(r'width: ([\d.]+)%; [^>]*title="(\w+) ([\d.]+) %"', text)
    assert [(share, shown) for _, share, shown in titles[5:10]] == [
        ("compute", "92.0"), ("data", "1.0"), ("comm", "4.0"), ("wait", "1.0"), ("other", "2.0"),
    ]  # fmt: skip
    assert all(float(width) == pytest.approx(float(shown), abs=0.06) for width, _, shown in titles)
    assert re.findall(r"<span>(worker \d)</span>", render_page(report(runs[1:2], None))) == ["worker 0", "worker 1"]


def test_recipes_and_their_differences(tmp_path: Path) -> None:
    runs = three_runs(tmp_path)
    text = render_page(report(runs, None))
    table = {row[0]: row[1:] for row in table_of(text.partition("Keys that differ")[2])}
    assert table["seed"] == ["1", "7", "1"] and "model.activation" not in table
    assert text.count("hidden_units: 512") == 3, "each recipe as a whole"
    assert "Keys that differ" not in render_page(report(runs[:1], None))


@pytest.mark.parametrize("value", [0.0, 5e-324, 1e18])
def test_extreme_and_missing_figures(tmp_path: Path, value: float) -> None:
    rows = [epoch_row(1, "train", frames_per_second=value), epoch_row(1, "cv", loss=-value, frame_accuracy=value)]
    extreme = write_run(tmp_path / "extreme", [*rows, worker_row(1, 0, consensus_distance=value, seconds=value)])
    begun, no_recipe = (write_run(tmp_path / name, []) for name in ("begun", "no recipe"))
    (no_recipe / "recipe.yaml").unlink()
    for runs in ([extreme], [begun], [extreme, begun, no_recipe]):
        assert len(page_of(runs).data["runs"]) == len(runs)


def test_on_the_command_line(tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = three_runs(tmp_path / "runs")
    done = run_cli("report", *runs, "--html", "new/page.html", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["pages"] == ["new/page.html"] and json.loads(done.stdout)["plots"] == []
    assert Path("new/page.html").read_text() == render_page(report(runs, None)) and not Path("report").exists()
    done = run_cli("report", *runs, "--html", "page.html", "--out", "plots")
    assert "page: page.html" in done.stdout and Path("plots/learning.png").exists()
    refused = run_cli("report", *runs, "--html", runs[0])
    assert refused.exit_code == 2 and str(runs[0]) in refused.stderr


def test_neither_matplotlib_nor_torch_is_needed(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; sys.modules['matplotlib'] = sys.modules['matplotlib.figure'] = None\n"
        "from ddnn.report import write_run_page; write_run_page(Path(sys.argv[1])); print('torch' in sys.modules)"
    )
    run = write_run(tmp_path / "run", rows_of(1))
    done = subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n" and (run / "report.html").read_text() == render_page(report([run], None))


def test_a_training_leaves_its_page(tmp_path: Path, run_cli: RunCli, caplog: pytest.LogCaptureFixture) -> None:
    job = make_job(tmp_path)
    assert run_cli("train", job.recipe, "--run-dir", job.run, "--device", "cpu").exit_code == 0
    page = Page((job.run / "report.html").read_text())
    assert page.texts["h1"] == [job.run.name] and len(page.data["panels"][0]["curves"][0]["cv"]) >= 2
    assert not [record for record in caplog.records if "report" in record.getMessage()]


@pytest.mark.parametrize("reason", ["diverged", "failed"])
def test_a_training_that_did_not_finish_leaves_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    """With the reason in a card, though there is no model; where that cannot be written, the error is the same."""
    monkeypatch.setattr(EagerStep, "__call__", lambda *_: pytest.fail("no step")) if reason == "failed" else None
    job, pages = make_job(tmp_path), list[bool]()
    recipe = load_recipe(job.recipe, ["schedule.initial_learning_rate=1000"] if reason == "diverged" else [])

    def write(run_dir: Path) -> None:
        write_run_page(run_dir)
        pages.append(not (run_dir / "final.safetensors").exists())
        raise ZeroDivisionError("some bug")

    with pytest.raises(DivergedError if reason == "diverged" else pytest.fail.Exception):
        run_training(recipe, job.run, "cpu", on_end=write)
    assert pages == [True]
    page, end = Page((job.run / "report.html").read_text()), read_metrics(job.run / "metrics.jsonl").end
    assert end is not None and end.reason == reason and end.detail
    assert page.texts["li"][0] == f"ended{reason}{end.detail}"
    assert "its report is not: some bug" in (job.run / "train.log").read_text()


def test_a_training_that_was_stopped_leaves_no_page(tmp_path: Path) -> None:
    """It is resumed; what stops it may not wait."""
    job = make_job(tmp_path)

    def stop(row: MetricsRow) -> None:
        if row.type == "worker":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_training(load_recipe(job.recipe), job.run, "cpu", on_row=stop, on_end=write_run_page)
    assert not (job.run / "report.html").exists()


def test_the_figures_of_a_sequence_training_have_names_of_their_own(tmp_path: Path) -> None:
    """What sMBR and MPFE minimize is a share of frames, not a loss in nats; in percent, as its expected accuracy."""
    rows = [epoch_row(n, split) for n in (1, 2) for split in ("train", "cv")]
    for row in rows:
        error = 0.02 - 0.005 * row["epoch"]
        del row["loss"], row["frame_accuracy"]
        row |= {"expected_error": error, "expected_accuracy": 1.0 - error}
    found = report([write_run(tmp_path / "run", rows)], None)
    page = Page(render_page(found))
    assert page.texts["li"][0] == "CV expected error1.00 %epoch 2"
    panels = {panel["label"]: panel["percent"] for panel in page.data["panels"]}
    assert list(panels.items())[:2] == [("expected error", True), ("expected accuracy", True)]
    assert "nats" not in json.dumps(page.data)
    assert re.search(r"CV expected error +1.00 %\ntraining expected accuracy +99.00 %", found.as_text())


def test_a_training_succeeds_without_its_page(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job, seen = make_job(tmp_path), list[bool]()

    def fail(run_dir: Path) -> None:
        seen.append((run_dir / "final.safetensors").exists())
        raise ZeroDivisionError("some bug")

    run_training(load_recipe(job.recipe), job.run, "cpu", on_end=fail)
    assert seen == [True], "called once, when the model is there"
    assert "the model is written, its report is not: some bug" in (job.run / "train.log").read_text()
    assert json.loads((job.run / "status.json").read_text())["state"] == "finished"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser") / "profile") as found:
        yield found


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.html"
    write_page(report(three_runs(tmp_path / "runs"), None), path)
    return path


def names_of_rows(tab: Browser) -> list[str]:
    names: list[str] = tab.evaluate(
        "[...document.querySelectorAll('table.runs tbody th')].map((cell) => cell.textContent)"
    )
    return names


def curves_of(tab: Browser) -> list[list[str]]:
    """Names of the runs that each panel draws."""
    runs = "[...svg.querySelectorAll('.run')].map((curve) => curve.dataset.run)"
    drawn: list[list[str]] = tab.evaluate(f"[...document.querySelectorAll('.box > svg')].map((svg) => {runs})")
    return drawn


@in_a_browser
@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1600])
def test_a_browser_renders_sorts_and_hides(tab: Browser, page: Path, width: int, dark: bool) -> None:
    tab.open(page, width, dark=dark)
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing is wider than the screen"
    assert curves_of(tab) == [["one", "two", "slow"]] * 3
    widths = tab.evaluate(
        "[...document.querySelectorAll('.box > svg')].map((svg) => svg.getBoundingClientRect().right)"
    )
    assert all(0 < right <= width for right in widths)
    assert tab.evaluate("document.querySelectorAll('.run circle.rejected').length") == 2, "in two panels"
    back = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert back == ("rgb(13, 17, 23)" if dark else "rgb(255, 255, 255)")

    columns = tab.evaluate("[...document.querySelectorAll('table.runs th[scope=col]')].map((cell) => cell.textContent)")
    speed, wer = (
        f"table.runs th:nth-child({columns.index(name) + 1}) button" for name in ("frames/s", "score_test: WER (%)")
    )
    tab.evaluate(f"document.querySelector({speed!r}).scrollIntoView({{inline: 'center'}})")
    tab.click(speed)
    assert names_of_rows(tab) == ["slow", "one", "two"], "950 before 9,500 before 18,050"
    tab.click(speed)
    assert names_of_rows(tab) == ["two", "one", "slow"]
    tab.evaluate(f"document.querySelector({wer!r}).focus()")
    tab.press("Enter", 13)
    assert names_of_rows(tab) == ["two", "slow", "one"], "unknown is last"
    tab.press(" ", 32)
    assert names_of_rows(tab) == ["slow", "two", "one"]
    assert tab.evaluate("[...document.querySelectorAll('[aria-sort]')].map((cell) => cell.ariaSort)") == ["descending"]

    tab.click(".legend label:nth-child(2) input")
    assert curves_of(tab) == [["one", "slow"]] * 3
    tab.click(".legend label:nth-child(2) input")
    assert curves_of(tab) == [["one", "two", "slow"]] * 3
    assert tab.problems == [] and tab.requests == [page.as_uri()]


@in_a_browser
def test_a_browser_shows_values_under_the_pointer_and_draws_against_time(tab: Browser, page: Path) -> None:
    tab.open(page, 1000)
    last = ".box > svg .run[data-run=slow] circle:last-of-type"
    tab.move(*tab.middle(last))
    tip = "[...document.querySelectorAll('.tip')].filter((tip) => tip.style.visibility === 'visible').map((tip) => tip.textContent)"
    assert tab.evaluate(tip) == ["slow\nepoch 4, 241.4 s\nCV, rejected 3"]
    tab.move(0, 0)
    assert tab.evaluate(tip) == []
    place = f"document.querySelector({last!r}).cx.baseVal.value"
    before = tab.evaluate(place)
    fast = "document.querySelector('.run[data-run=two] circle:last-of-type').cx.baseVal.value"
    assert tab.evaluate(fast) == before, "at the same epoch"
    choose = "const axis = document.querySelector('select'); axis.value = 1; axis.dispatchEvent(new Event('change'))"
    tab.evaluate(f"(() => {{ {choose} }})()")
    assert tab.evaluate(fast) < tab.evaluate(place), "in less time"
    assert tab.problems == []


@in_a_browser
def test_steps_of_the_learning_rate_are_epochs(tab: Browser, tmp_path: Path) -> None:
    rows = rows_of(1, 2)
    for row in rows:
        if row["type"] == "epoch" and row["epoch"] == 2:
            row["learning_rate"] = 0.004
    page = tmp_path / "page.html"
    write_page(report([write_run(tmp_path / "run", rows)], None), page)
    tab.open(page, 1000)
    path = tab.evaluate("document.querySelectorAll('.box > svg')[2].querySelector('.run path').getAttribute('d')")
    found = re.fullmatch(r"M([\d.]+),([\d.]+)H([\d.]+)V([\d.]+)H([\d.]+)", path)
    assert found is not None, path
    start, high, middle, low, end = map(float, found.groups())
    assert middle == pytest.approx((start + end) / 2) and low > high, "the first rate to the first epoch's end"
    assert tab.evaluate("document.querySelectorAll('.legend input').length") == 0, "one run is always shown"


@in_a_browser
def test_a_browser_runs_nothing_that_a_run_dir_says(tab: Browser, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_page(report(hostile_runs(tmp_path / "runs"), None), page)
    tab.open(page, 1000)
    names = [run.name for run in report(hostile_runs(tmp_path / "again"), None).runs]
    assert len(curves_of(tab)[0]) == 2 and curves_of(tab)[0][0].startswith("<img") is False
    assert names_of_rows(tab) == names
    tab.click("table.runs th button")
    tab.move(*tab.middle(".run circle:last-of-type"))
    assert tab.evaluate("[typeof window.pwned, document.images.length]") == ["undefined", 0]
    assert tab.problems == [] and tab.requests == [page.as_uri()]


@in_a_browser
def test_the_policy_stops_what_would_pass_the_escaping(tab: Browser, page: Path) -> None:
    harmful = "<script>window.pwned = 1</script><img src='https://example.org/x' onerror='window.pwned = 2'>"
    page.write_text(page.read_text().replace("<footer>", f"{harmful}<footer>"))
    tab.open(page, 1000)
    assert tab.evaluate("typeof window.pwned") == "undefined"
    assert len(curves_of(tab)) == 3, "its own script runs"
    assert sum("Content Security Policy" in problem for problem in tab.problems) >= 2
    assert tab.requests == [page.as_uri()]


@in_a_browser
def test_without_javascript_the_table_can_be_read(tab: Browser, page: Path) -> None:
    tab.open(page, 400, javascript=False)
    assert names_of_rows(tab) == ["one", "two", "slow"]
    shown = tab.evaluate("document.body.innerText")
    assert "18,050" in shown and "They are drawn by JavaScript" in shown
    tab.open(page, 400)
    assert "They are drawn by JavaScript" not in tab.evaluate("document.body.innerText")


def test_the_page_of_a_run_dir_is_written_anew(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", rows_of(1))
    write_run_page(run)
    (run / "score_test.json").write_text('{"wer": 3.25}')
    assert "3.25" not in (run / "report.html").read_text()
    write_run_page(run)
    assert "3.25" in (run / "report.html").read_text()
