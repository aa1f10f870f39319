"""How long recorded runs would have taken with another network on clusters, by the formulas of docs/explanation/scaling-model.md: no
worker waits for a slower one, and the RBMs are not counted."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean

from ddnn.averaging.strategies import STRATEGIES, AllReduce
from ddnn.distributed.cost import Layout, Machine, Size, minibatch_seconds
from ddnn.report.measured import with_network
from ddnn.report.scaling import Constants, averages_parameters, epoch_seconds
from ddnn.reproduce.entries import TableEntry
from ddnn.reproduce.runs import RunRecord

CLUSTERS = {
    "CPU cores": (Machine(140e9, 5e-6, 8e9, 15e-6, 1 / 2.4e9), 1.9e9),
    "H200, NVLink": (Machine(500e12, 4e-6, 4e12, 12e-6, 1 / 200e9, activation_bytes=2), 300e9),
    "K20, FDR InfiniBand": (Machine(2.2e12, 15e-6, 150e9, 40e-6, 1 / 2.0e9), 0.69e9),
    "K20, 10 Gb/s Ethernet": (Machine(2.2e12, 15e-6, 150e9, 80e-6, 1 / 0.8e9), 0.6e9),
}
"""Assumed constants of a worker, and bytes per second of an averaging: docs/explanation/model-parallel.md, What it costs."""


@dataclass(frozen=True)
class Cost:
    """What a training of an entry costs with another network: means over its runs."""

    entry: TableEntry
    accuracy: float  # in percent
    averagings: float
    gigabytes: float  # 10^9 bytes that a worker sends
    seconds: dict[str, float]  # by the names of `CLUSTERS`; NaN where the optimizer's own work has no formula


def simulated_seconds(run: RunRecord, cluster: str, network: str) -> float:
    """Of all epochs. `network`: dims, as 440-6x2048-8806. The run has `measured` and `time`."""
    assert run.measured is not None and run.time is not None
    ranks = _fisher_ranks(run.optimizer)
    if ranks is None:
        return math.nan
    machine, bandwidth = CLUSTERS[cluster]
    epoch = run.measured.to_measurement(run.workers)
    job = with_network(replace(epoch.job, layers=(Size(0, 0, *ranks),)), network)
    # As often as the run averaged, whatever its period counts; hardly ever where only the mean that ends an epoch did.
    minibatches = run.epochs * job.frames / (run.workers * job.minibatch)
    job = replace(job, averaging_period=max(1, round(minibatches / max(run.time.averagings, 1e-3))))
    minibatch = minibatch_seconds(machine, job.layers, job.minibatch, Layout())
    traffic = STRATEGIES[epoch.scheme.strategy].traffic(run.workers)
    constants = Constants(
        job=job,
        minibatch_seconds=minibatch,
        contention_seconds=0.0,
        serial_seconds=0.0,
        averaging_seconds=traffic.coding_bytes * job.parameters / machine.memory_bandwidth,
        block_std=0.0,
        latency=machine.latency,
        byte_seconds=1.0 / bandwidth,
        final_mean=epoch.final_mean,
    )
    return run.epochs * epoch_seconds(constants, epoch.scheme, run.workers)


def _fisher_ranks(optimizer: str) -> tuple[int, int] | None:
    """Of NG-SGD, from `RunRecord.optimizer`; of SGD and Adam 0. None where a step takes more than these model: Muon, Shampoo."""
    ng_sgd = re.search(r"name ng-sgd, rank_in (\d+), rank_out (\d+)", optimizer)
    if ng_sgd:
        return int(ng_sgd[1]), int(ng_sgd[2])
    return None if re.search("name (muon|shampoo)", optimizer) else (0, 0)


def costs(entries: Iterable[TableEntry], metric: str | None, network: str) -> list[Cost]:
    """Of the entries with a figure of `metric` and times; none without a network."""
    result = []
    for entry in entries:
        runs = [run for run in entry.valid if run.measured and run.time and metric in run.percentages]
        if network and metric and runs:
            seconds = {name: fmean(simulated_seconds(run, name, network) for run in runs) for name in CLUSTERS}
            accuracy = fmean(run.percentages[metric] for run in runs)
            averagings = fmean(run.time.averagings for run in runs if run.time)
            result.append(Cost(entry, accuracy, averagings, fmean(_gigabytes(run, network) for run in runs), seconds))
    return result


def _gigabytes(run: RunRecord, network: str) -> float:
    """By the formulas of the strategies, for as many averagings as there were, and the means that end the epochs."""
    assert run.measured is not None and run.time is not None
    epoch = run.measured.to_measurement(run.workers)
    parameters = with_network(epoch.job, network).parameters
    averaging = STRATEGIES[epoch.scheme.strategy].traffic(run.workers).num_bytes(parameters, epoch.scheme.comm_dtype)
    mean = AllReduce.traffic(run.workers).num_bytes(parameters, "float32")
    means = run.epochs if epoch.final_mean and averages_parameters(epoch.scheme.strategy) else 0
    return 1e-9 * (run.time.averagings * averaging + means * mean)
