"""A corpus of six minutes from espeak-ng, where it is installed."""

from __future__ import annotations

import ctypes.util
import filecmp
import signal
import subprocess
import sys
import time
from pathlib import Path
from shutil import which

import pytest

from ddnn.api import train
from ddnn.kaldi.alignments import read_transition_ids
from ddnn.kaldi.archive import iterate_matrices
from ddnn.kaldi.data_dir import read_data_dir

ROOT = Path(__file__).parents[2]
needs_espeak = pytest.mark.skipif(
    not (ctypes.util.find_library("espeak-ng") and which("bible")), reason="needs Debian's libespeak-ng1 and bible-kjv"
)


# A command that ends when all is written but what was made on the way not removed.
STOPPED_LATE = """
import os, runpy, sys
from pathlib import Path
sys.argv = sys.argv[1:]
sys.path.insert(0, str(Path(sys.argv[0]).parent))
Path.rename = lambda *_: os._exit(9)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def command(out: Path, *more: str) -> list[str]:
    size = ["--hours", "0.1", "--speakers", "4", "--test-hours", "0.01", "--test-speakers", "2", "--pdfs", "300"]
    return [sys.executable, str(ROOT / "recipes/spoken/make.py"), str(out), *size, *more]


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("spoken") / "corpus"
    done = subprocess.run(command(out, "--jobs", "2"), capture_output=True, text=True)
    assert done.returncode == 0 and "training frames" in done.stdout, done.stderr
    return out


@needs_espeak
def test_a_network_trains_on_it(corpus: Path, tmp_path: Path) -> None:
    assert not (corpus / "work").exists()
    data, ids = read_data_dir(corpus / "train"), read_transition_ids(corpus / "ali", {"train0001-00001"})
    [archive] = (corpus / "train").glob("feats.1.ark")
    name, matrix = next(iterate_matrices(archive))
    assert (name, len(matrix), matrix.shape[1]) == ("train0001-00001", len(ids[name]), 40) and len(data.entries) > 10
    recipe = {
        "data": {"train": str(corpus / "train"), "alignments": str(corpus / "ali"), "cmvn": "mean-variance",
                 "cv": {"speakers": str(corpus / "cv_speakers.txt")}},
        "model": {"hidden_layers": 1, "hidden_units": 32}, "schedule": {"max_epochs": 2},
    }  # fmt: skip
    train(recipe, run_dir=tmp_path / "run")
    train_text, test_text = (set((corpus / split / "text").read_text().splitlines()) for split in ("train", "test"))
    assert not {line.split(" ", 1)[1] for line in train_text} & {line.split(" ", 1)[1] for line in test_text}


@needs_espeak
def test_more_speech_than_there_is_text_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path / "x", "--vocabulary", "100", "--test-hours", "1"), capture_output=True, text=True
    )
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "hours found in all its clauses, expected 0.50" in done.stderr


@needs_espeak
def test_killed_it_goes_on_to_the_same_bytes(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Prescott")  # of another CPU, whose rounding gives another tree
    out = tmp_path / "again"
    process = subprocess.Popen(command(out, "--jobs", "1"), stderr=subprocess.PIPE)
    while not list((out / "work").glob("train0002.json")) and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    refused = subprocess.run(command(out, "--seed", "2"), capture_output=True, text=True)
    assert refused.returncode == 2 and "was begun with other options" in refused.stderr
    late = [sys.executable, "-c", STOPPED_LATE, *command(out)[1:]]
    assert subprocess.run(late, capture_output=True).returncode == 9
    assert subprocess.run(command(out), capture_output=True).returncode == 0
    assert files(out) == files(corpus)
    assert filecmp.cmpfiles(out, corpus, files(out), shallow=False)[1:] == ([], [])
    refused = subprocess.run(command(out), capture_output=True, text=True)
    assert refused.returncode == 2 and "is not empty" in refused.stderr and "Traceback" not in refused.stderr
