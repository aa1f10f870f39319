"""The training loop against a float64 twin: one worker, and three workers (threads of this process) of unlike shards, over
epochs of which one is rejected."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from distributed.threads import run_workers
from torch import Tensor
from training.toy import MINIBATCH, PDFS, toy_model, toy_shard, toy_trainer, train_to_end
from twins import quantized, twin_loss
from variants import make_optimizer_config, make_parallel_config

from ddnn.averaging import averager, parameter_server
from ddnn.data.batches import Batch, ShuffledSampler
from ddnn.data.dataset import FrameSubset
from ddnn.distributed.communicator import Communicator
from ddnn.nn.network import Network
from ddnn.nn.objective import Sums
from ddnn.optim.schedule import MinibatchSizes, Schedule
from ddnn.recipe.schema import Recipe
from ddnn.training.loop import warm_up
from ddnn.training.options import minibatch_sizes

UNLIKE, ALIKE = (7, 30, 53), (6, 6, 6)
"""Minibatches of each worker."""
CV_FRAMES = (7, 30, 53)
RATES, ACCEPTED = (0.02, 0.02, 0.02, 0.01), (True, True, False, True)
MOMENTUM, L2 = 0.6, 1e-3


class Scripted(Schedule):
    """The rates and decisions of the script, whatever the losses. Keeps the parameters of each epoch."""

    def __init__(self, network: Network) -> None:
        super().__init__(RATES[0], len(RATES))
        self.network, self.models = network, list[Tensor]()

    def step(self, figures: Mapping[str, float]) -> bool:
        self.models.append(self.network.parameters.clone())
        self.epoch += 1
        self.finished = self.epoch == self.max_epochs
        self.learning_rate = RATES[self.epoch % len(RATES)]
        return ACCEPTED[self.epoch - 1]


@dataclass
class Twin:
    """Workers as vectors of float64, averaged as the formulas say.

    Attributes:
        scale: what the rates are multiplied by.
        local_momentum: what an averaging does to the workers' own.
        overlap: what an averaging has changed is added an interval later.
        eta, zeta, nesterov: of BMUF; `block_start` is S and `block_momentum` D. With 1-bit averaging `block_start` is R.
    """

    minibatches: Sequence[int]
    strategy: str = "all-reduce"
    period: int = 3
    scale: float = 3.0
    local_momentum: str = "keep"
    overlap: bool = False
    update_scale: float = 1.0  # of async, whose server is `block_start`; all workers push once, at the end of an epoch
    beta: float = 0.0  # of elastic averaging, whose center is `block_start`
    eta: float = 0.0
    zeta: float = 1.0
    nesterov: bool = False
    averagings: int = 0
    models: list[Tensor] = field(default_factory=list)
    training_losses: list[float] = field(default_factory=list)
    cv_losses: list[float] = field(default_factory=list)
    distances: list[list[float]] = field(default_factory=list)
    """Of each epoch, of each worker: the mean of its distances from the mean model, relative to its own."""

    def __post_init__(self) -> None:
        self.network, self.n = toy_model().network, len(self.minibatches)
        start = self.network.parameters.double()
        self.best, self.block_start, self.block_model = start.clone(), start.clone(), start.clone()
        self.block_momentum = torch.zeros_like(start)
        self.theta = [start.clone() for _ in range(self.n)]
        self.velocity = [torch.zeros_like(start) for _ in range(self.n)]
        self.pending = [torch.zeros_like(start) for _ in range(self.n)]
        self.forget_residuals()
        self.trained = list(self.minibatches)
        if self.strategy == "gradient-all-reduce":
            self.trained = [min(self.minibatches)] * self.n
        pieces = [torch.full(v.shape, float(k == "weight")) for views in self.network.views for k, v in views.items()]
        self.decayed = torch.cat([piece.flatten() for piece in pieces]).double()
        self.coefs = torch.ones_like(start)
        self.coefs[-PDFS:] = 0.1  # of the output layer's biases
        self.shards = [toy_shard(rank, count * MINIBATCH) for rank, count in enumerate(self.minibatches)]

    def loss(self, parameters: Tensor, frames: FrameSubset, rows: Tensor) -> tuple[float, Tensor]:
        x, labels = frames.dataset.features[rows], frames.dataset.labels[rows].long()
        _, loss, gradient = twin_loss(self.network, parameters, x, labels)
        return float(loss), gradient

    def minibatch(self, rows: dict[int, Tensor], rate: float) -> float:
        """One of each worker that has rows; the sum of their losses."""
        made = {rank: self.loss(self.theta[rank], self.shards[rank], chosen) for rank, chosen in rows.items()}
        gradients = {rank: gradient for rank, (_, gradient) in made.items()}
        if self.strategy == "gradient-all-reduce":
            gradients = dict.fromkeys(rows, sum(gradients.values()) / self.n)
        for rank, gradient in gradients.items():
            self.velocity[rank] = MOMENTUM * self.velocity[rank] + self.coefs * gradient
            decay = 1 - rate * L2 * MINIBATCH * self.decayed
            self.theta[rank] = self.theta[rank] * decay - rate * self.velocity[rank]
        return sum(loss for loss, _ in made.values())

    def forget_residuals(self) -> None:
        self.residuals = [torch.zeros_like(self.block_start) for _ in range(self.n)]
        self.residual_of_sum = torch.zeros_like(self.block_start)

    def one_bit(self, vectors: list[Tensor]) -> list[Tensor]:
        total = self.residual_of_sum
        for rank, vector in enumerate(vectors):
            contribution = (vector - self.block_start) / self.n + self.residuals[rank]
            sent = quantized(contribution, self.network.shapes)
            self.residuals[rank], total = contribution - sent, total + sent
        sent = quantized(total, self.network.shapes)
        self.residual_of_sum, self.block_start = total - sent, self.block_start + sent
        return [self.block_start.clone() for _ in vectors]

    def mixed(self, vectors: list[Tensor], index: int) -> list[Tensor]:
        n = self.n
        if self.strategy == "1-bit":
            return self.one_bit(vectors)
        if self.strategy == "all-reduce":
            return [sum(vectors) / n for _ in vectors]
        hop = {"butterfly": 2 ** (index % 2), "ring": 1, "hopping-ring": 1 + index % 2}[self.strategy]  # of 3 workers
        return [(vectors[rank] + vectors[(rank - hop) % n]) / 2 for rank in range(n)]

    def block(self, weights: Sequence[int]) -> None:
        total = sum(weights)
        mean = sum(weight * theta for weight, theta in zip(weights, self.theta, strict=True)) / total
        self.block_momentum = self.eta * self.block_momentum + self.zeta * (mean - self.block_start)
        self.block_model = self.block_model + self.block_momentum
        ahead = self.eta * self.block_momentum if self.nesterov else 0.0
        self.block_start = self.block_model + ahead
        self.theta = [self.block_start.clone() for _ in range(self.n)]

    def elastic(self) -> None:
        differences = [theta - self.block_start for theta in self.theta]
        self.theta = [theta - self.beta / self.n * d for theta, d in zip(self.theta, differences, strict=True)]
        self.block_start = self.block_model = self.block_start + self.beta * sum(differences) / self.n

    def average(self) -> None:
        self.apply_pending()
        center = sum(self.theta) / self.n
        self.of_epoch.append([float((theta - center).norm() / theta.norm()) for theta in self.theta])
        if self.strategy == "bmuf":
            self.block([1] * self.n)
        elif self.strategy == "elastic":
            self.elastic()
        elif self.overlap:
            mixed = self.mixed(self.theta, self.averagings)
            self.pending = [after - before for after, before in zip(mixed, self.theta, strict=True)]
        else:
            self.theta = self.mixed(self.theta, self.averagings)
        if self.local_momentum == "average":
            self.velocity = self.mixed(self.velocity, self.averagings)
        if self.local_momentum == "reset":
            self.velocity = [torch.zeros_like(one) for one in self.velocity]
        self.averagings += 1

    def apply_pending(self) -> None:
        self.theta = [theta + change for theta, change in zip(self.theta, self.pending, strict=True)]
        self.pending = [torch.zeros_like(theta) for theta in self.theta]

    def end_epoch(self) -> Tensor:
        self.apply_pending()
        if self.strategy in ("bmuf", "elastic"):
            if any(count != self.blocks * self.period for count in self.minibatches):
                self.block(self.minibatches) if self.strategy == "bmuf" else self.elastic()
                self.averagings += 1
            return self.block_model
        if self.strategy == "async":
            changes = sum(theta - self.block_start for theta in self.theta)
            self.block_start = self.block_start + self.update_scale * changes
            return self.block_start
        weighted = sum(count * theta for count, theta in zip(self.trained, self.theta, strict=True))
        self.block_start = weighted / sum(self.trained) + sum(self.residuals) + self.residual_of_sum
        self.forget_residuals()
        return self.block_start

    def epoch(self, number: int, rate: float, accepted: bool) -> None:
        self.blocks = min(self.minibatches) // self.period if self.n > 1 else 0
        if self.strategy == "gradient-all-reduce":
            self.blocks = 0
        self.of_epoch = list[list[float]]()
        self.velocity = [torch.zeros_like(one) for one in self.velocity]
        if self.strategy in ("bmuf", "elastic"):
            self.theta = [self.block_start.clone() for _ in range(self.n)]
        orders = [list(ShuffledSampler(s, MINIBATCH, seed=1, rank=r).epoch(number)) for r, s in enumerate(self.shards)]
        loss = 0.0
        for done in range(max(self.trained)):
            rows = {rank: orders[rank][done] for rank in range(self.n) if done < self.trained[rank]}
            loss += self.minibatch(rows, self.scale * rate)
            if (done + 1) % self.period == 0 and (done + 1) // self.period <= self.blocks:
                self.average()
        model = self.end_epoch()
        self.models.append(model)
        self.distances.append([sum(of_worker) / len(of_worker) for of_worker in zip(*self.of_epoch, strict=True)])
        self.training_losses.append(loss / MINIBATCH / sum(self.trained))
        held_out = [toy_shard(50 + rank, CV_FRAMES[rank]) for rank in range(self.n)]
        sums = [self.loss(model, frames, frames.indices)[0] for frames in held_out]
        self.cv_losses.append(sum(sums) / sum(CV_FRAMES[: self.n]))
        if accepted:
            self.best = model
        else:
            self.block_start, self.block_model = self.best, self.best
            self.block_momentum = torch.zeros_like(self.best)
        self.theta = [self.best.clone() for _ in range(self.n)]


BMUF = {"strategy": "bmuf", "averaging_period": 3}
ELASTIC = {"strategy": "elastic", "averaging_period": 3}
ONCE, NEVER = {"averaging_frames": "epoch", "averaging_period": 3}, 10**9
"""Requests are exchanged twice an epoch; no interval is ever complete."""
TWIN_BMUF = {"strategy": "bmuf", "scale": 1.0, "local_momentum": "reset", "eta": 2 / 3}
CASES: dict[str, tuple[dict[str, Any], Callable[[], Twin]]] = {
    "one worker": ({}, partial(Twin, (12,), scale=1.0)),
    "all-reduce": ({"averaging_period": 3}, partial(Twin, UNLIKE)),
    "plain rate": ({"averaging_period": 3, "scale_learning_rate": False}, partial(Twin, UNLIKE, scale=1.0)),
    "reset": ({"averaging_period": 3, "local_momentum": "reset"}, partial(Twin, UNLIKE, local_momentum="reset")),
    **{
        f"{name}, momentum averaged": (
            {"strategy": name, "averaging_period": 3, "local_momentum": "average"},
            partial(Twin, UNLIKE, name, local_momentum="average"),
        )
        for name in ("butterfly", "ring", "hopping-ring")
    },
    "overlap": ({"averaging_period": 2, "overlap": True}, partial(Twin, UNLIKE, period=2, overlap=True)),
    "ring with overlap": (
        {"strategy": "ring", "averaging_period": 2, "overlap": True},
        partial(Twin, UNLIKE, "ring", period=2, overlap=True),
    ),
    "gradients": ({"strategy": "gradient-all-reduce"}, partial(Twin, UNLIKE, "gradient-all-reduce")),
    "bmuf": (BMUF, partial(Twin, UNLIKE, **TWIN_BMUF)),
    "bmuf without a remainder": (BMUF, partial(Twin, ALIKE, **TWIN_BMUF)),
    "bmuf with options": (
        {**BMUF, "block_momentum": 0.3, "block_learning_rate": 0.5, "nesterov": True, "scale_learning_rate": True},
        partial(Twin, UNLIKE, **{**TWIN_BMUF, "eta": 0.3, "zeta": 0.5, "nesterov": True, "scale": 3.0}),
    ),
    "bmuf with Nesterov, without a remainder": (
        {**BMUF, "nesterov": True, "local_momentum": "keep"},
        partial(Twin, ALIKE, **{**TWIN_BMUF, "nesterov": True, "local_momentum": "keep"}),
    ),
    "once an epoch": (ONCE, partial(Twin, UNLIKE, period=NEVER)),
    "bmuf once an epoch": ({**BMUF, **ONCE, "block_momentum": 0.3}, partial(Twin, UNLIKE, period=NEVER, **{**TWIN_BMUF, "eta": 0.3})),
    "elastic once an epoch": ({**ELASTIC, **ONCE}, partial(Twin, UNLIKE, "elastic", period=NEVER, beta=0.9)),
    "1-bit": ({"strategy": "1-bit", "averaging_period": 3}, partial(Twin, UNLIKE, "1-bit")),
    "1-bit SGD": ({"strategy": "1-bit", "averaging_period": 1}, partial(Twin, ALIKE, "1-bit", period=1)),
    "1-bit with overlap": (
        {"strategy": "1-bit", "averaging_period": 2, "overlap": True},
        partial(Twin, UNLIKE, "1-bit", period=2, overlap=True),
    ),
    "elastic": (ELASTIC, partial(Twin, UNLIKE, "elastic", beta=0.9)),
    "elastic without a remainder": (
        {**ELASTIC, "elasticity": 0.6, "local_momentum": "reset"},
        partial(Twin, ALIKE, "elastic", beta=0.6, local_momentum="reset"),
    ),
    "async": ({"strategy": "async", "averaging_period": 100}, partial(Twin, UNLIKE, "async", period=100, update_scale=1 / 3)),
    "async in full": (
        {"strategy": "async", "averaging_period": 100, "update_scale": 1.0, "scale_learning_rate": False},
        partial(Twin, ALIKE, "async", period=100, scale=1.0),
    ),
    "async with a scale": (
        {"strategy": "async", "averaging_period": 100, "update_scale": 0.25, "scale_learning_rate": True},
        partial(Twin, UNLIKE, "async", period=100, update_scale=0.25),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_every_epoch_is_the_twins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (averager, parameter_server):
        monkeypatch.setattr(module, "require_thread_level", lambda *_: None)  # there is no MPI
    keys, make_twin = CASES[name]
    twin = make_twin()
    optimizer = make_optimizer_config(momentum=MOMENTUM, l2=L2)

    def work(comm: Communicator) -> tuple[list[Tensor], list[dict[str, Any]], Tensor]:
        frames = MINIBATCH * twin.minibatches[comm.rank]
        trainer = toy_trainer(comm, make_parallel_config(**keys), frames=frames, optimizer=optimizer)
        trainer.schedule = schedule = Scripted(trainer.model.network)
        trainer.validation.frames = toy_shard(50 + comm.rank, CV_FRAMES[comm.rank])
        rows = train_to_end(trainer)
        return schedule.models, rows, trainer.model.network.parameters

    found = run_workers(twin.n, work)
    for number, (rate, accepted) in enumerate(zip(RATES, ACCEPTED, strict=True), start=1):
        twin.epoch(number, rate, accepted)
        for models, _, _ in found:
            torch.testing.assert_close(models[number - 1].double(), twin.models[-1], rtol=0, atol=3e-5)
    assert (twin.models[-1] - toy_model().network.parameters).abs().max() > 0.5, "a training that moves nothing"
    assert (twin.models[2] - twin.models[1]).abs().max() > 1e-2, "a rejected epoch that moved nothing"
    for _, rows, last in found:
        torch.testing.assert_close(last.double(), twin.best, rtol=0, atol=3e-5)
        train, cv = ([row for row in rows if row.get("split") == split] for split in ("train", "cv"))
        assert [row["loss"] for row in train] == pytest.approx(twin.training_losses, rel=1e-5)
        assert [row["loss"] for row in cv[1:]] == pytest.approx(twin.cv_losses, rel=1e-5)
        assert [row["learning_rate"] for row in train] == [row["learning_rate"] for row in cv[1:]]
        assert [row["learning_rate"] for row in train] == pytest.approx([twin.scale * rate for rate in RATES])
        assert [row["schedule_learning_rate"] for row in train] == list(RATES)
        assert [row["accepted"] for row in train] == [row["accepted"] for row in cv[1:]] == list(ACCEPTED)
        assert {row["frames"] for row in train} == {MINIBATCH * sum(twin.trained)}
        if twin.strategy in ("all-reduce", "bmuf", "elastic") and twin.n > 1:  # gossip's is an estimate
            workers = [row["consensus_distance"] for row in rows if row.get("consensus_distance") is not None]
            assert workers == pytest.approx([distance for epoch in twin.distances for distance in epoch], rel=1e-3)
        assert {row["frames"] for row in cv} == {sum(CV_FRAMES[: twin.n])}


def test_a_warm_up_by_all_reduce_is_one_worker_with_the_minibatches_of_all() -> None:
    """Each at the scaled rate, then the mean: together the sum of the gradients at the plain rate."""
    keys = {"warmup": "all-reduce", "warmup_minibatches": 5}

    def work(comm: Communicator) -> Tensor:
        trainer = toy_trainer(comm, make_parallel_config(**keys), frames=MINIBATCH * (3 + comm.rank))
        warm_up(trainer)
        return trainer.model.network.parameters

    twin = toy_model().network.parameters.double()
    coefs = torch.ones_like(twin)
    coefs[-PDFS:] = 0.1
    shards = [toy_shard(rank, MINIBATCH * (3 + rank)) for rank in range(3)]
    orders = []
    for rank, shard in enumerate(shards):
        sampler = ShuffledSampler(shard, MINIBATCH, seed=1, rank=rank)
        orders.append([*sampler.epoch(10**6), *sampler.epoch(10**6 + 1)][:5])
    for minibatches in zip(*orders, strict=True):
        gradients = [
            twin_loss(toy_model().network, twin, s.dataset.features[rows], s.dataset.labels[rows].long())[2]
            for s, rows in zip(shards, minibatches, strict=True)
        ]
        twin = twin - 0.01 * coefs * sum(gradients)
    for parameters in run_workers(3, work):
        torch.testing.assert_close(parameters.double(), twin, rtol=0, atol=1e-5)


@pytest.mark.parametrize("strategy", ["gradient-all-reduce", "all-reduce"])
def test_workers_that_share_a_minibatch_are_one_worker_with_it(strategy: str) -> None:
    """`minibatch_scope: total`: three workers train as one does on the minibatches of all three at the schedule's rate,
    whether they average gradients or, after every minibatch, parameters."""
    parallel = make_parallel_config(strategy, workers=3, averaging_period=1)
    recipe = Recipe.model_construct(minibatch_size=3 * MINIBATCH, minibatch_scope="total", parallel=parallel)

    def work(comm: Communicator) -> tuple[Tensor, list[dict[str, Any]]]:
        sizes = minibatch_sizes(recipe)
        trainer = toy_trainer(comm, parallel, frames=4 * MINIBATCH, epochs=2, learning_rate=0.02, sizes=sizes)
        rows = train_to_end(trainer)
        return trainer.model.network.parameters, rows

    shards = [toy_shard(rank, 4 * MINIBATCH) for rank in range(3)]
    twin, coefs = toy_model().network.parameters.double(), torch.ones(toy_model().network.num_parameters)
    coefs[-PDFS:] = 0.1
    for epoch in (1, 2):
        orders = [ShuffledSampler(s, MINIBATCH, seed=1, rank=r).epoch(epoch) for r, s in enumerate(shards)]
        for of_workers in zip(*orders, strict=True):
            pairs = [
                (s.dataset.features[rows], s.dataset.labels[rows]) for s, rows in zip(shards, of_workers, strict=True)
            ]
            x, labels = map(torch.cat, zip(*pairs, strict=True))
            assert len(x) == recipe.minibatch_size
            twin = twin - 0.02 * coefs * twin_loss(toy_model().network, twin, x, labels.long())[2]
    for parameters, rows in run_workers(3, work):
        torch.testing.assert_close(parameters.double(), twin, rtol=0, atol=1e-5)
        assert {row["minibatch_size"] for row in rows if row["type"] == "epoch"} == {MINIBATCH}
    assert (twin - toy_model().network.parameters).abs().max() > 0.1, "a training that moves nothing"


@pytest.mark.parametrize("warmup", ["none", "single-worker"])
def test_workers_update_their_fisher_matrices_in_the_same_minibatches(warmup: Any) -> None:
    """Of shards of 21, 26 and no minibatches, and after a warm-up of one worker alone."""
    parallel = make_parallel_config(averaging_period=3, warmup=warmup, warmup_minibatches=7)
    minibatches = (21, 26, 0)

    def work(comm: Communicator) -> list[list[int]]:
        optimizer = make_optimizer_config("ng-sgd", rank_in=3, rank_out=2)
        trainer = toy_trainer(comm, parallel, frames=MINIBATCH * minibatches[comm.rank], optimizer=optimizer)
        step, epochs, preconditioner = trainer.step, list[list[int]](), trainer.optimizer.preconditioners[0]

        def record(batch: Batch, learning_rate: float) -> Sums:
            if trainer.progress.epoch == len(epochs):
                epochs.append([])
            if preconditioner.updates_at(preconditioner.t):
                epochs[-1].append(trainer.progress.minibatch)
            return step(batch, learning_rate)

        trainer.step = record
        train_to_end(trainer)
        return epochs

    small, large, none = run_workers(3, work)
    assert none == [] and [len(epoch) for epoch in large] == [14, 7, 6]
    assert small == [[n for n in epoch if n < minibatches[0]] for epoch in large]


def test_a_growing_minibatch_is_the_twins() -> None:
    """Another size in each epoch: the step is along the sum over as many frames, the tail of each epoch is dropped, and
    averagings come after as many minibatches, two of them here."""
    parallel, sizes, frames = make_parallel_config(workers=2, averaging_period=2), MinibatchSizes(8, 24, 3), 7 * 16

    def work(comm: Communicator) -> tuple[Tensor, list[dict[str, Any]]]:
        trainer = toy_trainer(comm, parallel, frames=frames, epochs=4, sizes=sizes)
        rows = train_to_end(trainer)
        return trainer.model.network.parameters, rows

    coefs = torch.ones(toy_model().network.num_parameters)
    coefs[-PDFS:] = 0.1
    thetas, shards = [toy_model().network.parameters.double()] * 2, [toy_shard(rank, frames) for rank in range(2)]
    for epoch, size in enumerate((8, 16, 24, 24), start=1):
        orders = [list(ShuffledSampler(s, size, seed=1, rank=r).epoch(epoch)) for r, s in enumerate(shards)]
        assert len(orders[0]) == frames // size
        for done, of_workers in enumerate(zip(*orders, strict=True), start=1):
            for rank, (shard, rows) in enumerate(zip(shards, of_workers, strict=True)):
                x, labels = shard.dataset.features[rows], shard.dataset.labels[rows].long()
                gradient = twin_loss(toy_model().network, thetas[rank], x, labels)[2]
                thetas[rank] = thetas[rank] - 2 * 0.01 * coefs * gradient
            if done % 2 == 0:
                thetas = [(thetas[0] + thetas[1]) / 2] * 2
        thetas = [(thetas[0] + thetas[1]) / 2] * 2
    for parameters, rows in run_workers(2, work):
        torch.testing.assert_close(parameters.double(), thetas[0], rtol=0, atol=1e-5)
        trained = [row for row in rows if row.get("split") == "train"]
        assert [row["minibatch_size"] for row in trained] == [8, 16, 24, 24]
        assert [row["frames"] for row in trained] == [2 * n for n in (112, 112, 96, 96)]
        workers = [row for row in rows if row["type"] == "worker" and row["rank"] == 0]
        assert [(row["minibatches"], row["averagings"]) for row in workers] == [(14, 7), (7, 3), (4, 2), (4, 2)]


def test_momentum_that_is_not_finite_is_excluded_from_its_mean() -> None:
    """A worker's momentum overflows while its model is finite: it takes the mean of the others'."""

    def work(comm: Communicator) -> tuple[Tensor, Tensor]:
        trainer = toy_trainer(comm, make_parallel_config(averaging_period=1, local_momentum="average"), optimizer=sgd)
        averager, parameters = trainer.averager, trainer.model.network.parameters
        averager.begin_epoch(4, 4 * MINIBATCH)
        parameters.fill_(float(comm.rank))
        trainer.model.network.parameters_changed()
        trainer.optimizer.momentum_buffer.fill_(math.inf if comm.rank == 1 else 2.0 + comm.rank)
        assert averager.after_minibatch(MINIBATCH)
        return parameters.clone(), trainer.optimizer.momentum_buffer.clone()

    sgd = make_optimizer_config(momentum=MOMENTUM)
    for parameters, momentum in run_workers(3, work):
        assert (parameters == 1.0).all() and (momentum == 3.0).all()
