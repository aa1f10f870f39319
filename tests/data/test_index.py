"""The index of a data dir, shards, and what several workers load together: exactly what one worker loads."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpora import index_of, labelled_utterances, load_all, load_dataset, write_data_dir, write_pdfs
from data.mpi_index import FEATURES, FRACTION, SEED
from distributed.mpi_worlds import launch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddnn.data.dataset import splice_only
from ddnn.data.feature_reader import FeatureConfig
from ddnn.data.index import (
    UtteranceIndex,
    _check_same_tables,
    assign_shards,
    build_index,
    hold_out_fraction,
    hold_out_listed,
    local_positions,
)
from ddnn.data.loading import DataConfig
from ddnn.distributed.communicator import SingleProcess
from ddnn.kaldi.alignments import Alignments, read_alignments
from ddnn.kaldi.archive import MatrixReader, read_scp, write_matrices
from ddnn.kaldi.data_dir import accumulate_cmvn_stats, read_data_dir
from ddnn.training.normalization import estimate_normalization
from ddnn.util.errors import DataError

WORKERS = 3


def write_uneven(tmp_path: Path, count: int = 23) -> tuple[Path, Path]:
    """Utterances of 5 to 60 frames, some trimmed, one without an alignment, one without frames."""
    features, labels = labelled_utterances(count=count, frames=60)
    rng = np.random.default_rng(5)
    for name in features:
        length = int(rng.integers(5, 61))
        features[name], labels[name] = features[name][:length], labels[name][: max(1, length - int(rng.integers(0, 4)))]
    names = sorted(features)
    del labels[names[4]]
    features[names[9]], labels[names[9]] = np.zeros((0, 0), np.float32), np.zeros(0, np.int32)
    return write_data_dir(tmp_path / "train größe 1", features), write_pdfs(tmp_path / "pdfs.txt", labels)


@pytest.fixture
def planned(tmp_path: Path) -> UtteranceIndex:
    data, pdfs = write_uneven(tmp_path)
    return index_of(data, read_alignments(pdfs), 0.5)


lengths = st.lists(st.integers(1, 2000), max_size=60)


@settings(max_examples=200, deadline=None)
@given(lengths, st.integers(1, 20), st.data())
def test_shards_are_a_balanced_partition(sizes: list[int], workers: int, data: st.DataObject) -> None:
    num_frames = np.array(sizes, dtype=np.int64)
    chosen = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True)) if sizes else []
    found = assign_shards(num_frames, chosen, workers)
    assert len(found) == workers
    assert sorted(u for shard in found for u in shard) == sorted(chosen)
    assert all(shard == sorted(shard) for shard in found)
    loads = [sum(sizes[u] for u in shard) for shard in found]
    assert max(loads) - min(loads) <= max((sizes[u] for u in chosen), default=0)
    assert assign_shards(num_frames, data.draw(st.permutations(chosen)), workers) == found


def test_the_longest_goes_to_the_least_loaded_and_ties_to_the_lowest_rank() -> None:
    assert assign_shards(np.array([5, 9, 5, 1, 7]), range(5), 2) == [[1, 2], [0, 3, 4]]
    assert assign_shards(np.array([4, 4, 4]), [2, 1], 4) == [[1], [2], [], []]


def test_200_000_utterances_are_shared_out_in_seconds() -> None:
    num_frames = np.random.default_rng(1).integers(100, 2000, 200_000)
    started = time.process_time()
    found = assign_shards(num_frames, range(len(num_frames)), 32)
    assert time.process_time() - started < 5.0  # a quadratic search would take minutes
    loads = [int(num_frames[shard].sum()) for shard in found]
    assert max(loads) - min(loads) < 2000


def test_positions_in_a_shard() -> None:
    assert local_positions([3, 5, 8, 9], [9, 4, 3, 3]) == [0, 3]
    assert local_positions([], [1]) == [] == local_positions([1], [])


def test_a_plan_reads_headers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, pdfs = write_uneven(tmp_path)
    alignments = read_alignments(pdfs)
    corpus = load_all(data, alignments, max_skipped_fraction=0.5)
    with monkeypatch.context() as patched:
        patched.setattr(MatrixReader, "read", None)
        plan = index_of(data, alignments, 0.5)
    assert (plan.utterances, plan.speakers, plan.dim, plan.counts) == (
        corpus.utterances,
        corpus.speakers,
        corpus.dim,
        corpus.counts,
    )
    assert plan.counts["trimmed"] and plan.counts["empty"] and plan.counts["no_alignment"]
    np.testing.assert_array_equal(plan.num_frames, corpus.num_frames)
    assert len(plan.directory.entries) == 23


def test_a_plan_splits_as_its_corpus(planned: UtteranceIndex, tmp_path: Path) -> None:
    plan = planned
    corpus = load_dataset(plan, DataConfig(FeatureConfig(splice=1)))
    assert hold_out_fraction(plan, 0.3, seed=7) == hold_out_fraction(corpus, 0.3, seed=7)
    (tmp_path / "cv").write_text("spk2\n")
    assert hold_out_listed(plan, tmp_path / "cv", "speaker") == hold_out_listed(corpus, tmp_path / "cv", "speaker")


@pytest.mark.parametrize("features", [FeatureConfig(), FeatureConfig("mean-variance", 2)])
@pytest.mark.parametrize("cmvn", [False, True], ids=["computed", "cmvn.scp"])
def test_a_shard_holds_the_frames_that_the_whole_holds(tmp_path: Path, features: FeatureConfig, cmvn: bool) -> None:
    data, pdfs = write_uneven(tmp_path)
    if cmvn:
        rng = np.random.default_rng(2)
        stats = [(f"spk{s}", accumulate_cmvn_stats(rng.normal(s, 2.0, (50, 4)))) for s in range(4)]
        write_matrices(data / "cmvn.ark", data / "cmvn.scp", stats)
    alignments = read_alignments(pdfs)
    plan = index_of(data, alignments, 0.5)
    whole = load_all(data, alignments, features=features, max_skipped_fraction=0.5)
    for chosen in ([0], [1, 5, 6], list(range(len(plan.entries)))):
        shard = load_dataset(plan, DataConfig(replace(features, splice=2)), utterances=chosen)
        assert shard.utterances == tuple(whole.utterances[u] for u in chosen)
        assert shard.speakers == tuple(whole.speakers[u] for u in chosen)
        with_edges = torch.cat(
            [torch.arange(whole.offsets[u] - 2, whole.offsets[u] + whole.num_frames[u] + 2) for u in chosen]
        )
        assert torch.equal(shard.features, whole.features[with_edges])
        assert torch.equal(shard.labels, whole.labels[with_edges])


def test_cmvn_of_a_shard_reads_the_speakers_of_the_shard_alone(
    planned: UtteranceIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned
    seen: set[str] = set()
    read = MatrixReader.read
    monkeypatch.setattr(
        MatrixReader, "read", lambda self, entry, *more: (seen.add(entry.key), read(self, entry, *more))[1]
    )
    load_dataset(plan, DataConfig(FeatureConfig("mean")), utterances=[0])
    assert plan.speakers is not None
    speaker = plan.speakers[0]
    assert seen == {entry.key for entry in plan.directory.entries if entry.key.startswith(speaker)}


def test_a_shard_may_be_empty(planned: UtteranceIndex) -> None:
    plan = planned
    corpus = load_dataset(plan, DataConfig(FeatureConfig("mean", 1, 2)), utterances=[])
    assert corpus.features.shape == (0, 8) and corpus.dim == 8
    assert corpus.utterances == () == corpus.speakers
    assert len(corpus.rows_of([])) == 0


def test_features_cut_short_after_planning_are_an_error(planned: UtteranceIndex, tmp_path: Path) -> None:
    plan = planned
    name, frames = plan.utterances[3], int(plan.num_frames[3])
    write_matrices(tmp_path / "cut.ark", tmp_path / "cut.scp", [(name, np.ones((frames - 1, 4), np.float32))])
    entries = (*plan.entries[:3], *read_scp(tmp_path / "cut.scp"), *plan.entries[4:])
    with pytest.raises(DataError, match=f"{name}: {frames - 1} frames found, {frames} or more expected") as caught:
        load_dataset(replace(plan, entries=entries), DataConfig(FeatureConfig(splice=1)))
    assert "cut.ark" in str(caught.value)


def test_cmvn_statistics_of_other_dims_are_an_error(tmp_path: Path) -> None:
    data, _ = write_uneven(tmp_path)
    stats = [(f"spk{s}", accumulate_cmvn_stats(np.ones((9, 3)))) for s in range(4)]
    write_matrices(data / "cmvn.ark", data / "cmvn.scp", stats)
    with pytest.raises(DataError, match="CMVN statistics of 3 dims found, features of 4"):
        load_all(data, None, features=FeatureConfig("mean"), max_skipped_fraction=0.5)


def test_one_worker_plans_without_mpi(tmp_path: Path) -> None:
    data, pdfs = write_uneven(tmp_path)
    alignments = read_alignments(pdfs)
    plan = build_index(read_data_dir(data), alignments, SingleProcess(), max_skipped_fraction=0.5)
    assert plan.utterances == index_of(data, alignments, 0.5).utterances
    with pytest.raises(DataError, match="2 of 23 utterances cannot be used"):
        build_index(read_data_dir(data), alignments, SingleProcess())


def test_three_workers_load_together_what_one_loads(tmp_path: Path) -> None:
    data, pdfs = write_uneven(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    process = launch(WORKERS, Path(__file__).parent / "mpi_index.py", data, pdfs, out)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    whole = load_all(data, read_alignments(pdfs), FEATURES.splice, FEATURES, max_skipped_fraction=0.5)
    train, cv = hold_out_fraction(whole, FRACTION, SEED)
    workers = [np.load(out / f"{rank}.npz") for rank in range(WORKERS)]
    assert [int(w["headers"]) > 0 for w in workers] == [True, False, False]
    assert workers[0]["read"][0] > 0  # the first worker makes the cache file, for all
    assert [worker["read"].tolist() for worker in workers[1:]] == [[0, 0]] * (WORKERS - 1)
    assert workers[0]["read"][1] == 0
    index = {name: u for u, name in enumerate(whole.utterances)}
    seen: list[int] = []
    for worker in workers:
        assert tuple(worker["planned"]) == whole.utterances
        np.testing.assert_array_equal(worker["lengths"], whole.num_frames)
        assert list(worker["counts"]) == list(whole.counts.values())
        mine = [index[name] for name in worker["names"]]
        assert mine == sorted(mine)
        assert [whole.speakers[u] for u in mine] == list(worker["speakers"])
        rows = torch.cat(
            [
                torch.arange(
                    whole.offsets[u] - FEATURES.splice, whole.offsets[u] + whole.num_frames[u] + FEATURES.splice
                )
                for u in mine
            ]
        )
        np.testing.assert_array_equal(worker["store"], whole.features[rows].numpy())
        np.testing.assert_array_equal(worker["labels"], whole.labels[rows].numpy())
        assert worker["cached_store"].tobytes() == worker["store"].tobytes()
        np.testing.assert_array_equal(worker["cached_labels"], worker["labels"])
        assert worker["files"] == 1
        seen += mine
    assert sorted(seen) == list(range(len(whole.utterances))) == sorted(train + cv)
    expected = estimate_normalization(splice_only(whole.dim, FEATURES.splice), whole, train)
    of_one = estimate_normalization(
        splice_only(whole.dim, FEATURES.splice), whole, [index[name] for name in workers[0]["names"][:2]]
    )
    assert expected.shift is not None and expected.scale is not None and of_one.shift is not None
    for worker in workers:
        np.testing.assert_allclose(worker["shift"], expected.shift.numpy(), rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(worker["scale"], expected.scale.numpy(), rtol=1e-6)
        np.testing.assert_allclose(worker["shift_of_one"], of_one.shift.numpy(), rtol=1e-6, atol=1e-7)
        for name in ("shift", "scale", "shift_of_one"):
            assert worker[name].tobytes() == workers[0][name].tobytes()


class OtherHost(SingleProcess):
    """Worker 1 of 2, whose worker 0 said `of_first` in the first gather."""

    of_first: Any

    def all_gather_object(self, value: Any) -> list[Any]:
        return json.loads(json.dumps([self.of_first, value]))


def said_by_the_first(data: Path, alignments: Alignments) -> Any:
    """What worker 0 on n1 tells the others of its tables."""
    said: list[Any] = []

    class First(SingleProcess):
        def all_gather_object(self, value: Any) -> list[Any]:
            said.append(json.loads(json.dumps(value)))
            return [value]

    _check_same_tables(First(host="n1"), read_data_dir(data), alignments)
    return said[0]


@pytest.mark.parametrize("table", ["feats.scp", "utt2spk", "cmvn.scp", "alignments"])
def test_a_host_with_other_tables_is_named(tmp_path: Path, table: str) -> None:
    data, pdfs = write_uneven(tmp_path)
    alignments = read_alignments(pdfs)
    other = OtherHost()
    other.rank, other.world_size, other.host = 1, 2, "n2"
    other.of_first = said_by_the_first(data, alignments)
    _check_same_tables(other, read_data_dir(data), alignments)
    if table == "feats.scp":
        (data / table).write_text("".join((data / table).read_text().splitlines(keepends=True)[:-1]))
    elif table == "utt2spk":
        (data / table).write_text((data / table).read_text().replace(" spk3", " spk4"))
    elif table == "cmvn.scp":
        write_matrices(data / "cmvn.ark", data / "cmvn.scp", [("spk0", np.ones((2, 5)))])
    else:
        alignments.pdfs[max(alignments.pdfs)] = np.zeros(3, np.int32)
    with pytest.raises(DataError, match=f"{table} on host n2 .worker 1. differs from that of worker 0 on n1") as caught:
        build_index(read_data_dir(data), alignments, other, max_skipped_fraction=0.5)
    assert caught.value.location == str(pdfs if table == "alignments" else data / table)
    if table == "feats.scp":
        assert "found 22 entries" in str(caught.value) and "expected 23 entries" in str(caught.value)
