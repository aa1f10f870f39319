"""What recorded runs would have taken on clusters, against a calculation by hand."""

from __future__ import annotations

import math

import pytest
from reproduce.synthetic import epoch, record

from ddnn.averaging.strategies import OneBit
from ddnn.reproduce.clusters import CLUSTERS, costs, simulated_seconds
from ddnn.reproduce.entries import TableEntry
from ddnn.reproduce.runs import RunRecord
from ddnn.reproduce.tables import Condition

NETWORK, PARAMETERS = "440-6x2048-8806", 39_928_422
MINIBATCH = {
    "K20, FDR InfiniBand": 32.2e-3,
    "H200, NVLink": 0.454e-3,
}  # of one worker, 256 frames: docs/explanation/model-parallel.md


def run(workers: int) -> RunRecord:
    """Ten epochs of 230,000 frames in minibatches of 256; 45 averagings an epoch on 2 workers."""
    return record("base", workers, 1, 0.6, measured=epoch(workers, 10.0))


@pytest.mark.parametrize("cluster", MINIBATCH)
def test_one_worker_takes_its_minibatches(cluster: str) -> None:
    expected = 10 * 230_000 / 256 * MINIBATCH[cluster]
    assert simulated_seconds(run(1), cluster, NETWORK) == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("cluster", MINIBATCH)
def test_two_workers_share_them_and_send_a_model_at_each_averaging(cluster: str) -> None:
    """An all-reduce of two: two messages, one model; at the end of an epoch, too."""
    machine, bandwidth = CLUSTERS[cluster]
    message = 2 * machine.latency + 4 * PARAMETERS / bandwidth
    expected = 10 * (230_000 / (2 * 256) * MINIBATCH[cluster] + (45 + 1) * message)
    assert simulated_seconds(run(2), cluster, NETWORK) == pytest.approx(expected, rel=5e-3)


def test_rare_averagings_send_less() -> None:
    base = run(2)
    assert base.time is not None
    rare = base.model_copy(update={"time": base.time.model_copy(update={"averagings": 10})})
    machine, bandwidth = CLUSTERS["K20, FDR InfiniBand"]
    saved = (450 - 10) * (2 * machine.latency + 4 * PARAMETERS / bandwidth)
    seconds = [simulated_seconds(one, "K20, FDR InfiniBand", NETWORK) for one in (base, rare)]
    assert seconds[0] - seconds[1] == pytest.approx(saved, rel=5e-3)


def test_averaging_once_an_epoch_sends_the_mean_that_ends_it_alone() -> None:
    base = run(2)
    assert base.time is not None
    once = base.model_copy(update={"time": base.time.model_copy(update={"averagings": 0})})
    machine, bandwidth = CLUSTERS["K20, FDR InfiniBand"]
    message = 2 * machine.latency + 4 * PARAMETERS / bandwidth
    expected = 10 * (230_000 / (2 * 256) * MINIBATCH["K20, FDR InfiniBand"] + message)
    assert simulated_seconds(once, "K20, FDR InfiniBand", NETWORK) == pytest.approx(expected, rel=2e-3)


def test_ng_sgd_costs_its_fisher_matrices_and_muon_has_no_formula() -> None:
    sgd, ng_sgd, muon = (
        run(1).model_copy(update={"optimizer": f"momentum 0.0, l2 0.0, name {name}"})
        for name in ("sgd", "ng-sgd, rank_in 20, rank_out 80, alpha 4.0", "muon")
    )
    plain, natural, unknown = (simulated_seconds(one, "H200, NVLink", NETWORK) for one in (sgd, ng_sgd, muon))
    assert plain == pytest.approx(simulated_seconds(run(1), "H200, NVLink", NETWORK))
    assert natural / plain == pytest.approx(1.26, abs=0.01)
    assert math.isnan(unknown)


def test_encoding_takes_the_time_of_its_passes_over_memory() -> None:
    base = run(2)
    assert base.measured is not None
    one_bit = base.model_copy(update={"measured": base.measured.model_copy(update={"strategy": "1-bit"})})
    machine, bandwidth = CLUSTERS["H200, NVLink"]
    coding = OneBit.traffic(2).coding_bytes * PARAMETERS / machine.memory_bandwidth
    saved = (4 - 1 / 8) * PARAMETERS / bandwidth
    seconds = [simulated_seconds(one, "H200, NVLink", NETWORK) for one in (base, one_bit)]
    assert seconds[1] - seconds[0] == pytest.approx(450 * (coding - saved), rel=5e-3)


def test_the_costs_of_an_entry_are_means_over_its_runs() -> None:
    second = record("base", 2, 2, 0.5, measured=epoch(2, 10.0))
    entry = TableEntry(Condition(name="base", label="all-reduce"), 2, (run(2), second))
    without = TableEntry(Condition(name="other", label="other"), 2, (record("other", 2, 1, 0.5),))
    (cost,) = costs([entry, without], "test frame accuracy", NETWORK)
    assert cost.entry is entry and cost.accuracy == pytest.approx(55.0) and cost.averagings == 450
    assert cost.gigabytes == pytest.approx(1e-9 * (450 + 10) * 4 * PARAMETERS), "an all-reduce of two sends one model"
    assert list(cost.seconds) == list(CLUSTERS)
