"""The cache file: the same bits as loading, made anew when anything it depends on changes, never believed blindly."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from corpora import labelled_utterances, write_ali_dir, write_data_dir
from hypothesis import given, settings
from hypothesis import strategies as st

from ddnn.data import cache_file, cached
from ddnn.data.cache_file import CacheDamaged, CacheFile, Footer, Index, write_cache
from ddnn.data.cache_key import cache_key
from ddnn.data.cached import Options
from ddnn.data.corpus import Corpus, FeaturePipeline
from ddnn.data.source import Source, open_source
from ddnn.errors import DataError
from ddnn.kaldi.datadir import read_data_dir
from ddnn.kaldi.features import accumulate_cmvn_stats
from ddnn.kaldi.tables import MatrixReader, write_matrices
from ddnn.parallel.exchange import Exchange

KEY = "0123456789abcdef" * 4
OPTIONS = Options(2, FeaturePipeline("mean", 1), "float32")


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


def opened(folder: Path, **options: Any) -> Source:
    wanted = replace(OPTIONS, **{"cache": folder / "a cache", **options})
    return open_source(folder / "train", folder / "ali", wanted, Exchange())


def everything(source: Source) -> Corpus:
    return source.load(range(len(source.plan.entries)), Exchange())


def same(one: Corpus, other: Corpus) -> bool:
    return (
        one.store.numpy().tobytes() == other.store.numpy().tobytes()
        and torch.equal(one.labels, other.labels)
        and (one.utterances, one.speakers, one.context, one.counts)
        == (other.utterances, other.speakers, other.context, other.counts)
        and np.array_equal(one.first_row, other.first_row)
        and np.array_equal(one.num_frames, other.num_frames)
    )


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "a cache").iterdir())


def no_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a frame or a header is an error from here on."""
    monkeypatch.setattr(MatrixReader, "read", None)
    monkeypatch.setattr(MatrixReader, "shape", None)


@pytest.mark.parametrize("store", ["float32", "float16"])
def test_the_second_time_the_same_bits_are_mapped(
    folder: Path, store: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ddnn")
    plain = opened(folder, cache=None, store=store)
    expected = everything(plain)
    assert same(everything(opened(folder, store=store)), expected)
    assert caplog.text.count("1 of 24 utterances skipped") == 2  # once for each of these
    no_archive(monkeypatch)
    again = opened(folder, store=store)
    assert same(everything(again), expected)
    assert again.num_pdfs == plain.num_pdfs == 3
    np.testing.assert_array_equal(again.pdf_counts(), plain.pdf_counts())
    assert again.plan.counts == plain.plan.counts and plain.plan.counts["trimmed"] == 1
    assert len(files(folder)) == 1
    assert "cache: wrote" in caplog.text and "cache: mapped" in caplog.text and "GB in" in caplog.text


def test_a_shard_is_copied_as_if_loaded_by_itself(folder: Path) -> None:
    plain, mapped = opened(folder, cache=None), opened(folder)
    for shard in ([0], [2, 3, 11], list(range(1, len(plain.plan.entries)))):
        assert same(mapped.load(shard, Exchange()), plain.load(shard, Exchange()))


def test_a_corpus_on_the_map_outlives_its_file(folder: Path) -> None:
    expected, corpus = everything(opened(folder, cache=None)), everything(opened(folder))
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


def key_of(folder: Path, **options: Any) -> str | None:
    return cache_key(read_data_dir(folder / "train"), folder / "ali", {"cmvn": "none", "store": "float32", **options})


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_key_depends_on(folder: Path, change: str) -> None:
    before = key_of(folder)
    assert before is not None and key_of(folder) == before
    CHANGES[change](folder)
    assert (key_of(folder) == before) == (change == "another folder")
    assert key_of(folder, store="float16") != key_of(folder)


def test_a_changed_archive_is_loaded_anew(folder: Path) -> None:
    everything(opened(folder))
    features, _ = labelled_utterances(count=24, frames=20, seed=7)
    write_data_dir(folder / "train", features)
    assert same(everything(opened(folder)), everything(opened(folder, cache=None)))
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
        opened(folder, max_missing=0.01)


@pytest.fixture(scope="module")
def cached_bytes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A small cache file and its bytes."""
    path = tmp_path_factory.mktemp("cache") / "x"
    write(path)
    return path, path.read_bytes()


def write(path: Path, **index: Any) -> None:
    """Two utterances of 2 and 1 frames, context 1, 2 dims, 3 pdfs."""
    sound = {"kept": [0, 2], "num_frames": [2, 1], "pdf_counts": [1, 1, 1], "labels": [-1, 0, 1, -1, -1, 2, -1]}
    arrays = {
        name: np.array(value, np.int32 if name == "labels" else np.int64) for name, value in {**sound, **index}.items()
    }
    store = np.arange(14, dtype=np.float32)
    footer = Footer(
        data="d", dim=2, width=2, context=1, dtype="float32", utterances=2, rows=7, pdfs=3, counts={}, pieces=[]
    )

    def write_store(descriptor: int, start: int) -> list[tuple[int, int]]:
        os.pwrite(descriptor, store.tobytes(), start)
        return [(len(piece), cache_file.zlib.crc32(piece)) for piece in (store[:8].tobytes(), store[8:].tobytes())]

    write_cache(path, KEY, footer, Index(**arrays), write_store)


def read(path: Path, key: str = KEY, entries: int = 3) -> CacheFile:
    found = CacheFile(path, key)
    try:
        found.check(entries, 2)
    finally:
        found.close()
    return found


def test_what_was_written_is_read(cached_bytes: tuple[Path, bytes]) -> None:
    found = read(cached_bytes[0])
    assert found.store.tolist() == np.arange(14).reshape(7, 2).tolist()
    assert found.index.labels.tolist() == [-1, 0, 1, -1, -1, 2, -1]
    with pytest.raises(CacheDamaged, match="begins otherwise"):
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
    with pytest.raises(CacheDamaged):
        read(other)


@pytest.mark.parametrize(
    "index",
    [
        {"kept": [0, 3]},
        {"kept": [-1, 2]},
        {"kept": [1, 1]},
        {"num_frames": [3, 1]},
        {"num_frames": [3, 0]},
        {"num_frames": [2**62, 2**62]},
        {"num_frames": [1, 2]},
        {"pdf_counts": [1, 1, -1]},
        {"labels": [-1, 0, 3, -1, -1, 2, -1]},
        {"labels": [-1, 0, -1, -1, -1, 2, -1]},
        {"labels": [0, 0, 1, -1, -1, 2, -1]},
        {"labels": [-1, 0, 1, -1, -1, -2, -1]},
    ],
)
def test_indices_that_point_nowhere_are_refused(tmp_path: Path, index: dict[str, list[int]]) -> None:
    write(tmp_path / "x", **index)
    with pytest.raises(CacheDamaged, match="indices do not fit"):
        read(tmp_path / "x")


@settings(max_examples=200, deadline=None)
@given(text=st.one_of(st.binary(max_size=300), st.sampled_from([b"[" * 5000, b'{"rows": 1e999}', b"null"])))
def test_a_footer_of_anything_is_refused(tmp_path_factory: pytest.TempPathFactory, text: bytes) -> None:
    path = tmp_path_factory.mktemp("cache") / "x"
    trailer = cache_file._TRAILER.pack(len(text), cache_file.zlib.crc32(text), cache_file.END)
    path.write_bytes((cache_file.MAGIC + KEY.encode() + b"\n").ljust(cache_file.PAGE, b"\0") + text + trailer)
    with pytest.raises(CacheDamaged):
        read(path)


@pytest.mark.parametrize("kind", ["flipped", "empty", "a pipe", "a link", "a directory"])
def test_a_damaged_file_is_a_warning_and_made_anew(
    folder: Path, kind: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = everything(opened(folder, cache=None))
    opened(folder)
    (name,) = files(folder)
    path = folder / "a cache" / name
    whole = path.read_bytes()
    if kind == "flipped":
        path.write_bytes(whole[:-700] + bytes([whole[-700] ^ 4]) + whole[-699:])
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
    expected = everything(opened(folder, cache=None))
    (folder / "file").touch()
    assert same(everything(opened(folder, cache=folder / "file/cache")), expected)
    assert "cannot write" in caplog.text
    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: SimpleNamespace(f_bavail=10, f_frsize=4096))
    assert same(everything(opened(folder)), expected)
    assert "are needed, 0.0 GB are free" in caplog.text and files(folder) == []


def test_what_changes_while_it_is_read_is_not_kept(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = cached.load_into_file

    def load_and_meanwhile(*of: Any) -> list[tuple[int, int]]:
        touch(folder / "train/feats.ark")
        return load(*of)

    monkeypatch.setattr(cached, "load_into_file", load_and_meanwhile)
    assert same(everything(opened(folder)), everything(opened(folder, cache=None)))
    assert "the data changed while they were read" in caplog.text and files(folder) == []


def test_bad_features_are_an_error_and_leave_no_file(folder: Path) -> None:
    features, _ = labelled_utterances(count=24, frames=20)
    features[max(features)][3, 1] = np.inf
    write_data_dir(folder / "train", features)
    with pytest.raises(DataError, match=f"{max(features)}: inf in row 3, column 1"):
        opened(folder)
    assert files(folder) == []


def test_two_that_write_at_once_do_not_disturb_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    put, nested = cache_file._put, []

    def put_and_meanwhile(*of: Any) -> int:
        if not nested:
            nested.append(True)
            write(path)
            assert read(path).size
        return put(*of)

    monkeypatch.setattr(cache_file, "_put", put_and_meanwhile)
    write(path)
    assert nested and read(path).size and [p.name for p in tmp_path.iterdir()] == ["x"]


def test_what_a_killed_writer_left_is_removed_and_a_live_one_let_be(tmp_path: Path) -> None:
    left, live = tmp_path / ".x.1.writing", tmp_path / ".x.2.writing"
    left.touch()
    with live.open("wb") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        write(tmp_path / "x")
    assert not left.exists() and live.exists()


def test_shares_of_a_check_are_together_the_whole(cached_bytes: tuple[Path, bytes], tmp_path: Path) -> None:
    whole = bytearray(cached_bytes[1])
    whole[-700 if len(whole) > 9000 else cache_file.PAGE + 100] ^= 1
    (tmp_path / "x").write_bytes(whole)
    noticed = []
    for share in range(3):
        found = CacheFile(tmp_path / "x", KEY)
        try:
            found.check(3, 1, share, 3)
            noticed.append(False)
        except CacheDamaged:
            noticed.append(True)
        found.close()
    assert sum(noticed) == 1


def test_memory_is_asked_for_a_shard_and_less_is_said_of_the_map(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source = opened(folder)
    monkeypatch.setattr("ddnn.data.memory.available_memory", lambda: 1000)
    monkeypatch.setattr("ddnn.data.cached.available_memory", lambda: 1000)
    assert everything(source).store.shape[1] == 8
    assert "read from disk again and again" in caplog.text
    with pytest.raises(DataError, match="frames of 8 dims need"):
        source.load([0, 1, 2], Exchange())
