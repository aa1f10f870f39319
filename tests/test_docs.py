"""What the pages say of keys, options, messages, files, figures and each other is so."""

from __future__ import annotations

import ast
import csv
import json
import re
import shlex
import statistics
import subprocess
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml
from benchmark_plot import DRAWN, FIGURES, svg

import ddnn
from ddnn.recipe.keys import keys, sections
from ddnn.recipe.load import load_recipe
from ddnn.recipe.schema import Recipe
from ddnn.runs import rows

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/**/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        found = page.parent / path if path else page
        assert found.exists(), f"{page.name} links to {target}"
        if anchor and found.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", found.read_text(), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, f"{page.name} links to {target}"


def test_mentioned_pages_exist() -> None:
    """Pages that code, texts, recipes and tests name by their path from the root of the project."""
    names = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    for name in names:
        if name.endswith((".py", ".j2", ".yaml", ".md", ".sh", "Makefile", "Dockerfile")):
            for page in re.findall(r"(?<![\w/.-])docs/[\w/-]+\.md", (ROOT / name).read_text()):
                assert (ROOT / page).exists(), f"{name} mentions {page}"


def sentences(text: str) -> Iterator[str]:
    """Those of the prose of a page, as readers see it: without code blocks and the targets of links."""
    text = re.sub(
        r"^(```|~~~).*?^\1", "\n\n", re.sub("^> ?", "", text, flags=re.MULTILINE), flags=re.MULTILINE | re.DOTALL
    )
    for block in re.split(r"\n\s*\n|\n(?=[-*|#]|\d+\.)|\|", text):
        visible = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(block.split()))
        yield from re.split(r"(?<=[.!?:;])\s+(?=[A-Z*`\[(])", visible)


WRITTEN = [page for page in PAGES if page.parent.name != "results"]  # those are generated


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_are_short_and_idiomatic(page: Path) -> None:
    for sentence in sentences(page.read_text()):
        words = re.findall(r"[A-Za-z]\w*|\d[\d.,]*", sentence)
        assert len(words) <= 40, f"{page.name}: {len(words)} words: {sentence}"
        assert not re.search(r"how manyth|\bof before\b|\bWho wants\b", sentence), f"{page.name}: {sentence}"


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/how-to/*.md")), ids=lambda page: page.stem)
def test_how_to_pages_are_short(page: Path) -> None:
    text = re.sub(r"^(```|~~~).*?^\1", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    words = re.findall(r"[^\s|]*\w[^\s|]*", re.sub(r"\]\([^)]*\)", "]", text))
    assert len(words) <= 600, f"{page.name} has {len(words)} words: move explanation to another page"


def concrete(kind: type[rows.MetricsRow]) -> list[type[rows.MetricsRow]]:
    """The classes of rows below `kind` that files have."""
    below = [row for part in kind.__subclasses__() for row in concrete(part)]
    return below or [kind]


def test_every_key_of_metrics_is_explained() -> None:
    text = (ROOT / "docs/reference/metrics.md").read_text()
    parts = dict(
        zip(
            re.findall(r"^## (.*)$", text, re.MULTILINE),
            re.split(r"^## .*$", text, flags=re.MULTILINE)[1:],
            strict=True,
        )
    )
    kinds = {kind.model_fields["type"].default: kind for kind in concrete(rows.MetricsRow)}
    assert {name for name in parts if re.fullmatch("[a-z]+", name)} == set(kinds)
    for name, kind in kinds.items():
        if name == "warmup":  # those of an epoch
            continue
        explained = re.findall(r"^\| (`.*?) \|", parts[name], re.MULTILINE)
        figures = {prefix + figure for prefix in kind.FIGURES.values() for figure in ("loss", "frame_accuracy")}
        expected = set(kind.model_fields) - {"type", *kind.FIGURES} | figures
        assert set(chain(*(re.findall(r"`(\w+)`", row) for row in explained))) == expected, name


@pytest.mark.parametrize(
    "name",
    [
        "reference/kaldi",
        "how-to/decode-with-kaldi",
        "how-to/decode-without-kaldi",
        "how-to/align",
        "reference/troubleshooting",
        "reference/glossary",
    ],
)
def test_keys_exist(name: str) -> None:
    text = (ROOT / f"docs/{name}.md").read_text()
    known, tops = {*keys(), *sections()}, {key.partition(".")[0] for key in keys() if "." in key}
    for key in re.findall(r"(?<![\w/.])([a-z_]+(?:\.[a-z_0-9]+)+)(?![\w/.])", text):
        assert key.endswith((".md", ".sha256")) or key.partition(".")[0] not in tops or key in known, (
            f"docs/{name}.md: {key} is no key"
        )


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|\n").split("|")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_recipes_can_be_read(page: Path, tmp_path: Path) -> None:
    """Those of a page may include each other: the comment in front names the file."""
    for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        name, content = re.match(r"# (\S+\.yaml)\n|", block)[1] or "recipe.yaml", yaml.safe_load(block)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(block)
        if set(content) <= {"include", *Recipe.model_fields}:
            data = [] if {"include", "data"} & set(content) else ["data.train=train", "data.alignments=ali"]
            load_recipe(tmp_path / name, data, must_exist=False)


def test_quoted_messages_are_those_of_the_code() -> None:
    trees = [ast.parse(path.read_text()) for path in (ROOT / "ddnn").rglob("*.py")]
    texts = [node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    code = "\n".join(text for text in texts if isinstance(text, str))
    for row in re.findall(
        r'^\| (?!Kaldi)[^|]*".*', (ROOT / "docs/reference/troubleshooting.md").read_text(), re.MULTILINE
    ):
        for part in chain(*(quoted.split("...") for quoted in re.findall(r'"(.*?)"', cells(row)[0]))):
            assert part.strip() in code, f"no message of ddnn has {part!r}"


def test_figures_of_the_benchmarks_are_those_of_the_data() -> None:
    page, readme = ((ROOT / name).read_text() for name in ("docs/explanation/benchmarks.md", "README.md"))
    rounds = {row["name"]: row["frames_per_second"] for row in json.loads(FIGURES.read_text())["rows"]}
    medians = {name: statistics.median(speeds) for name, speeds in rounds.items()}

    def ratio(name: str, other: str) -> str:
        return f"{statistics.median(a / b for a, b in zip(rounds[name], rounds[other], strict=True)):.2f}"

    for name, speeds in rounds.items():
        figures = f"{medians[name]:,.0f} ({min(speeds):,} to {max(speeds):,})"
        [row] = [cells(line) for line in page.splitlines() if figures in line]
        precision = "bf16" if "bf16" in name else "float32"
        assert row[4] == ratio(name, "Kaldi nnet1 with OpenBLAS"), name
        if "GEMM" not in name:
            assert row[3] == ratio(f"ddnn, {precision}, SGD", name), name
        if "ddnn" in name or "plain" in name:
            assert row[2] == f"{100 * float(ratio(name, f'GEMM limit, {precision}')):.0f} %", name
    names = ["ddnn, float32, SGD", "ddnn, float32, NG-SGD", "ddnn, bf16, SGD", "ddnn, bf16, NG-SGD"]
    projected = [
        cells(line) for line in page.splitlines() if line.endswith((" h |", " days |")) and "AVX512-BF16" in line
    ]
    projected += [
        cells(line) for line in page.splitlines() if line.startswith("| the same, ") and line.endswith(" h |")
    ]
    assert len(projected) == len(names)
    for name, (_, speed, *times) in zip(names, projected, strict=True):
        assert speed == f"{medians[name]:,.0f} frames/s, measured"
        for text, epochs in zip(times, (1, 15), strict=True):
            number, unit = text.split()
            seconds = float(number) * {"min": 60, "h": 3600}[unit]
            assert seconds == pytest.approx(epochs * 108e6 / medians[name], rel=0.04), (name, text)
    ng_sgd = f"takes {ratio(names[0], names[1])} times the time of SGD in float32 and {ratio(names[2], names[3])} times in bf16"
    assert ng_sgd in page
    rounded = [round(medians[name], -2) for name in (names[0], names[2], "Kaldi nnet1 with OpenBLAS")]
    [row] = [line for line in readme.splitlines() if "440-4x512-616" in line and "frames/s" in line]
    assert [int(figure.replace(",", "")) for figure in re.findall(r"\d\d,\d\d\d", row)] == rounded


def recorded(file: str, *steps: Any) -> Any:
    """The figure to which the steps of docs/results/quoted.yaml lead."""
    path = ROOT / file
    if steps == ("count",):
        return sum(recipe.name != "reproduce.yaml" for recipe in path.rglob("*.yaml"))
    if path.is_dir():
        frames = sum(map(len, ddnn.read_alignments(path).values()))
        return frames if steps == ("frames",) else frames / 6000
    if path.suffix == ".md":
        row, column = steps
        table = [cells(line.replace("**", "")) for line in path.read_text().splitlines() if line.startswith("|")]
        head: list[str] = []
        for line in table:
            head = line if column in line else head
            known = dict(zip(head, line, strict=False))
            if all(known.get(name) == str(value) for name, value in row.items()):
                return float(known[column].removesuffix(" %"))
    value = json.loads(path.read_text())
    for i, step in enumerate(steps):
        if step == "ratio":
            first, second = ([row for row in value if row["name"] == name] for name in steps[i + 1 :])
            pairs = zip(first[0]["frames_per_second"], second[0]["frames_per_second"], strict=True)
            return statistics.median(a / b for a, b in pairs)
        if step == "mean":
            keys, *rest = steps[i + 1 :]
            return statistics.mean(recorded(file, *steps[:i], key, *rest) for key in keys)
        value = next(row for row in value if step.items() <= row.items()) if isinstance(step, dict) else value[step]
    return value


QUOTED = yaml.safe_load((ROOT / "docs/results/quoted.yaml").read_text())


@pytest.mark.parametrize("row", QUOTED, ids=lambda row: row["figure"])
def test_figures_on_several_pages_are_those_of_their_record(row: dict[str, Any]) -> None:
    value = row["value"] if "value" in row else recorded(*row["record"])
    for page, quote in row["pages"].items():
        text = " ".join((ROOT / page).read_text().split())
        figure = quote["format"].format(value * quote["sign"] if "sign" in quote else value)
        for phrase in quote["phrases"]:
            assert phrase.replace("{}", figure) in text, f"{page}: {phrase.replace('{}', figure)}"


def test_results_on_an4_are_the_means_of_their_seeds() -> None:
    """And those in the README are the same, rounded."""
    text = (ROOT / "recipes/an4/README.md").read_text().partition("## Results")[2].partition("The WER is")[0]
    rows = [cells(line.replace("**", "")) for line in text.splitlines()[3:] if line.startswith("| ")]
    readme = (ROOT / "README.md").read_text()
    for row in rows:
        if row[2] != "mean":
            continue
        seeds = [other for other in rows if other[:2] == row[:2] and other[2] != "mean"]
        assert len(seeds) == 3
        for mean, *values in zip(row[3:], *(seed[3:] for seed in seeds), strict=True):
            decimals = len(mean.split()[0].partition(".")[2])
            exact = statistics.mean(float(value.split()[0]) for value in values)
            assert abs(float(mean.split()[0]) - exact) < 1.01 * 10**-decimals, (
                row
            )  # the mean is that of unrounded figures
        if row[:2] in (["random", "SGD"], ["RBM", "NG-SGD"]):
            [line] = [
                line for line in readme.splitlines() if line.startswith(f"| AN4, {row[0]} initialization, {row[1]},")
            ]
            accuracy, wer = (float(row[i].split()[0]) for i in (7, 8))
            assert f"{accuracy:.1f} %, {wer:.1f} %" in line


def test_results_on_fsdd_are_those_of_its_file() -> None:
    """recipes/fsdd/README.md, which has two of the columns of results.csv."""
    with (ROOT / "recipes/fsdd/results.csv").open() as file:
        results = {(row["network"], row["by"]): row for row in csv.DictReader(file)}
    text = (ROOT / "recipes/fsdd/README.md").read_text()
    for figure, title in (("cv_loss", "Cross-validation loss,"), ("test_frame_accuracy", "Test frame accuracy,")):
        head, _, *table = (cells(line) for line in text.partition(title)[2].splitlines()[2:9])
        assert len(table) * (len(head) - 1) == len(results)
        for network, *values in table:
            for by, value in zip(head[1:], values, strict=True):
                row = results[network.strip("`"), by]
                assert value.rstrip(" %") == " ± ".join(filter(None, [row[figure], row[f"{figure}_sd"]])), (network, by)


@pytest.mark.parametrize("name", ["docs/tutorials/first-training.md", "README.md"])
def test_first_commands_run_on_a_synthetic_corpus(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: Callable[..., Any]
) -> None:
    """The tree and the recipe are those of docs/tutorials/first-training.md, smaller."""
    pytest.importorskip("kaldi_decoder")
    monkeypatch.chdir(tmp_path)
    first, page = ((ROOT / path).read_text() for path in ("docs/tutorials/first-training.md", name))
    synth, links = re.search(r"^(ddnn synth .*)\n((?:mkdir|ln) (?:.*\n)+?)```", first, re.MULTILINE).groups()
    assert run_cli(*shlex.split(synth)[1:], "--hours", "0.02", "--speakers", "6", "--pdfs", "120").exit_code == 0
    subprocess.run(["bash", "-ec", links], check=True)
    recipe = re.search(r"^# my.yaml\n(.*?)^```", first, re.MULTILINE | re.DOTALL)[1]
    Path("my.yaml").write_text(recipe.replace("512", "32"))
    block = r"## Use it\n.*?^```\n(.*?)^```" if name == "README.md" else r"\A(.*)\Z"
    commands = re.findall(
        r"^(?:\$ )?(ddnn (?!synth|[0-9]).*)", re.search(block, page, re.MULTILINE | re.DOTALL)[1], re.MULTILINE
    )
    assert len(commands) >= 7
    for command in commands:
        done = run_cli(*shlex.split(command, comments=True)[1:])
        assert done.exit_code == 0, f"{command}: {done.stderr}"


def test_the_bars_of_the_benchmarks_are_their_figures() -> None:
    for file in DRAWN:
        drawn = file.with_suffix(".svg").read_text()
        assert drawn == svg(json.loads(file.read_text())), "run: python tests/benchmark_plot.py"
    rows = [{"name": "a < b", "of": "ddnn", "frames_per_second": [900, 2000, 1000]}]
    rows.append({"name": "c", "of": "limit", "frames_per_second": [500]})
    small = svg({"title": "t", "machine": "m", "rows": rows})
    texts = [text.text for text in ElementTree.fromstring(small).iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["t", "m", "a < b", "1,000", "c", "500"]
    assert '<rect x="250" y="49" width="190.0"' in small and "M421.0 58H630.0" in small  # in 380 pixels for 2000
