"""The documentation site: it builds without a warning and without a network, and its pictures are those that the code draws."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pictures import IMAGES, PICTURES

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_those_that_the_code_draws(name: str) -> None:
    assert (IMAGES / name).read_text() == PICTURES[name](), "make docs"


def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx_click", reason="needs ddnn[docs]")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", ".", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(ROOT).with_suffix(".html") for path in ROOT.glob("docs/**/*.md")}
    assert pages == {path.relative_to(tmp_path) for path in tmp_path.glob("docs/**/*.html")}
    assert "ddnn denlats" in (tmp_path / "docs/reference/commands.html").read_text()
    formulas = (tmp_path / "docs/explanation/natural-gradient.html").read_text()
    assert "<math" in formulas and 'src="http' not in formulas  # no script from elsewhere
