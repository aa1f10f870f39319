"""recipes/an4: the table that `make an4` prints, and Kaldi's figures in it."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("an4_compare", ROOT / "recipes/an4/compare.py")
assert SPEC is not None and SPEC.loader is not None
compare = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(compare)


def test_the_table_has_kaldis_systems_and_the_best_scale_of_the_run(tmp_path: Path) -> None:
    for graph, wers in (("graph", (3.5, 3.0, 4.0)), ("graph_ug", (12.0, 11.0, 10.5))):
        scales = [
            {"acoustic_scale": scale, "wer": wer, "interval": [wer - 1.25, wer + 1.5]}
            for scale, wer in zip((0.07, 0.1, 0.143), wers, strict=True)
        ]
        (tmp_path / graph).mkdir()
        best = min(scales, key=lambda scale: scale["wer"])["acoustic_scale"]
        (tmp_path / graph / "score.json").write_text(json.dumps({"scales": scales, "best": best}))
    found = [re.split(" {2,}", line) for line in compare.table(tmp_path).splitlines()]
    assert found == [
        ["word error rate on AN4's test set", "trigram", "unigram"],
        ["Kaldi GMM (SAT, fMLLR)", "5.30 %", "11.51 %"],
        ["Kaldi nnet1, random initialization", "3.23 %", "11.51 %"],
        ["Kaldi nnet1, RBM pretraining", "4.14 %", "10.74 %"],
        ["ddnn, random initialization, NG-SGD", "3.00 % (1.8 .. 4.5)", "10.50 % (9.2 .. 12.0)"],
    ]


@pytest.mark.parametrize("initialization", ["random", "RBM"])
def test_kaldis_figures_are_those_of_the_corpus(initialization: str, an4: Path) -> None:
    corpus, page = (an4 / "README.md").read_text(), (ROOT / "recipes/an4/README.md").read_text()
    [row] = re.findall(rf"^\| {initialization} \| (\d+) \| (.*) \|$", corpus, re.MULTILINE)
    epochs, (cv_loss, cv_accuracy, _, *test) = row[0], row[1].split(" | ")
    [wers] = re.findall(rf"^\| Kaldi nnet1, {initialization} \w+ \| (.*) \|$", corpus, re.MULTILINE)
    figures = " | ".join((epochs, cv_loss, cv_accuracy, *test, wers))
    assert f"| {initialization} | Kaldi, SGD | 777 | {figures} |" in page


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_an4_reads_files_of_the_repository_alone() -> None:
    command = ["make", "-n", "-C", str(ROOT), "-o", "setup", "an4"]
    commands = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert ".." not in commands and "shared" not in commands
    paths = set(re.findall(r"recipes/an4/[\w./-]+\w", commands.replace("$graph", "graph_ug")))
    assert len(paths) == 7 and all((ROOT / path).exists() for path in paths)
