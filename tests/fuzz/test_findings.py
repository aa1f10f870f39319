"""What fuzzing has found, each once: files of a few bytes to some megabytes that readers took ill."""

from __future__ import annotations

import gzip
import os
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from corpora import write_data_dir, write_graph_dir, write_model
from kaldi_files import read_matrix

from ddnn.kaldi import basic_types
from ddnn.kaldi.alignments import read_alignments, read_pdf_counts
from ddnn.kaldi.archive import iterate_int_vectors, iterate_matrices, read_scp, write_matrices
from ddnn.kaldi.data_dir import read_cmvn_stats
from ddnn.kaldi.fst import ARC, Fst, write_fst
from ddnn.kaldi.nnet1_file import read_nnet1
from ddnn.recipe.load import load_recipe
from ddnn.runs.metrics import MetricsWriter, read_metrics
from ddnn.slurm.cluster import load_cluster
from ddnn.util.errors import DataError, RecipeError, UserError

SIGNALLING = struct.pack("<Q", 0x7FF4000000000001), struct.pack("<I", 0x7FA00001)


def read_all(path: Path) -> None:
    for _ in iterate_matrices(path):
        pass


def read_integers(path: Path) -> None:
    for _ in iterate_int_vectors(path):
        pass


def refused(read: Callable[[Path], object], path: Path, data: bytes, said: str, seconds: float = 5.0) -> None:
    """A refusal that says so, long before what once took minutes."""
    path.write_bytes(data)
    started = time.process_time()
    with pytest.raises(UserError, match=said):
        read(path)
    assert time.process_time() - started < seconds


def peak(read: Callable[[Path], object], path: Path) -> int:
    tracemalloc.start()
    try:
        read(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_numbers_of_thousands_of_digits_and_a_letter(tmp_path: Path) -> None:
    """Patterns backtracked, in the square of the digits: 10,000 took 4 s, 30,000 took 35 s."""
    digits = b"1" * 60_000 + b"x"
    refused(
        read_nnet1, tmp_path / "x.nnet", b"<Nnet> <AddShift> 1 1 [ " + digits + b" ] </Nnet> ", "expected a number: "
    )
    refused(lambda path: load_recipe(path), tmp_path / "x.yaml", b"seed: " + digits, "seed: the text")
    refused(read_pdf_counts, tmp_path / "counts", b"[ " + digits + b" ]", "pdf counts")


def test_a_wide_compressed_matrix_takes_no_table_of_a_thousand_bytes_a_column(tmp_path: Path) -> None:
    columns = 50_000
    header = np.array([0.0, 1.0], "<f4").tobytes() + np.array([1, columns], "<i4").tobytes()
    path = tmp_path / "x.ark"
    path.write_bytes(b"a \0BCM " + header + bytes(range(90)) * (columns // 10))
    assert peak(read_all, path) < 16 << 20
    ((_, matrix),) = iterate_matrices(path)
    narrow = np.frombuffer(path.read_bytes()[-9 * columns :], np.uint8)
    record = (
        np.array([0.0, 1.0], "<f4").tobytes()
        + np.array([1, 10], "<i4").tobytes()
        + narrow[:80].tobytes()
        + narrow[-columns:][:10].tobytes()
    )
    (tmp_path / "narrow").write_bytes(b"a \0BCM " + record)
    ((_, expected),) = iterate_matrices(tmp_path / "narrow")
    assert matrix.shape == (1, columns) and matrix[0, :10].tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("start", "fill"),
    [
        *((start, fill) for start in (b"", b"utt ") for fill in (b" ", b"\n")),
        *((start, fill) for start in (b"utt [", b"utt [\n1\n") for fill in (b" ", b"\n", b";")),
    ],
)
def test_endless_blanks(tmp_path: Path, start: bytes, fill: bytes) -> None:
    """Each was taken byte by byte, or row by row, to the end of whatever a small gzip comes to."""
    data = gzip.compress(start + fill * (4 << 20), 1)
    if (start == b"utt [" and fill == b" ") or (start == b"utt [\n1\n" and fill == b" "):
        refused(read_all, tmp_path / "x.gz", data, "no '\\]' ends the matrix")
    else:
        refused(read_all, tmp_path / "x.gz", data, "white space|rows without numbers")


def test_a_gzip_bomb_ends_at_what_a_table_could_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddnn.kaldi.basic_types._LARGE", 1 << 16)
    zeros = b"utt \0B\4" + struct.pack("<i", 1_000_000) + b"\4\0\0\0\0" * 1_000_000
    refused(read_integers, tmp_path / "x.gz", gzip.compress(zeros, 9), "a vector of 1000000 integers takes")
    lines = b"utt 1 1 1 1 1 1 1 1 1 1 1 1 1 1\n" * 100_000
    path = tmp_path / "many.gz"
    refused(read_integers, path, gzip.compress(lines, 9), "decompresses to more than")
    assert 250 * path.stat().st_size < len(lines)


def test_a_long_line_of_numbers_is_not_held_twenty_times(tmp_path: Path) -> None:
    path = tmp_path / "x.ark"
    path.write_bytes(b"utt [ " + b"1 " * 400_000 + b"]\n")
    assert peak(read_all, path) < 16 << 20
    path.write_bytes(b"utt " + b"1 " * 400_000 + b"\n")
    assert peak(read_integers, path) < 16 << 20


def test_words_are_cut_at_white_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(basic_types, "_PIECE", 5)
    for line in (b"", b" ", b"123456789", b"12345 6", b"1 2 3 4 5 6\t78 9\n", b"     1     ", b"1234567 8"):
        assert [word for words in basic_types.split_words(line) for word in words] == line.split()


def test_integers_of_any_length(tmp_path: Path) -> None:
    refused(read_integers, tmp_path / "x", b"utt " + b"1" * 300_000 + b"\n", "expected (32-bit )?integers")
    refused(read_integers, tmp_path / "x", b"utt " + b"1" * 24 + b"\n", "expected (32-bit )?integers")


@pytest.mark.parametrize("read", [np.float32, np.float64])
def test_signalling_nan(tmp_path: Path, read: type) -> None:
    """A cast of such a number warns; as any NaN, it is for the caller to look for."""
    for token, value in zip((b"DM ", b"FM "), SIGNALLING, strict=True):
        (tmp_path / "x.ark").write_bytes(b"a \0B" + token + b"\4\1\0\0\0\4\1\0\0\0" + value)
        (tmp_path / "x.scp").write_text("a x.ark:2\n")
        (entry,) = read_scp(tmp_path / "x.scp")
        with np.errstate(all="raise"):
            assert np.isnan(read_matrix(entry, read)).all()
    (tmp_path / "counts").write_bytes(b"\0BFV \4\1\0\0\0" + SIGNALLING[1])
    with np.errstate(all="raise"), pytest.raises(DataError, match="a count of frames, found nan"):
        read_pdf_counts(tmp_path / "counts")


def test_rates_and_counts_that_overflow(tmp_path: Path) -> None:
    text = b"<Nnet> <AffineTransform> 1 1 <LearnRateCoef> 1e39 [ 1 ] [ 1 ] </Nnet> "
    with np.errstate(all="raise"):
        refused(read_nnet1, tmp_path / "x.nnet", text, "learn_rate_coef is inf, expected a finite value")
        refused(read_pdf_counts, tmp_path / "counts", b"[ 1e308 1e308 ]", "counts of at most")


@pytest.mark.parametrize("value", [1e20, 1e37, 1e300, -1e19])
def test_cmvn_statistics_that_overflow(tmp_path: Path, value: float) -> None:
    write_data_dir(tmp_path, {"a-1": np.zeros((3, 1), np.float32)})
    stats = np.array([[value, 1.0], [0.0, 0.0]])
    write_matrices(tmp_path / "cmvn.ark", tmp_path / "cmvn.scp", [("a", stats)])
    with (
        np.errstate(all="raise"),
        pytest.raises(DataError, match="speaker a: expected CMVN statistics of features within"),
    ):
        read_cmvn_stats({entry.key: entry for entry in read_scp(tmp_path / "cmvn.scp")}, {"a-1": "a"})


def test_epsilons_of_negative_cost_in_a_long_chain(tmp_path: Path) -> None:
    """Each of up to 10,000 rounds looked at every arc and reached one state more: 1.4 s for 20,000 arcs."""
    from ddnn.decoding.graph import read_graph

    write_graph_dir(tmp_path)
    write_model(tmp_path / "final.mdl")
    for states, said in ((2000, None), (30_000, "a chain of them too long to tell")):
        arcs = np.array([(0, 0, -1.0, state - 1) for state in range(1, states)], ARC)
        offsets = np.concatenate([[0, 0], np.arange(1, states)])
        write_fst(tmp_path / "HCLG.fst", Fst(0, np.zeros(states, np.float32), offsets, arcs))
        if said is None:
            read_graph(tmp_path, tmp_path / "final.mdl")
        else:
            started = time.process_time()
            with pytest.raises(DataError, match=said):
                read_graph(tmp_path, tmp_path / "final.mdl")
            assert time.process_time() - started < 5.0


@pytest.mark.parametrize("name", ["num_jobs", "num_pdfs"])
def test_a_small_file_that_is_large(tmp_path: Path, name: str) -> None:
    from ddnn.decoding.graph import read_graph

    write_graph_dir(tmp_path)
    write_model(tmp_path / "final.mdl")
    (tmp_path / "ali.1.gz").write_bytes(gzip.compress(b"utt 1\n"))
    with (tmp_path / name).open("wb") as handle:
        os.truncate(handle.fileno(), 1 << 40)
    with pytest.raises(DataError, match="expected at most 100"):
        read_alignments(tmp_path) if name == "num_jobs" else read_graph(tmp_path, tmp_path / "final.mdl")


def test_recipes_of_thousands_of_keys(tmp_path: Path) -> None:
    """Each unknown key was compared with all known ones: 5,000 took 2.4 s, and the message had as many lines."""
    path = tmp_path / "x.yaml"
    refused(load_recipe, path, b"".join(b"key%d: 1\n" % n for n in range(8000)), "more than 4000 keys and values")
    path.write_bytes(b"".join(b"a%d: {b: 1}\n" % n for n in range(700)))
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert len(str(caught.value).splitlines()) < 60 and "and 65" in str(caught.value)


def test_a_cluster_whose_environment_is_a_word_and_a_mapping(tmp_path: Path) -> None:
    refused(
        lambda path: load_cluster(str(path)),
        tmp_path / "x.yaml",
        b"environment: x\nenvironment: {A: b}\n",
        "given twice",
    )


def test_metrics_take_no_more_memory_than_they_have_bytes(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"type": "epoch", "epoch": 0, "split": "cv", "loss": 1.0, "frame_accuracy": 0.5}\n'
    )
    assert peak(read_metrics, tmp_path / "metrics.jsonl") < 4 << 20  # it was 64 MiB


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(n + 1)}: &{chr(n + 1)} [{', '.join([f'*{chr(n)}'] * 9)}]\n" for n in range(97, 107)
)


@pytest.mark.parametrize(
    "text",
    [
        LAUGHS,
        "a: &a {b: *a}",
        "? " * 5000,
        "a: 2026-99-99",
        "a: !!python/object/apply:os.system [id]",
        "a: " + "1:" * 9000 + "1",
        "x" * 200_000,
    ],
)
def test_the_recipe_in_a_strangers_checkpoint(tmp_path: Path, text: str) -> None:
    """It was read by YAML alone: aliases made twenty lines a million values, and dates and depths other exceptions."""
    from ddnn.training.resume_rules import check_same_recipe

    write_data_dir(tmp_path / "data", {"a-1": np.zeros((3, 1), np.float32)})
    (tmp_path / "recipe.yaml").write_text("data: {train: data, alignments: data}\n")
    recipe = load_recipe(tmp_path / "recipe.yaml")
    started = time.process_time()
    with pytest.raises(UserError):
        check_same_recipe(text, recipe, tmp_path)
    assert time.process_time() - started < 5.0


def test_metrics_of_a_begun_pretraining(tmp_path: Path) -> None:
    """The number of an RBM had as many digits as Python refuses to read: such a line stays, and ends nothing."""
    rows = [b'{"rbm": 1, "epoch": 1}\n', b'{"rbm": ' + b"1" * 5000 + b', "epoch": 1}\n', b'{"rbm": 2, "epoch": 1}\n']
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(rows))
    MetricsWriter(tmp_path / "metrics.jsonl").truncate(lambda row: row["rbm"] <= 1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == rows[0] + rows[1]


def test_binary_counts_are_copied_as_they_are(tmp_path: Path) -> None:
    """`decode-prep` read them as text in UTF-8, which a binary vector is not."""
    from ddnn.util.files import has_content

    (tmp_path / "counts").write_bytes(b"\0BFV \xff")
    assert has_content(tmp_path / "counts", b"\0BFV \xff") and not has_content(tmp_path / "counts", b"\0BFV")
    assert not has_content(tmp_path, b"") and not has_content(tmp_path / "none", b"")
