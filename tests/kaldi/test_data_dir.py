"""Data dirs: what belongs together, and what is said when it does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ddnn.kaldi.archive import MatrixReader, write_matrices
from ddnn.kaldi.data_dir import (
    DataDir,
    accumulate_cmvn_stats,
    compute_cmvn_stats,
    read_cmvn_stats,
    read_data_dir,
    read_text,
    read_utt2spk,
)
from ddnn.util.errors import DataError

UTT2SPK = "ä-1 ä\nä-2 ä\nb-1 b\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data dir of 3 utterances and 2 speakers, at a hostile path."""
    path = tmp_path / "data dir é"
    path.mkdir()
    rng = np.random.default_rng(3)
    items = [(key, rng.standard_normal((n, 4), np.float32)) for key, n in (("ä-1", 5), ("ä-2", 6), ("b-1", 7))]
    write_matrices(path / "feats 1.ark", path / "feats.scp", items)
    (path / "utt2spk").write_text(UTT2SPK)
    return path


def features_of(data: DataDir) -> dict[str, np.ndarray]:
    with MatrixReader() as reader:
        return {entry.key: reader.read(entry) for entry in data.entries}


def test_an4(an4: Path) -> None:
    data = read_data_dir(an4 / "train")
    assert len(data.entries) == 948 and data.entries[0].key == "fash-an251-fash-b"
    assert data.speakers is not None and len(set(data.speakers.values())) == 74 and data.cmvn is None
    assert list(data.speakers) == [entry.key for entry in data.entries]
    with MatrixReader() as reader:
        shapes = [reader.shape(entry) for entry in data.entries]
    assert sum(rows for rows, _ in shapes) == 253_682 and {columns for _, columns in shapes} == {40}
    assert read_text(an4 / "train/text")["fash-an251-fash-b"] == ["YES"]


def stats_of(data: DataDir) -> dict[str, np.ndarray]:
    speakers = data.speaker_of("data.cmvn")
    if data.cmvn is not None:
        return read_cmvn_stats(data.cmvn, speakers)
    entries = {speaker: [e for e in data.entries if speakers[e.key] == speaker] for speaker in speakers.values()}
    with MatrixReader() as reader:
        return compute_cmvn_stats(entries, reader.shape(data.entries[0])[1], reader)


def test_statistics_from_the_features(folder: Path) -> None:
    data = read_data_dir(folder)
    features = features_of(data)
    stats = stats_of(data)
    assert list(stats) == ["ä", "b"]
    together = accumulate_cmvn_stats(np.concatenate([features["ä-1"], features["ä-2"]]))
    np.testing.assert_allclose(stats["ä"], together, rtol=1e-12)
    np.testing.assert_array_equal(stats["b"], accumulate_cmvn_stats(features["b-1"]))


def test_statistics_from_cmvn_scp(folder: Path) -> None:
    given = {"b": np.array([[1.0, 2, 3, 4, 7], [1, 2, 3, 4, 0]]) / 3, "ä": np.full((2, 5), 11.0)}
    write_matrices(folder / "cmvn.ark", folder / "cmvn.scp", given.items())
    stats = stats_of(read_data_dir(folder))
    assert stats.keys() == given.keys()
    for speaker, expected in given.items():
        assert stats[speaker].dtype == np.float64  # double all the way
        np.testing.assert_array_equal(stats[speaker], expected)


def test_a_speaker_without_statistics(folder: Path) -> None:
    write_matrices(folder / "cmvn.ark", folder / "cmvn.scp", [("ä", np.ones((2, 5)))])
    with pytest.raises(DataError, match=r"no CMVN statistics of speaker b \(utterance b-1\)") as error:
        stats_of(read_data_dir(folder))
    assert error.value.location == str(folder / "cmvn.scp")


@pytest.mark.parametrize(
    ("stats", "message"),
    [
        (np.zeros((2, 5)), "speaker b: expected CMVN statistics of 1 frame or more, found 0"),
        (np.full((2, 5), np.nan), "utterance b: nan in row 0, column 0"),
        (np.ones((2, 6)), r"speaker b: expected CMVN statistics of 2 rows and 5 columns, found \(2, 6\)"),
        (np.ones((1, 5)), r"found \(1, 5\)"),
    ],
)
def test_statistics_that_cannot_be(folder: Path, stats: np.ndarray, message: str) -> None:
    write_matrices(folder / "cmvn.ark", folder / "cmvn.scp", [("ä", np.ones((2, 5))), ("b", stats)])
    with pytest.raises(DataError, match=message):
        stats_of(read_data_dir(folder))


def test_features_that_cannot_be(folder: Path) -> None:
    good, nan = np.ones((3, 4), np.float32), np.full((3, 4), np.nan, np.float32)
    for items, message in [
        ([("ä-1", good), ("ä-2", nan), ("b-1", good)], "utterance ä-2: nan in row 0, column 0"),
        ([("ä-1", good), ("ä-2", good), ("b-1", good[:, :3])], "utterance b-1: expected features of 4 dims, found 3"),
    ]:
        write_matrices(folder / "feats 1.ark", folder / "feats.scp", items)
        with pytest.raises(DataError, match=message):
            stats_of(read_data_dir(folder))


def test_zero_length_utterances_count_nothing(folder: Path) -> None:
    items = [("ä-1", np.ones((3, 4), np.float32)), ("ä-2", np.zeros((0, 4), np.float32)), ("b-1", np.zeros((0, 4)))]
    write_matrices(folder / "feats 1.ark", folder / "feats.scp", items)
    stats = stats_of(read_data_dir(folder))
    assert list(stats) == ["ä"] and stats["ä"][0, 4] == 3


def test_without_speakers(folder: Path) -> None:
    (folder / "utt2spk").unlink()
    data = read_data_dir(folder)
    assert data.speakers is None
    with pytest.raises(DataError, match=r"utt2spk does not exist; it is needed for data\.cmvn"):
        data.speaker_of("data.cmvn")


BAD_UTT2SPK = [
    ("ä-1 ä\nb-1 b\n", "1 of 3 utterances of feats.scp have no speaker; the first is ä-2"),
    (UTT2SPK + "ä-1 b\n", "utterance ä-1 occurs twice, in lines 1 and 4"),
    (UTT2SPK + "c-1\n", "line 4: expected an utterance and its speaker, found 'c-1 '"),
    (UTT2SPK + "c-1 c d\n", "line 4: expected an utterance and its speaker"),
    (UTT2SPK + "\n", "line 4 of utt2spk is blank"),
    ("", "utt2spk is empty"),
]


@pytest.mark.parametrize(("content", "message"), BAD_UTT2SPK)
def test_bad_speakers(folder: Path, content: str, message: str) -> None:
    (folder / "utt2spk").write_text(content)
    with pytest.raises(DataError, match=message) as error:
        read_data_dir(folder)
    assert error.value.location == str(folder / "utt2spk")


def test_missing_parts(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the data dir does not exist"):
        read_data_dir(tmp_path / "none")
    with pytest.raises(DataError, match="the scp does not exist") as error:
        read_data_dir(tmp_path)
    assert error.value.location == str(tmp_path / "feats.scp")
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "feats.scp").touch()
    with pytest.raises(DataError, match=r"there is no feats\.scp; data dirs in it are test, train") as error:
        read_data_dir(tmp_path)
    assert (error.value.location, error.value.hint) == (str(tmp_path), f"name one of them, such as {tmp_path}/test")


def test_pipes_must_be_allowed_in_all_tables(folder: Path) -> None:
    (folder / "cmvn.scp").write_text("ä true |\nb true |\n")
    with pytest.raises(DataError, match=r"data\.allow_pipes"):
        read_data_dir(folder)
    data = read_data_dir(folder, allow_pipes=True)
    assert data.cmvn is not None and data.cmvn["b"].pipe == "true"


def test_text_and_speakers_keep_their_order_and_words(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("b grüße an  alle\na\nc no\u00a0break\n")
    assert list(read_text(tmp_path / "text").items()) == [
        ("b", ["grüße", "an", "alle"]),
        ("a", []),
        ("c", ["no\u00a0break"]),
    ]
    (tmp_path / "utt2spk").write_text("z s\ta\n".replace("\ta", "") + "a s\n")
    assert list(read_utt2spk(tmp_path / "utt2spk").items()) == [("z", "s"), ("a", "s")]
