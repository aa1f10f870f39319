"""Kaldi's feature transforms: equal to Kaldi's own output; what does not fit is an error that says what and where."""

from __future__ import annotations

import gzip
import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from corpora import DIM, load_all, write_ali_dir, write_data_dir, write_matrix, write_trans, write_transforms
from distributed.threads import run_workers

from ddnn.data.feature_reader import FeatureConfig
from ddnn.data.loading import Corpus, DataConfig, index_corpus, warn_of_contradictions
from ddnn.distributed.communicator import Communicator
from ddnn.kaldi.archive import iterate_matrices
from ddnn.kaldi.data_dir import read_data_dir
from ddnn.kaldi.transforms import TransformConfig, mismatched_options, read_transform_config, splice_frames
from ddnn.util.errors import DataError

FILES = {
    "lda": {"final.mat": "final.mat"},
    "lda_affine": {"final.mat": "final_affine.mat"},
    "fmllr": {"final.mat": "final.mat", "trans.1": "trans.1"},
    "fmllr_utt": {"final.mat": "final.mat", "trans.1": "trans_utt.1"},
    "deltas": {"final.mdl": "../tables/mono.mdl"},  # of 39 dims
}


def transformed(data: Path, path: Path, cmvn: str = "mean", **options: object) -> dict[str, np.ndarray]:
    """The features of a data dir as a network would get them, by utterance."""
    features = FeatureConfig(cmvn, transforms=read_transform_config(path))
    found = load_all(data, None, 0, features, transforms=path, **options)
    ends = found.offsets + found.num_frames
    return {u: found.features.numpy()[a:b] for u, a, b in zip(found.utterances, found.offsets, ends, strict=True)}


@pytest.mark.parametrize("name", FILES)
def test_the_features_are_kaldis(name: str, golden: Path, tmp_path: Path) -> None:
    for file, source in FILES[name].items():
        shutil.copy(golden / "transforms" / source, tmp_path / file)
    (tmp_path / "splice_opts").write_text("--left-context=3 --right-context=3\n")
    found = transformed(golden / "transforms", tmp_path)
    expected = dict(iterate_matrices(golden / f"transforms/{name}.ark"))
    assert found.keys() == expected.keys()
    for utterance, features in expected.items():
        assert found[utterance].dtype == np.float32
        np.testing.assert_allclose(found[utterance], features, rtol=0, atol=2e-5)


def test_the_right_and_the_left_context_are_told_apart() -> None:
    features = np.arange(8.0).reshape(4, 2)
    expected = [features[[max(t - 1, 0), t, min(t + 1, 3), min(t + 2, 3)]].ravel() for t in range(4)]
    np.testing.assert_array_equal(splice_frames(features, 1, 2), expected)


def as_text(path: Path, values: np.ndarray, key: str = "") -> bytes:
    rows = "\n".join("  " + " ".join(map(repr, row)) for row in values.tolist())
    return f"{key} [\n{rows} ]\n".encode()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Two utterances of each of 12 speakers, 4 dims."""
    rng = np.random.default_rng(5)
    names = [f"s{n:02d}-{u}" for n in range(12) for u in range(2)]
    return write_data_dir(tmp_path / "data", {name: rng.normal(size=(9, DIM)).astype(np.float32) for name in names})


SPEAKERS = [f"s{n:02d}" for n in range(12)]


@pytest.mark.parametrize("form", ["text", "double", "gzip"])
def test_matrices_of_every_form(data: Path, tmp_path: Path, form: str) -> None:
    binary = write_transforms(tmp_path / "binary", SPEAKERS, jobs=11)
    other = write_transforms(tmp_path / form, SPEAKERS, jobs=11)
    matrix = np.random.default_rng(7).normal(size=(5, 16)).astype(np.float32)
    if form == "text":
        (other / "final.mat").write_bytes(as_text(other, matrix))
    else:
        write_matrix(other / "final.mat", matrix.astype(np.float64))
    for file in other.glob("trans.*"):
        records = dict(iterate_matrices(file))
        if form == "text":
            file.write_bytes(b"".join(as_text(file, values, key) for key, values in records.items()))
        elif form == "gzip":
            file.write_bytes(gzip.compress(file.read_bytes()))
    assert read_transform_config(other) == read_transform_config(binary)
    one, two = transformed(data, binary, "none"), transformed(data, other, "none")
    assert all(np.array_equal(one[name], two[name]) for name in one)


def test_a_decode_dir_takes_what_the_dir_of_its_system_has(data: Path, tmp_path: Path) -> None:
    system = write_transforms(tmp_path / "tri4")
    write_trans(system / "decode", SPEAKERS, 5)
    whole = write_transforms(tmp_path / "whole", SPEAKERS)
    assert read_transform_config(system / "decode") == read_transform_config(whole)
    one, two = transformed(data, system / "decode", "none"), transformed(data, whole, "none")
    assert all(np.array_equal(one[name], two[name]) for name in one)
    # A dir with a model of its own is an alignment dir: what is above it is of another system.
    (system / "decode/final.mdl").touch()
    assert read_transform_config(system / "decode") == TransformConfig(delta_order=2, adapted=True)


@pytest.mark.parametrize("text", [None, "", " \n"])
def test_kaldis_context_is_4_where_splice_opts_says_nothing(tmp_path: Path, text: str | None) -> None:
    path = write_transforms(tmp_path / "x")
    (path / "splice_opts").unlink()
    if text is not None:
        (path / "splice_opts").write_text(text)
    found = read_transform_config(path)
    assert (found.left_context, found.right_context) == (4, 4)


def test_delta_opts(tmp_path: Path, data: Path) -> None:
    path = write_transforms(tmp_path / "x", SPEAKERS, rows=0)
    assert read_transform_config(path) == TransformConfig(delta_order=2, delta_window=2, adapted=True)
    (path / "delta_opts").write_text("--delta_order=1 '--delta-window=3'\n")
    for file in path.glob("trans.*"):
        file.unlink()
    write_trans(path, SPEAKERS, 2 * DIM)
    assert read_transform_config(path) == TransformConfig(delta_order=1, delta_window=3, adapted=True)
    assert {features.shape[1] for features in transformed(data, path, "none").values()} == {2 * DIM}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("splice_opts", "--left-context=3 --skip=1", "unknown option '--skip=1'"),
        ("splice_opts", "3 3", "unknown option '3'"),
        ("splice_opts", "--left-context=-1", "'--left-context=-1' found, expected a number from 0 to 100"),
        ("splice_opts", "--left-context=١", "expected a number from 0 to 100"),
        ("splice_opts", "--left-context='3", "cannot read the options: No closing quotation"),
        ("splice_opts", "#" * 20_000, "cannot read the options"),
        ("splice_opts", "--left-context=3 $(touch x)", "unknown option '$(touch'"),
    ],
)
def test_options_that_are_none(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = write_transforms(tmp_path / "x")
    (path / name).write_text(text)
    with pytest.raises(DataError, match=re.escape(said)) as caught:
        read_transform_config(path)
    assert caught.value.location == str(path / name)


def test_a_window_of_no_frame_is_refused(tmp_path: Path) -> None:
    path = write_transforms(tmp_path / "x", rows=0)
    (path / "delta_opts").write_text("--delta-window=0")
    with pytest.raises(DataError, match="expected a number from 1 to 100"):
        read_transform_config(path)


def other_columns(path: Path) -> None:
    write_matrix(path / "final.mat", np.ones((5, 11), np.float32))


def features_of_the_output(path: Path) -> None:
    write_matrix(path / "final.mat", np.ones((4, 40), np.float32))


def not_a_number(path: Path) -> None:
    matrix = np.ones((5, 16), np.float32)
    matrix[2, 3] = np.nan
    write_matrix(path / "final.mat", matrix)


def too_large(path: Path) -> None:
    write_matrix(path / "final.mat", np.full((5, 16), 1e300))


def cut(path: Path) -> None:
    (path / "final.mat").write_bytes((path / "final.mat").read_bytes()[:-1])


def longer(path: Path) -> None:
    (path / "final.mat").write_bytes((path / "final.mat").read_bytes() + b"x")


def without_a_speaker(path: Path) -> None:
    write_trans(path, SPEAKERS[2:], 5, jobs=2)


def of_other_speakers(path: Path) -> None:
    write_trans(path, ["x1", "x2"], 5, jobs=2)


def of_other_dims(path: Path) -> None:
    write_trans(path, SPEAKERS, 7, jobs=2)


def trans_not_a_number(path: Path) -> None:
    (path / "trans.2").write_bytes(as_text(path, np.full((5, 6), np.inf), "s01"))


def twice(path: Path) -> None:
    shutil.copy(path / "trans.1", path / "trans.2")


def a_job_is_missing(path: Path) -> None:
    (path / "trans.2").unlink()


def raw_transforms(path: Path) -> None:
    for file in path.glob("trans.*"):
        file.rename(path / f"raw_{file.name}")


def nothing(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


def no_dir(path: Path) -> None:
    shutil.rmtree(path)


BAD: dict[Callable[[Path], None], tuple[str, str]] = {
    other_columns: (
        "final.mat",
        r"features of 4 dims \(.*\) do not fit the 11 columns, with LDA\+MLLT over 1\+1\+2 frames",
    ),
    features_of_the_output: (
        "final.mat",
        "features of 4 dims.*written with these transforms .* need no data.transforms",
    ),
    not_a_number: ("final.mat", "nan in row 2, column 3 of the transform"),
    too_large: ("final.mat", "inf in row 0, column 0 of the transform"),
    cut: ("final.mat", "cut short"),
    longer: ("final.mat", "expected the end of the file behind the matrix"),
    without_a_speaker: ("", r"2 of 12 speakers of .* no transform in trans.\*; the first is s00 \(utterance s00-0\)"),
    of_other_speakers: (
        "",
        r"none of the speakers and utterances of .* has a transform \(such as s00, s00-0\).* 2, of x1",
    ),
    of_other_dims: ("trans.1", "s00: a transform of 7 x 8 found, 5 x 6 expected"),
    trans_not_a_number: ("trans.2", "s01: inf in row 0, column 0"),
    twice: ("trans.2", "s00 occurs twice"),
    a_job_is_missing: ("", "trans.2 is missing: expected 2 jobs, found 1"),
    raw_transforms: ("", r"raw_trans.\* \(raw fMLLR\) found"),
    nothing: ("", "there is no final.mat, final.mdl or trans.* in it"),
    no_dir: ("", "the dir of transforms does not exist"),
}


@pytest.mark.parametrize("damage", BAD, ids=lambda damage: damage.__name__)
def test_what_does_not_fit_is_an_error(damage: Callable[[Path], None], data: Path, tmp_path: Path) -> None:
    path = write_transforms(tmp_path / "system", SPEAKERS)
    damage(path)
    file, said = BAD[damage]
    with pytest.raises(DataError, match=f"(?s){said}") as caught:
        transformed(data, path, "none")
    assert caught.value.location == str(path / file)


def test_transforms_after_deltas_say_that_there_is_no_final_mat(data: Path, tmp_path: Path) -> None:
    path = write_transforms(tmp_path / "system", SPEAKERS)
    (path / "final.mat").unlink()
    with pytest.raises(DataError, match=r"5 x 6 found, 12 x 13 expected(?s:.*)no final.mat, it follows deltas"):
        transformed(data, path, "none")


def test_features_that_have_deltas_already_are_refused(golden: Path, tmp_path: Path) -> None:
    shutil.copy(golden / "tables/mono.mdl", tmp_path / "final.mdl")
    wide = {name: matrix for name, matrix in iterate_matrices(golden / "transforms/deltas.ark")}
    said = "features of 39 dims (.*) do not fit the GMMs of 39 dims, with deltas of order 2, window 2"
    with pytest.raises(DataError, match=said) as caught:
        transformed(write_data_dir(tmp_path / "data", wide), tmp_path, "none")
    assert caught.value.location == str(tmp_path / "final.mdl")


def test_transforms_of_utterances_are_found_out_from_the_keys(data: Path, tmp_path: Path) -> None:
    utterances = [entry.key for entry in read_data_dir(data).entries]
    by_speaker = transformed(data, write_transforms(tmp_path / "a", SPEAKERS), "none")
    by_utterance = transformed(data, write_transforms(tmp_path / "b", utterances), "none")
    assert by_utterance.keys() == by_speaker.keys()
    assert not any(np.allclose(by_speaker[name], by_utterance[name]) for name in utterances)
    (data / "utt2spk").unlink()
    again = transformed(data, tmp_path / "b", "none")
    assert all(np.array_equal(again[name], by_utterance[name]) for name in utterances)
    with pytest.raises(DataError, match="none of the speakers and utterances"):
        transformed(data, tmp_path / "a", "none")
    write_trans(tmp_path / "b", utterances[1:], 5, jobs=2)
    with pytest.raises(DataError, match=r"1 of 24 utterances of .* have no transform"):
        transformed(data, tmp_path / "b", "none")


def another_final_mat(path: Path) -> None:
    write_matrix(path / "final.mat", np.ones((5, 16), np.float32))


def another_context(path: Path) -> None:
    (path / "splice_opts").write_text("--left-context=2 --right-context=1")


def without_trans(path: Path) -> None:
    for file in path.glob("trans.*"):
        file.unlink()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (another_final_mat, r"another final.mat \(\w{12} found, \w{12} expected, by digest\)"),
        (another_context, r"LDA\+MLLT over 2\+1\+1 frames, fMLLR found, LDA\+MLLT over 1\+1\+2 frames, fMLLR expected"),
        (without_trans, r"LDA\+MLLT over 1\+1\+2 frames found, LDA\+MLLT over 1\+1\+2 frames, fMLLR expected"),
    ],
)
def test_the_transforms_of_another_system_are_refused(
    change: Callable[[Path], None], said: str, data: Path, tmp_path: Path
) -> None:
    path = write_transforms(tmp_path / "system", SPEAKERS)
    expected = read_transform_config(path)
    change(path)
    corpus, config = Corpus(data, data, transforms=path), DataConfig(FeatureConfig(transforms=expected))
    with pytest.raises(DataError, match=said):
        index_corpus(corpus, read_data_dir(data), None, config)
    config = DataConfig(FeatureConfig(transforms=read_transform_config(path)))
    assert index_corpus(corpus, read_data_dir(data), None, config).transforms is not None


def test_a_header_says_the_transforms_again() -> None:
    config = TransformConfig("ab" * 32, 40, 3, 3, adapted=True)
    assert TransformConfig.from_header(config.__dict__) == config
    assert config.as_text() == "LDA+MLLT over 3+1+3 frames, fMLLR"
    for change in ({"output_dim": 0}, {"left_context": -1}, {"left_context": 1.0}, {"adapted": 1}, {"delta_order": 9}):
        with pytest.raises(ValueError, match="transforms"):
            TransformConfig.from_header({**config.__dict__, **change})
    with pytest.raises(TypeError):
        TransformConfig.from_header({"other": 1})


def mismatches(path: Path, cmvn: str = "none", deltas: int = 0, dim: int = DIM, *, own: bool = False) -> list[str]:
    return mismatched_options(path if own else None, path, cmvn, deltas, dim)


def test_options_beside_an_alignment_that_differ_from_the_recipe(tmp_path: Path) -> None:
    """`write_model` has GMMs of 4 dims: with deltas of order 0 those of raw features of 4 dims."""
    ali = write_ali_dir(tmp_path / "ali", {"a": np.zeros(3, np.int32)})
    assert mismatches(ali) == []
    (ali / "cmvn_opts").write_text("--norm-vars=true\n")
    assert mismatches(ali) == []  # raw features of 4 dims and deltas would be 12
    (ali / "delta_opts").write_text("--delta-order=0\n")
    read = "but the features are read with data.cmvn: none"
    assert mismatches(ali) == [f"{ali}/cmvn_opts says data.cmvn: mean-variance, {read}"]
    assert mismatches(ali, "mean-variance") == [] and mismatches(ali, dim=40) == []
    (ali / "cmvn_opts").write_text("--norm-means=false\n")
    assert mismatches(ali) == [] and len(mismatches(ali, "mean")) == 1
    (ali / "cmvn_opts").write_text("\n")  # Kaldi's default
    assert mismatches(ali, "mean") == [] and mismatches(ali) == [f"{ali}/cmvn_opts says data.cmvn: mean, {read}"]
    read = "but the features are read with data.deltas: 2"
    assert mismatches(ali, "mean", 2) == [f"{ali}/delta_opts says data.deltas: 0, {read}"]
    assert len(mismatches(ali, "none", 2)) == 2
    (ali / "cmvn_opts").write_text("--skip-dims=13:14\n")
    (message,) = mismatches(ali, "mean")
    assert message.startswith(f"{ali}/cmvn_opts: --reverse, --skip-dims or") and "which ddnn does not have" in message
    (ali / "cmvn_opts").write_text("--other\n")
    assert mismatches(ali, "mean") == [f"{ali}/cmvn_opts: unknown option '--other'"]


def test_options_beside_transforms_that_differ_from_the_recipe(tmp_path: Path) -> None:
    """Also those in the dir of the system above a decode dir; of an alignment only with features that are still raw."""
    ali = write_transforms(write_ali_dir(tmp_path / "ali", {"a": np.zeros(3, np.int32)}))
    (decoded := ali / "decode").mkdir()
    assert mismatches(ali, "mean", dim=5) == []  # the features have been written with the transforms
    for own in (None, ali, decoded):
        (message,) = mismatched_options(own, ali, "mean", 0, DIM)
        assert message.startswith(f"{ali}/cmvn_opts says data.cmvn: none, but")
        assert mismatched_options(own, ali, "none", 0, DIM) == []
    (ali / "cmvn_opts").unlink()
    assert mismatches(ali, "mean", own=True) == mismatches(ali, own=True) == []


def test_contradictions_are_logged(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a recipe and, where its model is evaluated or decodes, of the model."""
    path = write_transforms(tmp_path / "system", SPEAKERS)
    config = DataConfig(FeatureConfig("mean", transforms=read_transform_config(path)))
    corpus = Corpus(data, data, transforms=path)
    warn_of_contradictions(corpus, config, index_corpus(corpus, read_data_dir(data), None, config))
    transformed(data, path, "mean")
    first, second = (record for record in caplog.records if "cmvn_opts" in record.getMessage())
    assert first.levelno == second.levelno == logging.WARNING
    assert first.getMessage() == second.getMessage()
    assert first.getMessage().endswith("says data.cmvn: none, but the features are read with data.cmvn: mean")


def test_a_host_with_other_transforms_is_named(data: Path, tmp_path: Path) -> None:
    paths = [write_transforms(tmp_path / name, SPEAKERS) for name in "ab"]
    records = dict(iterate_matrices(paths[1] / "trans.1"))
    (paths[1] / "trans.1").write_bytes(b"".join(as_text(paths[1], 2 * m, key) for key, m in records.items()))
    shutil.copy(paths[0] / "trans.2", paths[1] / "trans.2")
    config = DataConfig(FeatureConfig(transforms=read_transform_config(paths[0])))

    def index(comm: Communicator, path: Path) -> str:
        try:
            index_corpus(Corpus(data, data, transforms=path), read_data_dir(data), None, config, comm)
        except DataError as error:
            return str(error)
        return ""

    assert run_workers(2, lambda comm: index(comm, paths[0])) == ["", ""]
    first, second = run_workers(2, lambda comm: index(comm, paths[comm.rank]))
    assert first == "" and "the transforms on host here (worker 1) differ from those of worker 0 on here" in second
