"""The cache file: the same bits as loading, made anew when anything it depends on changes, never believed blindly."""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from corpora import labelled_utterances, write_ali_dir, write_data_dir, write_matrix, write_trans, write_transforms
from hypothesis import given, settings
from hypothesis import strategies as st

from ddnn.data import cache
from ddnn.data.cache import SUFFIX, CacheFile, CacheIndex, CorruptCacheError, cache_key
from ddnn.data.dataset import AcousticDataset
from ddnn.data.feature_reader import FeatureConfig
from ddnn.data.loading import Corpus, DataConfig
from ddnn.data.source import DataSource, open_source
from ddnn.distributed.communicator import SingleProcess
from ddnn.kaldi.archive import MatrixReader, write_matrices
from ddnn.kaldi.data_dir import accumulate_cmvn_stats, read_data_dir
from ddnn.kaldi.transforms import read_transform_config
from ddnn.training.memory import frames_memory
from ddnn.util.errors import DataError

KEY = "0123456789abcdef" * 4
TRAILER = struct.Struct("<QL")
CONFIG = DataConfig(FeatureConfig("mean", 1, 2))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A data dir `train` and an alignment dir `ali`, one utterance without an alignment and one trimmed."""
    features, labels = labelled_utterances(count=24, frames=20)
    names = sorted(labels)
    del labels[names[3]]
    labels[names[5]] = labels[names[5]][:-2]
    write_data_dir(tmp_path / "train", features)
    write_ali_dir(tmp_path / "ali", labels)
    return tmp_path


def opened(folder: Path, dtype: str = "float32", **options: Any) -> DataSource:
    features = replace(CONFIG.features, dtype=dtype)
    config = replace(CONFIG, **{"features": features, "cache_dir": folder / "a cache", **options})
    return open_source([Corpus(folder / "train", folder / "ali")], config, SingleProcess())


def everything(source: DataSource) -> AcousticDataset:
    return source.load(range(len(source.index.entries)), SingleProcess())


def same(one: AcousticDataset, other: AcousticDataset) -> bool:
    return (
        one.features.numpy().tobytes() == other.features.numpy().tobytes()
        and torch.equal(one.labels, other.labels)
        and (one.utterances, one.speakers, one.context, one.counts)
        == (other.utterances, other.speakers, other.context, other.counts)
        and np.array_equal(one.offsets, other.offsets)
        and np.array_equal(one.num_frames, other.num_frames)
    )


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "a cache").iterdir())


def no_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a frame or a header is an error from here on."""
    monkeypatch.setattr(MatrixReader, "read", None)
    monkeypatch.setattr(MatrixReader, "shape", None)


def test_a_difference_that_most_utterances_have_is_a_warning_each_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The lengths are not in the file, what is wrong with them is."""
    _, labels = labelled_utterances(count=24, frames=20)
    write_ali_dir(folder / "ali", {name: pdfs[:-3] for name, pdfs in labels.items()})
    opened(folder)
    no_archive(monkeypatch)
    opened(folder)
    assert caplog.text.count("the alignments of 24 of 24 utterances are 3 frames shorter than the features") == 2


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_second_time_the_same_bits_are_mapped(
    folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ddnn")
    plain = opened(folder, dtype, cache_dir=None)
    expected = everything(plain)
    assert same(everything(opened(folder, dtype)), expected)
    assert caplog.text.count("1 of 24 utterances skipped") == 2  # once for each of these
    no_archive(monkeypatch)
    again = opened(folder, dtype)
    assert same(everything(again), expected)
    assert again.index.num_pdfs == plain.index.num_pdfs == 3
    np.testing.assert_array_equal(again.index.pdf_counts, plain.index.pdf_counts)
    assert again.index.counts == plain.index.counts and plain.index.counts["trimmed"] == 1
    assert len(files(folder)) == 1 and files(folder)[0].endswith(SUFFIX)
    assert "cache: wrote" in caplog.text and "cache: mapped" in caplog.text and "GB in" in caplog.text


def test_a_shard_is_copied_as_if_loaded_by_itself(folder: Path) -> None:
    plain, mapped = opened(folder, cache_dir=None), opened(folder)
    for shard in ([0], [2, 3, 11], list(range(1, len(plain.index.entries)))):
        assert same(mapped.load(shard, SingleProcess()), plain.load(shard, SingleProcess()))


def test_a_corpus_on_the_map_outlives_its_file(folder: Path) -> None:
    expected, corpus = everything(opened(folder, cache_dir=None)), everything(opened(folder))
    for name in files(folder):
        (folder / "a cache" / name).unlink()
    assert same(corpus, expected)


def touch(path: Path) -> None:
    found = path.stat()
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns + 1))


def swap_lines(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[1], lines[0], *lines[2:]]))


def write_cmvn(folder: Path) -> None:
    stats = [(f"spk{s}", accumulate_cmvn_stats(np.ones((9, 4)))) for s in range(4)]
    write_matrices(folder / "train/cmvn.ark", folder / "train/cmvn.scp", stats)


CHANGES: dict[str, Callable[[Path], object]] = {
    "time of the archive": lambda folder: touch(folder / "train/feats.ark"),
    "order of utterances": lambda folder: swap_lines(folder / "train/feats.scp"),
    "speakers": lambda folder: (folder / "train/utt2spk").write_text(
        (folder / "train/utt2spk").read_text().replace(" spk3", " spk2")
    ),
    "cmvn.scp": write_cmvn,
    "alignment": lambda folder: write_ali_dir(folder / "ali", labelled_utterances(24, 20, seed=1)[1]),
    "model": lambda folder: (folder / "ali/final.mdl").write_bytes((folder / "ali/final.mdl").read_bytes() + b"\0"),
    "another folder": lambda folder: (
        (folder / "train").rename(folder / "x") and (folder / "x").rename(folder / "train")
    ),
}


def key_of(folder: Path, num_pdfs: int | None = None, **features: Any) -> str | None:
    config = DataConfig(FeatureConfig(**features), num_pdfs=num_pdfs)
    return cache_key(read_data_dir(folder / "train"), Corpus(folder / "train", folder / "ali"), config)


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_key_depends_on(folder: Path, change: str) -> None:
    before = key_of(folder)
    assert before is not None and key_of(folder) == before
    CHANGES[change](folder)
    assert (key_of(folder) == before) == (change == "another folder")
    others = [{"dtype": "float16"}, {"cmvn": "mean"}, {"deltas": 1}, {"splice": 2}, {"num_pdfs": 3}]
    assert len({key_of(folder), *(key_of(folder, **other) for other in others)}) == 6


def test_the_key_depends_on_all_of_the_transforms(folder: Path) -> None:
    path = write_transforms(folder / "tri4")

    def key() -> str | None:
        config = DataConfig(FeatureConfig(transforms=read_transform_config(path)))
        corpus = Corpus(folder / "train", folder / "ali", transforms=path)
        return cache_key(read_data_dir(folder / "train"), corpus, config)

    keys = {key_of(folder), key()}
    write_trans(path, ["spk0", "spk1", "spk2", "spk4"], 5, jobs=2)
    keys.add(key())
    (path / "splice_opts").write_text("--left-context=2 --right-context=1")
    keys.add(key())
    write_matrix(path / "final.mat", np.ones((5, 16), np.float32))
    keys.add(key())
    assert len(keys) == 5 and None not in keys


def test_transformed_features_are_cached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_transforms(folder / "tri4")
    features = FeatureConfig("mean", 0, 1, transforms=read_transform_config(path))
    corpora = [Corpus(folder / "train", folder / "ali", transforms=path)]

    def load(cache_dir: Path | None) -> AcousticDataset:
        return everything(open_source(corpora, DataConfig(features, cache_dir=cache_dir), SingleProcess()))

    expected = load(None)
    assert expected.dim == 5 and same(load(folder / "cache"), expected)
    no_archive(monkeypatch)
    assert same(load(folder / "cache"), expected)


def test_a_changed_archive_is_loaded_anew(folder: Path) -> None:
    everything(opened(folder))
    features, _ = labelled_utterances(count=24, frames=20, seed=7)
    write_data_dir(folder / "train", features)
    assert same(everything(opened(folder)), everything(opened(folder, cache_dir=None)))
    assert len(files(folder)) == 2


def test_shell_commands_are_not_cached(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    scp = folder / "train/feats.scp"
    name, place = scp.read_text().splitlines()[0].split(" ", 1)
    path, offset = place.rsplit(":", 1)
    lines = [f"{name} tail -c +{int(offset) + 1} '{path}' |", *scp.read_text().splitlines()[1:]]
    scp.write_text("\n".join(lines) + "\n")
    corpus = everything(opened(folder, allow_pipes=True))
    assert len(corpus.utterances) == 23 and not (folder / "a cache").exists()
    assert "no cache for shell commands" in caplog.text


def test_missing_alignments_are_judged_as_ever(folder: Path) -> None:
    opened(folder)
    with pytest.raises(DataError, match=r"1 of 24 utterances cannot be used \(1 without an alignment"):
        opened(folder, max_skipped_fraction=0.01)


@pytest.fixture(scope="module")
def cached_bytes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A small cache file and its bytes."""
    path = tmp_path_factory.mktemp("cache") / "x"
    write(path)
    return path, path.read_bytes()


FEATURES = np.arange(14, dtype=np.float32)
LABELS = np.array([-1, 0, 1, -1, -1, 2, -1], np.int32)
PIECES = (FEATURES[:8].tobytes(), FEATURES[8:].tobytes(), LABELS.tobytes())
INDEX = CacheIndex(
    key=KEY, dim=2, selected=[0, 2], num_frames=[2, 1],
    pdf_counts=[1, 1, 1], counts={}, mismatch="", blocks=[(len(piece), zlib.crc32(piece)) for piece in PIECES],
)  # fmt: skip
"""Two utterances of 2 and 1 frames, context 1, 2 dims, 3 pdfs."""


def write(path: Path, **changed: Any) -> None:
    path.write_bytes(b"".join(PIECES) + INDEX.model_copy(update=changed).encode())


def read(path: Path, key: str = KEY, entries: int = 3) -> CacheFile:
    found = CacheFile(path, key, entries, FeatureConfig(splice=1))
    try:
        found.check(2)
    finally:
        found.close()
    return found


def test_what_was_written_is_read(cached_bytes: tuple[Path, bytes]) -> None:
    found = read(cached_bytes[0])
    assert found.features.tolist() == np.arange(14).reshape(7, 2).tolist()
    assert found.labels.tolist() == [-1, 0, 1, -1, -1, 2, -1]
    with pytest.raises(CorruptCacheError, match="made from other data"):
        read(cached_bytes[0], KEY[::-1])


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_any_byte_changed_cut_or_added_is_noticed(cached_bytes: tuple[Path, bytes], data: st.DataObject) -> None:
    path, whole = cached_bytes
    place = data.draw(st.integers(0, len(whole) - 1) | st.integers(len(whole) - 500, len(whole) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "remove", "zero tail"]))
    damaged = bytearray(whole)
    if kind == "flip":
        damaged[place] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del damaged[place:]
    elif kind == "insert":
        damaged[place:place] = data.draw(st.binary(min_size=1, max_size=9))
    elif kind == "remove":
        del damaged[place : place + data.draw(st.integers(1, 5000))]
    else:
        damaged[place:] = bytes(len(whole) - place)
    if damaged == whole:
        return
    other = path.with_name("damaged")
    other.write_bytes(damaged)
    with pytest.raises(CorruptCacheError):
        read(other)


@pytest.mark.parametrize("selected", [[0, 3], [-1, 2], [1, 1], [2, 0]])
def test_utterances_that_the_data_dir_does_not_have_are_refused(tmp_path: Path, selected: list[int]) -> None:
    write(tmp_path / "x", selected=selected)
    with pytest.raises(CorruptCacheError, match="not those of the data dir"):
        read(tmp_path / "x")


@settings(max_examples=200, deadline=None)
@given(text=st.one_of(st.binary(max_size=300), st.sampled_from([b"[" * 5000, b'{"rows": 1e999}', b"null", b"{}"])))
def test_an_index_of_anything_is_refused(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    path = tmp_path_factory.mktemp("cache") / "x"
    for content in (text, text + TRAILER.pack(len(text), zlib.crc32(text)), text + TRAILER.pack(2**60, 0)):
        path.write_bytes(content)
        with pytest.raises(CorruptCacheError):
            read(path)


@pytest.mark.parametrize(
    "changed",
    [
        {"num_frames": [2**47, 1]},
        {"num_frames": [2, 1, 1], "selected": [0, 1, 2]},
        {"num_frames": [2]},
        {"dim": 2**30},
        {"blocks": [*INDEX.blocks[:2], (2**47, 0)]},
    ],
)
def test_an_index_that_claims_another_size_is_refused_before_anything_is_allocated(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    """Although its checksum is right."""
    write(tmp_path / "x", **changed)
    with pytest.raises(CorruptCacheError, match="another length"):
        read(tmp_path / "x")


@pytest.mark.parametrize("kind", ["flipped", "empty", "a pipe", "a link", "a directory"])
def test_a_damaged_file_is_a_warning_and_made_anew(
    folder: Path, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = everything(opened(folder, cache_dir=None))
    opened(folder)
    (name,) = files(folder)
    path = folder / "a cache" / name
    whole = path.read_bytes()
    if kind == "flipped":
        path.write_bytes(whole[:100] + bytes([whole[100] ^ 4]) + whole[101:])
    else:
        path.unlink()
    if kind == "empty":
        path.touch()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "a link":
        (folder / "target").write_bytes(b"not ours")
        path.symlink_to(folder / "target")
    elif kind == "a directory":
        path.mkdir()
    assert same(everything(opened(folder)), expected)
    assert f"cache: {path}" in caplog.text and any(record.levelname == "WARNING" for record in caplog.records)
    if kind == "a link":
        assert (folder / "target").read_bytes() == b"not ours"
    if kind != "a directory":
        no_archive(monkeypatch)
        assert same(everything(opened(folder)), expected)


def test_a_cache_that_cannot_be_written_is_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = everything(opened(folder, cache_dir=None))
    (folder / "file").touch()
    assert same(everything(opened(folder, cache_dir=folder / "file/cache")), expected)
    assert "cannot write" in caplog.text
    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: SimpleNamespace(f_bavail=10, f_frsize=4096))
    assert same(everything(opened(folder)), expected)
    assert "are needed, 0.0 GB are free" in caplog.text and files(folder) == []


def test_what_changes_while_it_is_read_is_not_kept(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = cache.load_features

    def load_and_meanwhile(*of: Any) -> list[tuple[int, int]]:
        touch(folder / "train/feats.ark")
        return load(*of)

    monkeypatch.setattr(cache, "load_features", load_and_meanwhile)
    assert same(everything(opened(folder)), everything(opened(folder, cache_dir=None)))
    assert "the data changed while they were read" in caplog.text and files(folder) == []


def test_bad_features_are_an_error_and_leave_no_file(folder: Path) -> None:
    features, _ = labelled_utterances(count=24, frames=20)
    features[max(features)][3, 1] = np.inf
    write_data_dir(folder / "train", features)
    with pytest.raises(DataError, match=f"{max(features)}: inf in row 3, column 1"):
        opened(folder)
    assert files(folder) == []


def test_two_that_write_at_once_do_not_disturb_each_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = everything(opened(folder, cache_dir=None))
    load, nested = cache.load_features, []

    def load_and_meanwhile(*of: Any) -> list[tuple[int, int]]:
        monkeypatch.setattr(cache, "load_features", load)
        nested.append(everything(opened(folder)))
        return load(*of)

    monkeypatch.setattr(cache, "load_features", load_and_meanwhile)
    assert same(everything(opened(folder)), expected) and same(nested[0], expected) and len(files(folder)) == 1


def test_what_a_killed_writer_left_is_removed_and_a_live_one_let_be(folder: Path) -> None:
    (folder / "a cache").mkdir()
    left, live = folder / "a cache/.x.1.tmp", folder / "a cache/.x.2.tmp"
    left.touch()
    with live.open("wb") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        opened(folder)
    assert not left.exists() and live.exists()


def test_shares_of_a_check_are_together_the_whole(cached_bytes: tuple[Path, bytes], tmp_path: Path) -> None:
    whole = bytearray(cached_bytes[1])
    whole[10] ^= 1
    (tmp_path / "x").write_bytes(whole)
    noticed = []
    for share in range(3):
        found = CacheFile(tmp_path / "x", KEY, 3, FeatureConfig(splice=1))
        try:
            found.check(1, share, 3)
            noticed.append(False)
        except CorruptCacheError:
            noticed.append(True)
        found.close()
    assert sum(noticed) == 1


def test_a_mapped_file_needs_no_memory_and_a_shard_of_it_does(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = opened(folder)
    monkeypatch.setattr("ddnn.data.cache.available_memory", lambda: 1000)
    assert everything(source).features.shape[1] == 8
    assert "read from disk again and again" in caplog.text
    frames = source.index.num_frames
    assert frames_memory(source, range(len(frames))) == {"frames in float32": 24 * int(frames.sum())}
    one = frames_memory(source, [0, 2])
    assert one == {"frames in float32": 24 * int(frames[[0, 2]].sum()) + (int(frames[[0, 2]].sum()) + 8) * (4 * 8 + 4)}
    assert frames_memory(opened(folder, cache_dir=None), [0, 2]) == one


def test_a_file_that_is_cut_while_it_is_read_is_an_error(folder: Path) -> None:
    source = opened(folder)
    (name,) = files(folder)
    os.truncate(folder / "a cache" / name, 100)
    with pytest.raises(DataError, match="failed while it was read: it was cut"):
        source.load([2, 3], SingleProcess())
