"""Alignments: Kaldi's own mapping of every utterance, and every way a directory can be wrong."""

from __future__ import annotations

import gzip
import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddnn.kaldi.alignments import (
    Alignments,
    check_same_tree,
    kaldi_counts,
    pdf_counts,
    read_alignments,
    read_pdf_counts,
    transition_digest,
    write_pdf_counts,
)
from ddnn.kaldi.archive import iterate_int_vectors, write_int_vectors
from ddnn.kaldi.transition_model import read_transition_model
from ddnn.util.errors import DataError


def text_table(lines: list[str]) -> dict[str, list[int]]:
    return {line.split()[0]: [int(word) for word in line.split()[1:]] for line in lines}


@pytest.fixture
def folder(golden: Path, tmp_path: Path) -> Path:
    """An alignment dir of a monophone model: 5 utterances in 2 jobs."""
    path = tmp_path / "ali dir ö"
    path.mkdir()
    shutil.copyfile(golden / "tables/mono.mdl", path / "final.mdl")
    items = list(iterate_int_vectors(golden / "tables/mono_tids.txt"))
    write_int_vectors(path / "ali.1.gz", items[:1])
    write_int_vectors(path / "ali.2.gz", items[1:])
    (path / "num_jobs").write_text("2\n")
    return path


def test_all_of_an4(an4: Path, golden: Path) -> None:
    found = read_alignments(an4 / "ali", num_pdfs=616)
    with gzip.open(golden / "tables/an4_all_pdfs.txt.gz", "rt") as lines:
        expected = text_table(list(lines))
    assert len(expected) == 948 and found.num_pdfs == 616
    assert {key: pdfs.tolist() for key, pdfs in found.pdfs.items()} == expected
    assert all(pdfs.dtype == np.int32 for pdfs in found.pdfs.values())
    assert pdf_counts(found).sum() == 253_682


def test_an_archive_of_pdf_ids_says_the_same(an4: Path, golden: Path) -> None:
    of_dir, of_file = read_alignments(an4 / "ali"), read_alignments(golden / "tables/an4_all_pdfs.txt.gz")
    assert of_file.num_pdfs == 616 and list(of_file.pdfs) == list(of_dir.pdfs)
    np.testing.assert_array_equal(pdf_counts(of_file), pdf_counts(of_dir))


def test_a_monophone_model(folder: Path, golden: Path) -> None:
    found = read_alignments(folder)
    expected = text_table((golden / "tables/mono_pdfs.expected.txt").read_text().splitlines())
    assert {key: pdfs.tolist() for key, pdfs in found.pdfs.items()} == expected
    assert found.num_pdfs == read_transition_model(folder / "final.mdl").num_pdfs and found.path == folder


def test_jobs_count_in_numbers_not_in_letters(folder: Path) -> None:
    for number in range(3, 12):
        write_int_vectors(folder / f"ali.{number}.gz", [(f"utt{number}", np.array([1], np.int32))])
    (folder / "num_jobs").write_text("11")
    assert list(read_alignments(folder).pdfs)[-9:] == [f"utt{number}" for number in range(3, 12)]


@pytest.mark.parametrize("say", [True, False])
def test_a_missing_job(folder: Path, say: bool) -> None:
    (folder / "ali.2.gz").rename(folder / "ali.3.gz")
    (folder / "num_jobs").write_text("3")
    if not say:
        (folder / "num_jobs").unlink()
    with pytest.raises(DataError, match=r"ali\.2\.gz is missing: expected 3 jobs, found 2"):
        read_alignments(folder)
    (folder / "ali.3.gz").unlink()
    if say:
        with pytest.raises(DataError, match=r"ali\.2\.gz is missing: expected 3 jobs, found 1"):
            read_alignments(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("1", r"num_jobs says 1, but there is ali\.2\.gz"),
        ("999999999", r"ali\.3\.gz is missing: expected 999999999 jobs, found 2"),
        ("", "expected the number of jobs, found b''"),
        ("two", "expected the number of jobs, found b'two'"),
        ("0", "expected the number of jobs"),
    ],
)
def test_num_jobs(folder: Path, content: str, message: str) -> None:
    (folder / "num_jobs").write_text(content)
    with pytest.raises(DataError, match=message):
        read_alignments(folder)


def test_an_empty_dir_and_no_path(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_alignments(tmp_path / "none")
    (folder / "final.mdl").unlink()
    with pytest.raises(DataError) as error:
        read_alignments(folder)
    assert "final.mdl" in str(error.value.location)
    assert error.value.hint is not None and "copy it from the directory of the system that made" in error.value.hint
    for job in folder.glob("ali.*"):
        job.unlink()
    with pytest.raises(DataError):
        read_alignments(folder)


def test_no_model_in_final_mdl(folder: Path) -> None:
    (folder / "final.mdl").write_bytes(b"<Nnet> not a transition model\n")
    with pytest.raises(DataError) as error:
        read_alignments(folder)
    assert error.value.location == str(folder / "final.mdl")


@pytest.mark.parametrize("value", [0, -1, 10**9])
def test_transition_ids_out_of_range(folder: Path, value: int) -> None:
    largest = len(read_transition_model(folder / "final.mdl").transition_to_pdf) - 1
    bad = np.array([1, largest, value, 1], np.int32)
    write_int_vectors(folder / "ali.1.gz", [("good", bad[:2]), ("bad", bad)])
    with pytest.raises(DataError) as error:
        read_alignments(folder)
    assert error.value.message == f"utterance bad, frame 2: expected a transition-id from 1 to {largest}, found {value}"
    assert error.value.location == str(folder / "ali.1.gz")


@pytest.mark.parametrize("name", ["ali.1.gz", "ali.12.gz", "ali.all.gz"])
def test_a_file_of_an_alignment_dir_holds_transition_ids(folder: Path, name: str) -> None:
    items = list(iterate_int_vectors(folder / "ali.1.gz"))
    write_int_vectors(folder / name, items)
    with pytest.raises(DataError, match=f"{name} of an alignment dir holds transition-ids, not pdf-ids") as error:
        read_alignments(folder / name)
    assert f"name the directory: {folder}; or make pdf-ids of it: ali-to-pdf {folder / 'final.mdl'}" in str(error.value)


def test_an_archive_beside_a_final_mdl(folder: Path) -> None:
    """One of pdf-ids may lie there, with ids that the model has; beside a damaged model it is like any other."""
    last = read_transition_model(folder / "final.mdl").num_pdfs - 1
    write_int_vectors(folder / "pdf.gz", [("one", np.array([0, last], np.int32))])
    assert read_alignments(folder / "pdf.gz").num_pdfs == last + 1
    write_int_vectors(folder / "ali.gz", [("one", np.array([1, last + 1], np.int32))])
    with pytest.raises(DataError, match=f"one, frame 1: expected a pdf-id from 0 to {last}, found {last + 1}") as error:
        read_alignments(folder / "ali.gz")
    assert (
        error.value.hint is not None
        and f"if these are transition-ids, name the directory: {folder}" in error.value.hint
    )
    assert read_alignments(folder / "ali.gz", num_pdfs=last + 2).num_pdfs == last + 2
    (folder / "final.mdl").write_text("damaged")
    assert read_alignments(folder / "ali.gz").num_pdfs == last + 2


def test_another_number_of_pdfs(folder: Path) -> None:
    with pytest.raises(DataError, match="expected a model of 5 pdfs, found"):
        read_alignments(folder, num_pdfs=5)


def test_an_utterance_twice(folder: Path, tmp_path: Path) -> None:
    shutil.copyfile(folder / "ali.2.gz", folder / "ali.3.gz")
    (folder / "num_jobs").write_text("3")
    with pytest.raises(DataError, match="occurs twice in the alignments") as error:
        read_alignments(folder)
    assert error.value.location == str(folder / "ali.3.gz")
    (tmp_path / "twice.txt").write_text("a 1 2\nb 3\na 1 2\n")
    with pytest.raises(DataError, match="utterance a occurs twice"):
        read_alignments(tmp_path / "twice.txt")


def test_a_cut_job(folder: Path) -> None:
    whole = (folder / "ali.2.gz").read_bytes()
    for end in (0, 5, len(whole) // 2, len(whole) - 1):
        (folder / "ali.2.gz").write_bytes(whole[:end])
        with pytest.raises(DataError) as error:
            read_alignments(folder)
        assert error.value.location == str(folder / "ali.2.gz")


def test_pdf_ids_out_of_range(tmp_path: Path) -> None:
    path = tmp_path / "pdfs.txt"
    path.write_text("a 0 4\nb 1 5\n")
    assert read_alignments(path).num_pdfs == 6
    assert read_alignments(path, num_pdfs=9).num_pdfs == 9
    with pytest.raises(DataError, match="utterance b, frame 1: expected a pdf-id from 0 to 4, found 5"):
        read_alignments(path, num_pdfs=5)
    for value in (-3, 2**31 - 1):  # the latter would make counts of 16 GiB
        path.write_text(f"a {value}\n")
        with pytest.raises(DataError, match=f"utterance a, frame 0: .* found {value}"):
            read_alignments(path)


def test_no_alignment_at_all(folder: Path) -> None:
    for number in (1, 2):
        write_int_vectors(folder / f"ali.{number}.gz", [])
    with pytest.raises(DataError, match="no alignment"):
        read_alignments(folder)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 20), max_size=30), min_size=1, max_size=8))
def test_counts(utterances: list[list[int]]) -> None:
    pdfs = {str(number): np.array(ids, np.int32) for number, ids in enumerate(utterances)}
    alignments = Alignments(pdfs, 21, Path("x"))
    everything = [pdf for ids in utterances for pdf in ids]
    counts = pdf_counts(alignments)
    assert counts.dtype == np.int64 and counts.tolist() == [everything.count(pdf) for pdf in range(21)]
    assert pdf_counts(alignments, ["0"]).tolist() == [utterances[0].count(pdf) for pdf in range(21)]
    assert pdf_counts(alignments, []).tolist() == [0] * 21


def test_counts_of_many_frames() -> None:
    """More than one batch."""
    pdfs = {str(number): np.full(700_000, number, np.int32) for number in range(4)}
    assert pdf_counts(Alignments(pdfs, 5, Path("x"))).tolist() == [700_000] * 4 + [0]


def test_kaldis_counts(golden: Path, tmp_path: Path) -> None:
    counts = read_pdf_counts(golden / "nnet1/pdf.counts")
    assert counts.dtype == np.float64 and counts.tolist() == [5, 9, 0, 13, 12, 30, 17, 2, 20]
    for values in (counts, counts.astype(np.int64)):
        write_pdf_counts(tmp_path / "counts", values)
        assert (tmp_path / "counts").read_bytes() == (golden / "nnet1/pdf.counts").read_bytes()


def test_half_a_frame_is_added_as_in_kaldis_recipes(an4: Path, kaldi_nnet1: Path, tmp_path: Path) -> None:
    kaldi = kaldi_nnet1 / "ali_train_pdf.counts"
    smoothed = kaldi_counts(pdf_counts(read_alignments(an4 / "ali")))
    assert smoothed.sum() == 253_682 + 616 / 2
    np.testing.assert_array_equal(smoothed, read_pdf_counts(kaldi))
    write_pdf_counts(tmp_path / "counts", smoothed)
    assert (tmp_path / "counts").read_text().split() == kaldi.read_text().split()


def test_a_tree_is_known_by_its_transition_states(golden: Path, tmp_path: Path) -> None:
    """As decode.sh works it out with Kaldi's copy-transition-model, awk and sha256sum."""
    text = (golden / "tables/mono_transitions.txt").read_text()
    rows = text.partition("<Triples>")[2].partition("</Triples>")[0].splitlines()[1:]
    expected = hashlib.sha256("".join(" ".join(row.split()) + "\n" for row in rows).encode()).hexdigest()
    (tmp_path / "ali").mkdir()
    (tmp_path / "ali/final.mdl").write_bytes((golden / "tables/mono.mdl").read_bytes())
    assert len(rows) > 100 and transition_digest(tmp_path / "ali") == expected
    assert transition_digest(golden / "nnet1/pdfs.txt") is None, "an archive of pdf-ids"
    for one, other in ((None, expected), (expected, None), (expected, expected)):
        check_same_tree(one, other, tmp_path, "x")
    with pytest.raises(DataError, match="another tree"):
        check_same_tree(expected[::-1], expected, tmp_path, "x")


@given(st.lists(st.integers(0, 2**50) | st.floats(0, 1e12), min_size=1))
def test_counts_round_trip(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    path = tmp_path_factory.mktemp("counts") / "x"
    write_pdf_counts(path, np.array(values, np.float64))
    assert read_pdf_counts(path).tolist() == [float(value) for value in values]


def test_binary_counts(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\0BDV \4\2\0\0\0" + np.array([20_000_001.0, 0.5]).tobytes())
    assert read_pdf_counts(tmp_path / "x").tolist() == [20_000_001, 0.5]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b" [ ]\n",
        b" [ 1 -2 ]\n",
        b" [ 1 nan ]\n",
        b"[ inf ]",
        b" [ 1 x ]\n",
        b" [ 1_0 ]",
        b" [ 1 2",
        b"1 2",
        b"[ 1 ] ]",
    ],
)
def test_bad_counts(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "counts"
    path.write_bytes(content)
    with pytest.raises(DataError) as error:
        read_pdf_counts(path)
    assert error.value.location == str(path)
