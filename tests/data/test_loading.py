"""Loading by several processes: the same bits, the same errors, nothing left behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpora import labelled_utterances, load_all, write_data_dir, write_transforms
from distributed.mpi_worlds import all_gone
from hypothesis import given, settings
from hypothesis import strategies as st

from ddnn.data import feature_reader, loading
from ddnn.data.dataset import AcousticDataset
from ddnn.data.feature_reader import FeatureConfig, FeatureSpec, Utterance, make_chunks, store_chunk, with_own_reader
from ddnn.data.loading import default_processes, effective_processes, sum_over_workers
from ddnn.kaldi.archive import ScpEntry, write_matrices
from ddnn.kaldi.transforms import read_transform_config
from ddnn.util.errors import DataError
from ddnn.util.pool import worker_pool

SPEC = FeatureSpec(FeatureConfig(splice=2), 4)


@pytest.fixture(autouse=True)
def processes_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "BYTES_PER_PROCESS", 1)
    monkeypatch.setattr(feature_reader, "CHUNK_BYTES", 2000)


def load(data: Path, processes: int, **options: Any) -> AcousticDataset:
    given = {"features": FeatureConfig("mean-variance", 1), **options}
    return load_all(data, None, loader_processes=processes, **given)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_bits_are_those_of_one_process(tmp_path: Path, dtype: str) -> None:
    config = FeatureConfig("mean-variance", 1, dtype=dtype)
    data = write_data_dir(tmp_path / "train größe 1", labelled_utterances()[0])
    lines = (data / "feats.scp").read_text().splitlines()
    lines[3:5] = [f"{lines[3]}[2:30]", f"{lines[4]}[0:9,0:3]"]
    (data / "feats.scp").write_text("\n".join(lines) + "\n")
    seen: list[str] = []

    def progress(entries: Sequence[ScpEntry]) -> Iterable[ScpEntry]:
        for entry in entries:
            seen.append(entry.key)
            yield entry

    one, two = load(data, 1, features=config), load(data, 2, features=config, progress=progress)
    assert two.features.dtype == getattr(torch, dtype)
    assert two.features.numpy().tobytes() == one.features.numpy().tobytes()
    assert torch.equal(two.labels, one.labels) and np.array_equal(two.offsets, one.offsets)
    assert seen == list(two.utterances)


@pytest.mark.parametrize("rows", [5, 0])
def test_transformed_bits_are_those_of_one_process(tmp_path: Path, rows: int) -> None:
    data = write_data_dir(tmp_path / "train", labelled_utterances()[0])
    path = write_transforms(tmp_path / "tri4", rows=rows)
    config = FeatureConfig("mean", transforms=read_transform_config(path))
    one, two = (load(data, processes, features=config, transforms=path) for processes in (1, 2))
    assert one.dim == (rows or 12) and two.features.numpy().tobytes() == one.features.numpy().tobytes()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=50))
def test_float16_rounds_as_torch(values: list[float]) -> None:
    single = np.array(values, np.float32)
    half = np.empty(len(single), np.float16)
    with np.errstate(over="ignore"):
        half[:] = single
    assert half.tobytes() == torch.from_numpy(single).half().numpy().tobytes()


@pytest.mark.parametrize("processes", [1, 2])
def test_the_first_bad_utterance_is_the_one_named(tmp_path: Path, processes: int) -> None:
    features, _ = labelled_utterances()
    names = sorted(features)
    features[names[5]][7, 2] = np.nan
    features[names[8]] = features[names[8]][:, :3].copy()
    data = write_data_dir(tmp_path / "train", features)
    with pytest.raises(DataError, match=f"{names[5]}: nan in row 7, column 2") as caught:
        load(data, processes, features=FeatureConfig())
    assert "feats.ark" in str(caught.value.location) and caught.value.hint is not None


def test_too_large_for_float16(tmp_path: Path) -> None:
    features, _ = labelled_utterances(count=4)
    features[min(features)][0, 0] = 1e6
    data = write_data_dir(tmp_path / "train", features)
    for processes in (1, 2):
        with pytest.raises(DataError, match=r"values up to 1e\+06 after .* data\.feature_dtype float16 cannot hold"):
            load(data, processes, features=FeatureConfig(dtype="float16"))


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def descriptors() -> int:
    gc.collect()  # what earlier tests have left
    return len(list(Path("/proc/self/fd").iterdir()))


def test_an_interrupt_leaves_nothing_behind(tmp_path: Path) -> None:
    data = write_data_dir(tmp_path / "train", labelled_utterances()[0])
    started: list[int] = []
    others = children()  # of earlier tests

    def interrupted(entries: Sequence[ScpEntry]) -> Iterable[ScpEntry]:
        yield entries[0]
        started.extend(child for child in children() if child not in others)
        raise KeyboardInterrupt

    before = descriptors()
    with pytest.raises(KeyboardInterrupt):
        load(data, 2, progress=interrupted)
    assert len(started) >= 2 and all_gone(started, 60)
    assert descriptors() == before


def test_a_loading_process_needs_no_torch() -> None:
    code = "import sys, ddnn.data.feature_reader, ddnn.util.pool; print({'torch', 'mpi4py', 'pydantic'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_a_full_disk_comes_back_as_an_os_error(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    write_matrices(tmp_path / "a.ark", tmp_path / "a.scp", [("a", np.ones((3, 4), np.float32))])
    from ddnn.kaldi.archive import read_scp

    (stored,) = read_scp(tmp_path / "a.scp")
    (chunk,) = make_chunks([Utterance(stored, 3, None, None)], SPEC)
    descriptor = os.open("/dev/full", os.O_RDWR)
    try:
        with pytest.raises(OSError, match="No space left"), worker_pool(1, "", "", descriptor) as pool:
            list(pool.run([(with_own_reader, store_chunk, descriptor, 0, chunk, SPEC)]))
    finally:
        os.close(descriptor)


def test_how_many_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    an4 = 4 * 40 * 253_682
    assert effective_processes(8, an4) == 1
    assert effective_processes(8, 17_000_000_000) == 8
    assert effective_processes(2, 17_000_000_000) == 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    assert [default_processes(n) for n in (1, 3, 8, 100)] == [8, 2, 1, 1]


def entry(key: str, path: str, offset: int | None) -> ScpEntry:
    return ScpEntry(key, Path(path), offset, (0, 1), None, None, Path("feats.scp"))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 4)), max_size=60), st.integers(0, 6))
def test_chunks_are_all_utterances_in_order(utterances: list[tuple[int, int]], context: int) -> None:
    spec = FeatureSpec(FeatureConfig(splice=context), 4)
    entries = [entry(f"u{n}", "a.ark", 18 * place) for n, (_, place) in enumerate(utterances)]
    frames = np.array([length for length, _ in utterances], np.int64)
    listed = [Utterance(e, n, None, None) for e, n in zip(entries, frames.tolist(), strict=True)]
    found = list(make_chunks(listed, spec))
    assert [utterance for chunk in found for utterance in chunk] == listed
    for chunk, following in pairwise(found):  # segments of one recording are not torn apart
        assert chunk[-1].entry.offset != following[0].entry.offset
        assert 16 * sum(u.num_frames + 2 * context for u in chunk) >= feature_reader.CHUNK_BYTES


def test_statistics_that_no_process_shares_are_summed_without_a_change(tmp_path: Path) -> None:
    from ddnn.distributed.communicator import SingleProcess

    mine = {"b": np.random.default_rng(0).normal(size=(2, 5)) ** 9}
    mine["b"][0, 4] = 3.0
    found = sum_over_workers(["a", "b"], mine, 4, SingleProcess())
    assert set(found) == {"b"} and found["b"].tobytes() == mine["b"].tobytes()
