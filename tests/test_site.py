"""The documentation site: it builds without a warning and without a network, and its pictures are those that the code draws."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest
from pictures import IMAGES, PICTURES

from ddnn.cli.main import STAGES

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_those_that_the_code_draws(name: str) -> None:
    assert (IMAGES / name).read_text() == PICTURES[name](), "make docs"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The folder of the pages, and how building them ended. Warnings are errors, but do not stop it."""
    pytest.importorskip("sphinx_click", reason="needs ddnn[docs]")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", str(folder)]
    return folder, subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_site_builds_without_a_warning(site: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = site
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(ROOT).with_suffix(".html") for path in ROOT.glob("docs/**/*.md")}
    assert pages == {path.relative_to(folder) for path in folder.glob("docs/**/*.html")}
    formulas = (folder / "docs/explanation/natural-gradient.html").read_text()
    assert "<math" in formulas and 'src="http' not in formulas  # no script from elsewhere


def test_commands_are_in_the_order_of_the_help(site: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    text = (site[0] / "docs/reference/commands.html").read_text()
    names = [command.name for command in chain(*STAGES.values())]
    assert re.findall(r"<h3>ddnn ([\w-]+)<", text) == names
    assert re.findall(r"<h2>([^<]+)<", text) == list(STAGES)
    assert text.count("<p>Example") == text.count("<pre>") - len(names)  # each has a usage
    assert text.count("<p>Example") == len(names)


def test_keys_and_pages_that_are_mentioned_are_links(site: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    names = ("reference/commands", "how-to/parallel", "reference/recipe/optimizer")
    commands, parallel, key = ((site[0] / f"docs/{name}.html").read_text() for name in names)
    assert re.search(r'href="\.\./how-to/([\w-]+)\.html">docs/how-to/\1\.md</a>', commands)
    assert 'href="../reference/recipe/parallel.html#parallel-averaging-period"><code' in parallel
    assert 'class="reference internal" href="schedule.html"><code' in key  # in the sidebar
    assert 'href="#optimizer-update-period"><code' in key and '<section id="optimizer-update-period">' in key
