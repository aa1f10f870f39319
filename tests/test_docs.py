"""What the pages say of keys, options, files and each other is so."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest
from benchmark_plot import FIGURES, svg

from ddnn.cli.main import cli
from ddnn.recipe.keys import keys, sections
from ddnn.training import metrics

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("recipes/**/*.md")])


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


def test_every_key_of_metrics_is_explained() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    parts = dict(
        zip(
            re.findall(r"^## (.*)$", text, re.MULTILINE),
            re.split(r"^## .*$", text, flags=re.MULTILINE)[1:],
            strict=True,
        )
    )
    assert {name for name in parts if re.fullmatch("[a-z]+", name)} == set(metrics.ROWS)
    for name, kind in metrics.ROWS.items():
        if name == "warmup":  # those of an epoch
            continue
        rows = re.findall(r"^\| (`.*?) \|", parts[name], re.MULTILINE)
        assert set(chain(*(re.findall(r"`(\w+)`", row) for row in rows))) == set(kind.model_fields) - {"type"}, name


@pytest.mark.parametrize("name", ["kaldi", "troubleshooting", "glossary"])
def test_keys_and_options_exist(name: str) -> None:
    text = (ROOT / f"docs/{name}.md").read_text()
    known, tops = {*keys(), *sections()}, {key.partition(".")[0] for key in keys() if "." in key}
    for key in re.findall(r"(?<![\w/.])([a-z_]+(?:\.[a-z_0-9]+)+)(?![\w/.])", text):
        assert key.endswith(".md") or key.partition(".")[0] not in tops or key in known, (
            f"docs/{name}.md: {key} is no key"
        )
    for command, words in re.findall(r"`ddnn ([a-z0-9-]+)((?: [^`|]*)?)", text):
        found = cli.commands[command]
        options = {option for one in found.params if isinstance(one, click.Option) for option in one.opts}
        for option in re.findall(r"(?<=\s)--[a-z-]+", words):
            assert option in options, f"docs/{name}.md: ddnn {command} has no {option}"


def test_the_bars_of_the_benchmarks_are_their_figures() -> None:
    drawn = FIGURES.with_suffix(".svg").read_text()
    assert drawn == svg(json.loads(FIGURES.read_text())), "run: python tests/benchmark_plot.py"
    rows = [{"name": "a < b", "of": "ddnn", "frames_per_second": [900, 2000, 1000]}]
    rows.append({"name": "c", "of": "limit", "frames_per_second": [500]})
    small = svg({"title": "t", "machine": "m", "rows": rows})
    texts = [text.text for text in ElementTree.fromstring(small).iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["t", "m", "a < b", "1,000", "c", "500"]
    assert '<rect x="250" y="49" width="190.0"' in small and "M421.0 58H630.0" in small  # in 380 pixels for 2000
