"""recipes/images/idx.py: a data dir that ddnn reads back as the images were, and refuses to write over another."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import idx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from idx import ALIGNMENTS, ConvertOptions, convert_idx, read_labels, write_idx

from ddnn.kaldi.alignments import read_alignments
from ddnn.kaldi.archive import MatrixReader
from ddnn.kaldi.data_dir import read_data_dir
from ddnn.util.errors import UserError


def write_pair(folder: Path, count: int, rows: int = 3, columns: int = 2, seed: int = 0) -> tuple[Path, Path]:
    rng = np.random.default_rng(seed)
    images, labels = folder / "images.idx", folder / "labels.gz"
    write_idx(images, rng.integers(0, 256, (count, rows, columns), dtype=np.uint8))
    write_idx(labels, rng.integers(0, 10, count, dtype=np.uint8))
    return images, labels


@settings(max_examples=25, deadline=None)
@given(count=st.integers(1, 60), speakers=st.integers(1, 12), utterance=st.integers(1, 9), seed=st.integers(0, 99))
def test_every_image_is_a_frame_in_its_order(count: int, speakers: int, utterance: int, seed: int) -> None:
    speakers = min(speakers, count)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        images, labels = write_pair(folder, count, seed=seed)
        made = convert_idx(images, labels, folder / "out", ConvertOptions("x", speakers, utterance))
        data, aligned = read_data_dir(folder / "out"), read_alignments(folder / "out" / ALIGNMENTS)
        names = [entry.key for entry in data.entries]
        with MatrixReader() as reader:
            matrices = [reader.read(entry) for entry in data.entries]
        pixels = np.frombuffer(images.read_bytes()[16:], np.uint8).reshape(count, 6)
        assert np.array_equal(np.concatenate(matrices), pixels.astype(np.float32) / np.float32(255))
        assert [len(aligned.pdfs[name]) for name in names] == [len(matrix) for matrix in matrices]
        expected = read_labels(labels, count)
        assert np.array_equal(np.concatenate([aligned.pdfs[name] for name in names]), expected)
        assert data.speakers is not None and len(set(data.speakers.values())) == speakers == made.speakers
        assert names == sorted(names) and max(map(len, matrices)) <= utterance
        per_speaker = [int(line.count(" ")) for line in (folder / "out/spk2utt").read_text().splitlines()]
        assert sum(per_speaker) == len(data.entries) == made.utterances


def test_large_images_make_short_utterances(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idx, "_BLOCK_BYTES", 4 * 6 * 2)
    images, labels = write_pair(tmp_path, 10)
    assert convert_idx(images, labels, tmp_path / "out", ConvertOptions(speakers=2)).utterances == 6


def test_nothing_is_left_of_a_damaged_file(tmp_path: Path) -> None:
    images, labels = write_pair(tmp_path, 10)
    images.write_bytes(images.read_bytes() + b"x")
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match="more bytes follow"):
        convert_idx(images, labels, tmp_path / "out", ConvertOptions(speakers=2))
    assert {path.name for path in tmp_path.iterdir()} == before


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    images, labels = write_pair(tmp_path, 10)
    with pytest.raises(UserError, match=r"one image per speaker \(11\), found 10 images"):
        convert_idx(images, labels, tmp_path / "out", ConvertOptions(speakers=11))
    with pytest.raises(UserError, match=r"name 'a b'.*speakers 0.*per utterance 0"):
        convert_idx(images, labels, tmp_path / "out", ConvertOptions("a b", 0, 0))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/kept").touch()
    with pytest.raises(UserError, match="is not empty"):
        convert_idx(images, labels, tmp_path / "full", ConvertOptions(speakers=2))
    assert [kept.name for kept in (tmp_path / "full").iterdir()] == ["kept"]


def test_the_command(tmp_path: Path, run_cli) -> None:
    images, labels = write_pair(tmp_path, 30)
    out = tmp_path / "a dir é"

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        words = ["--images", images, "--labels", labels, "--out", out, *options]
        return subprocess.run([sys.executable, idx.__file__, *words], capture_output=True, text=True)

    first = run("--speakers", "5")
    assert first.returncode == 0, first.stderr
    assert "30 frames of 6 dims (3 x 2 pixels), 10 pdfs, 5 speakers, 5 utterances" in first.stdout
    known = json.loads(run_cli("info", out, "--json").stdout)
    assert (known["frames"], known["speakers"]) == (30, 5)
    again = run()
    assert again.returncode == 2 and "idx.py: error:" in again.stderr and "not empty" in again.stderr
    assert "Traceback" not in again.stderr
