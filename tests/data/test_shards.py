"""Plans, shards, and what several workers load together: exactly what one worker loads."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpora import labelled_utterances, write_data_dir, write_pdfs
from data.mpi_shards import CONTEXT, FRACTION, PIPELINE, SEED
from hypothesis import given, settings
from hypothesis import strategies as st
from parallel.mpi_worlds import launch

from ddnn.data import memory
from ddnn.data.corpus import FeaturePipeline, load_corpus, load_planned
from ddnn.data.plan import CorpusPlan, _check_same_tables, _tables, plan_corpus, shared_plan
from ddnn.data.shards import positions, shards
from ddnn.data.split import split_by_fraction, split_by_speakers_file
from ddnn.data.transform import normalising, plain_splice
from ddnn.errors import DataError
from ddnn.kaldi.alignments import Alignments, read_alignments
from ddnn.kaldi.datadir import read_data_dir
from ddnn.kaldi.features import accumulate_cmvn_stats
from ddnn.kaldi.tables import MatrixReader, read_scp, write_matrices
from ddnn.parallel.exchange import Exchange

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
def planned(tmp_path: Path) -> tuple[CorpusPlan, Alignments]:
    data, pdfs = write_uneven(tmp_path)
    alignments = read_alignments(pdfs)
    return plan_corpus(data, alignments, max_missing=0.5), alignments


lengths = st.lists(st.integers(1, 2000), max_size=60)


@settings(max_examples=200, deadline=None)
@given(lengths, st.integers(1, 20), st.data())
def test_shards_are_a_balanced_partition(sizes: list[int], workers: int, data: st.DataObject) -> None:
    num_frames = np.array(sizes, dtype=np.int64)
    chosen = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True)) if sizes else []
    found = shards(num_frames, chosen, workers)
    assert len(found) == workers
    assert sorted(u for shard in found for u in shard) == sorted(chosen)
    assert all(shard == sorted(shard) for shard in found)
    loads = [sum(sizes[u] for u in shard) for shard in found]
    assert max(loads) - min(loads) <= max((sizes[u] for u in chosen), default=0)
    assert shards(num_frames, data.draw(st.permutations(chosen)), workers) == found


def test_the_longest_goes_to_the_least_loaded_and_ties_to_the_lowest_rank() -> None:
    assert shards(np.array([5, 9, 5, 1, 7]), range(5), 2) == [[1, 2], [0, 3, 4]]
    assert shards(np.array([4, 4, 4]), [2, 1], 4) == [[1], [2], [], []]


def test_200_000_utterances_are_shared_out_in_seconds() -> None:
    num_frames = np.random.default_rng(1).integers(100, 2000, 200_000)
    started = time.process_time()
    found = shards(num_frames, range(len(num_frames)), 32)
    assert time.process_time() - started < 5.0  # a quadratic search would take minutes
    loads = [int(num_frames[shard].sum()) for shard in found]
    assert max(loads) - min(loads) < 2000


def test_positions_in_a_shard() -> None:
    assert positions([3, 5, 8, 9], [9, 4, 3, 3]) == [0, 3]
    assert positions([], [1]) == [] == positions([1], [])


def test_a_plan_reads_headers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, pdfs = write_uneven(tmp_path)
    alignments = read_alignments(pdfs)
    corpus = load_corpus(data, alignments, context=1, pipeline=FeaturePipeline(), max_missing=0.5)
    with monkeypatch.context() as patched:
        patched.setattr(MatrixReader, "read", None)
        plan = plan_corpus(data, alignments, max_missing=0.5)
    assert (plan.utterances, plan.speakers, plan.dim, plan.counts) == (
        corpus.utterances,
        corpus.speakers,
        corpus.dim,
        corpus.counts,
    )
    assert plan.counts["trimmed"] and plan.counts["empty"] and plan.counts["no_alignment"]
    np.testing.assert_array_equal(plan.num_frames, corpus.num_frames)
    assert len(plan.directory.entries) == 23


def test_a_plan_splits_as_its_corpus(planned: tuple[CorpusPlan, Alignments], tmp_path: Path) -> None:
    plan, alignments = planned
    corpus = load_planned(plan, alignments, context=1, pipeline=FeaturePipeline())
    assert split_by_fraction(plan, 0.3, seed=7) == split_by_fraction(corpus, 0.3, seed=7)
    (tmp_path / "cv").write_text("spk2\n")
    assert split_by_speakers_file(plan, tmp_path / "cv") == split_by_speakers_file(corpus, tmp_path / "cv")


@pytest.mark.parametrize("pipeline", [FeaturePipeline(), FeaturePipeline("mean-variance", 2)])
@pytest.mark.parametrize("cmvn", [False, True], ids=["computed", "cmvn.scp"])
def test_a_shard_holds_the_frames_that_the_whole_holds(tmp_path: Path, pipeline: FeaturePipeline, cmvn: bool) -> None:
    data, pdfs = write_uneven(tmp_path)
    if cmvn:
        rng = np.random.default_rng(2)
        stats = [(f"spk{s}", accumulate_cmvn_stats(rng.normal(s, 2.0, (50, 4)))) for s in range(4)]
        write_matrices(data / "cmvn.ark", data / "cmvn.scp", stats)
    alignments = read_alignments(pdfs)
    plan = plan_corpus(data, alignments, max_missing=0.5)
    whole = load_corpus(data, alignments, context=2, pipeline=pipeline, max_missing=0.5)
    for chosen in ([0], [1, 5, 6], list(range(len(plan.entries)))):
        shard = load_planned(plan, alignments, utterances=chosen, context=2, pipeline=pipeline)
        assert shard.utterances == tuple(whole.utterances[u] for u in chosen)
        assert shard.speakers == tuple(whole.speakers[u] for u in chosen)
        with_edges = torch.cat(
            [torch.arange(whole.first_row[u] - 2, whole.first_row[u] + whole.num_frames[u] + 2) for u in chosen]
        )
        assert torch.equal(shard.store, whole.store[with_edges])
        assert torch.equal(shard.labels, whole.labels[with_edges])


def test_cmvn_of_a_shard_reads_the_speakers_of_the_shard_alone(
    planned: tuple[CorpusPlan, Alignments], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, alignments = planned
    seen: set[str] = set()
    read = MatrixReader.read
    monkeypatch.setattr(
        MatrixReader, "read", lambda self, entry, *more: (seen.add(entry.key), read(self, entry, *more))[1]
    )
    load_planned(plan, alignments, utterances=[0], context=1, pipeline=FeaturePipeline("mean"))
    assert plan.speakers is not None
    speaker = plan.speakers[0]
    assert seen == {entry.key for entry in plan.directory.entries if entry.key.startswith(speaker)}


def test_a_shard_may_be_empty(planned: tuple[CorpusPlan, Alignments]) -> None:
    plan, alignments = planned
    corpus = load_planned(plan, alignments, utterances=[], context=2, pipeline=FeaturePipeline("mean", 1))
    assert corpus.store.shape == (0, 8) and corpus.dim == 8
    assert corpus.utterances == () == corpus.speakers
    assert len(corpus.rows_of([])) == 0


def test_memory_of_all_workers_on_the_machine_is_asked_for(
    planned: tuple[CorpusPlan, Alignments], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, alignments = planned
    frames = int(plan.num_frames[:2].sum())
    one = (frames + 2 * 2 * 2) * (4 * 4 + 4)
    monkeypatch.setattr(memory, "available_memory", lambda: 3 * one)
    options: dict[str, Any] = {"utterances": [0, 1], "context": 2, "pipeline": FeaturePipeline()}
    load_planned(plan, alignments, workers_on_host=3, **options)
    with pytest.raises(
        DataError, match=f"4 workers on this machine with {frames} frames of 4 dims each need"
    ) as caught:
        load_planned(plan, alignments, workers_on_host=4, **options)
    assert "over more machines" in str(caught.value)


def test_features_cut_short_after_planning_are_an_error(planned: tuple[CorpusPlan, Alignments], tmp_path: Path) -> None:
    plan, alignments = planned
    name, frames = plan.utterances[3], int(plan.num_frames[3])
    write_matrices(tmp_path / "cut.ark", tmp_path / "cut.scp", [(name, np.ones((frames - 1, 4), np.float32))])
    entries = (*plan.entries[:3], *read_scp(tmp_path / "cut.scp"), *plan.entries[4:])
    with pytest.raises(DataError, match=f"{name}: {frames - 1} frames found, {frames} or more expected") as caught:
        load_planned(replace(plan, entries=entries), alignments, context=1, pipeline=FeaturePipeline())
    assert "cut.ark" in str(caught.value)


def test_cmvn_statistics_of_other_dims_are_an_error(tmp_path: Path) -> None:
    data, _ = write_uneven(tmp_path)
    stats = [(f"spk{s}", accumulate_cmvn_stats(np.ones((9, 3)))) for s in range(4)]
    write_matrices(data / "cmvn.ark", data / "cmvn.scp", stats)
    with pytest.raises(DataError, match="CMVN statistics of 3 dims found, features of 4"):
        load_corpus(data, None, context=1, pipeline=FeaturePipeline("mean"), max_missing=0.5)


def test_one_worker_plans_without_mpi(tmp_path: Path) -> None:
    data, pdfs = write_uneven(tmp_path)
    alignments = read_alignments(pdfs)
    plan = shared_plan(Exchange(), data, alignments, max_missing=0.5)
    assert plan.utterances == plan_corpus(data, alignments, max_missing=0.5).utterances
    with pytest.raises(DataError, match="2 of 23 utterances cannot be used"):
        shared_plan(Exchange(), data, alignments)


def test_three_workers_load_together_what_one_loads(tmp_path: Path) -> None:
    data, pdfs = write_uneven(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    process = launch(WORKERS, Path(__file__).parent / "mpi_shards.py", data, pdfs, out)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    whole = load_corpus(data, read_alignments(pdfs), context=CONTEXT, pipeline=PIPELINE, max_missing=0.5)
    train, cv = split_by_fraction(whole, FRACTION, SEED)
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
                torch.arange(whole.first_row[u] - CONTEXT, whole.first_row[u] + whole.num_frames[u] + CONTEXT)
                for u in mine
            ]
        )
        np.testing.assert_array_equal(worker["store"], whole.store[rows].numpy())
        np.testing.assert_array_equal(worker["labels"], whole.labels[rows].numpy())
        assert worker["cached_store"].tobytes() == worker["store"].tobytes()
        np.testing.assert_array_equal(worker["cached_labels"], worker["labels"])
        assert worker["files"] == 1
        seen += mine
    assert sorted(seen) == list(range(len(whole.utterances))) == sorted(train + cv)
    expected = normalising(plain_splice(whole.dim, CONTEXT), whole, train)
    of_one = normalising(plain_splice(whole.dim, CONTEXT), whole, [index[name] for name in workers[0]["names"][:2]])
    assert expected.shift is not None and expected.scale is not None and of_one.shift is not None
    for worker in workers:
        np.testing.assert_allclose(worker["shift"], expected.shift.numpy(), rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(worker["scale"], expected.scale.numpy(), rtol=1e-6)
        np.testing.assert_allclose(worker["shift_of_one"], of_one.shift.numpy(), rtol=1e-6, atol=1e-7)
        for name in ("shift", "scale", "shift_of_one"):
            assert worker[name].tobytes() == workers[0][name].tobytes()


class OtherHost(Exchange):
    """Worker 1 of 2, whose worker 0 said `of_first` in the first gather."""

    of_first: Any

    def gather(self, value: Any) -> list[Any]:
        return json.loads(json.dumps([self.of_first, value]))


@pytest.mark.parametrize("table", ["feats.scp", "utt2spk", "cmvn.scp", "alignments"])
def test_a_host_with_other_tables_is_named(tmp_path: Path, table: str) -> None:
    data, pdfs = write_uneven(tmp_path)
    alignments = read_alignments(pdfs)
    other = OtherHost(rank=1, size=2, host="n2")
    other.of_first = {"host": "n1", "tables": _tables(read_data_dir(data), alignments)}
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
        shared_plan(other, data, alignments, max_missing=0.5)
    assert caught.value.where == str(pdfs if table == "alignments" else data / table)
    if table == "feats.scp":
        assert "found 22 entries" in str(caught.value) and "expected 23 entries" in str(caught.value)
