"""The step as a graph, with a made-up graph in place of CUDA's; what the host does in a step; the same on a GPU."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training.toy import NoCheckpoints
from twins import batch_of, biases

from ddnn.averaging.averager import Averager
from ddnn.data.batches import Batch, BatchLoader, PrefetchLoader, ShuffledSampler, make_batch_loader
from ddnn.data.dataset import AcousticDataset, FrameSubset, InputTransform, gather, labels_of, splice_only
from ddnn.data.feature_reader import FeatureConfig
from ddnn.distributed.communicator import SingleProcess
from ddnn.distributed.groups import Groups
from ddnn.nn import arithmetic
from ddnn.nn.acoustic_model import AcousticModel
from ddnn.nn.arithmetic import Precision, RoundedProjection, make_arithmetic
from ddnn.nn.layers import mlp_layers
from ddnn.nn.network import Network, Workspace, initialize
from ddnn.nn.objective import Sums
from ddnn.optim.natural_gradient import NaturalGradient
from ddnn.optim.ng_sgd import NgSgdOptions, make_optimizer
from ddnn.optim.schedule import MinibatchSizes, Newbob
from ddnn.optim.sgd import Sgd, SgdOptions
from ddnn.runs.rows import MetricsRow, WorkerRow
from ddnn.runs.run_dir import NullRunDir, RunDir
from ddnn.training.evaluation import CrossValidation, FigureSums, evaluate
from ddnn.training.loop import train
from ddnn.training.step import (
    VERIFIED,
    CudaGraphs,
    CudaGraphStep,
    EagerStep,
    Snapshot,
    make_step,
    verified,
)
from ddnn.training.trainer import Trainer

DIM, SPLICE, PDFS, MINIBATCH, RATE = 5, 2, 7, 16, 0.02
CPU = torch.device("cpu")
Kind = Literal["sgd", "ng-sgd"]


@dataclass(frozen=True)
class Task:
    """A network, frames to train it on, and its optimizer."""

    model: AcousticModel
    train: FrameSubset
    optimizer: Sgd
    precision: Precision = "float32"

    @property
    def network(self) -> Network:
        return self.model.network

    def eager(self) -> EagerStep:
        arithmetic = make_arithmetic(self.precision, self.network.parameters.device, pad_to=64)
        return EagerStep(Workspace(self.network, MINIBATCH, arithmetic), self.optimizer)

    def batch(self, step: EagerStep | CudaGraphStep, rows: Tensor) -> Batch:
        """The minibatch in the memory where the step wants it."""
        workspace = (step.eager if isinstance(step, CudaGraphStep) else step).workspace
        return batch_of(workspace, self.train.dataset, self.model.transform, rows)

    def sample(self, step: EagerStep, count: int = VERIFIED) -> list[Batch]:
        """Copies of minibatches, elsewhere in memory."""
        found = []
        for n in range(count):
            x, labels, _ = self.batch(step, self.train.indices[n % 4 * MINIBATCH : (n % 4 + 1) * MINIBATCH])
            found.append(Batch(x.clone(), labels))
        return found


def make_task(
    kind: Kind = "sgd",
    device: torch.device = CPU,
    frames: int = 900,
    hidden: int = 12,
    precision: Precision = "float32",
) -> Task:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, PDFS, (frames,), generator=generator, dtype=torch.int32)
    store = torch.randn(PDFS, DIM, generator=generator)[labels.long()] + torch.randn(frames, DIM, generator=generator)
    spoken = frames - 2 * SPLICE
    dataset = AcousticDataset(store, labels, ("u",), ("s",), np.array([SPLICE]), np.array([spoken]), SPLICE)
    width = DIM * (2 * SPLICE + 1)
    transform = InputTransform(splice_only(DIM, SPLICE).offsets, DIM, torch.full((width,), 0.1), torch.ones(width))
    network = Network(mlp_layers(width, 2, hidden, PDFS, "sigmoid"))
    initialize(network, 1)
    model = AcousticModel(FeatureConfig(), transform, network).to(device)
    options = SgdOptions(momentum=0.5) if kind == "sgd" else NgSgdOptions(momentum=0.5, rank_in=3, rank_out=4)
    return Task(model, dataset.to(device).subset([0]), make_optimizer(options, model.network), precision)


class FakeGraphs:
    """Runs a function again where CUDA would replay its kernels, into results that stay the same tensors."""

    def __init__(self, eager: EagerStep, fails: Exception | None = None, wrong: Tensor | None = None) -> None:
        self.eager, self.optimizer, self.fails, self.wrong = eager, eager.optimizer, fails, wrong
        self.captures: list[Any] = []
        self.replays: list[Any] = []
        self.runs: dict[Any, Callable[[], Any]] = {}
        self.results: dict[Any, Any] = {}
        self.replaying = False

    def warm_up(self, run: Callable[[], Sums]) -> None:
        assert not self.runs, "graphs are released before others are made"
        for _ in range(3):
            run()

    def capture(self, name: Any, run: Callable[[], Any]) -> Any:
        self.captures.append(name)
        held = [*_tensors(self.eager)]
        before = [tensor.clone() for tensor in held]
        result = run()  # as CUDA, changes what the host counts; worse, the tensors too
        for tensor, value in zip(held, before, strict=True):
            tensor.copy_(value)
        if self.fails is not None:
            raise self.fails
        self.runs[name] = run
        self.results[name] = None if result is None else tuple(torch.zeros_like(one) for one in result)
        return self.results[name]

    def replay(self, name: Any) -> None:
        self.replays.append(name)
        sides = self.optimizer.preconditioners
        assert name == "derivatives" or not any(side._pending_n for side in sides), "the host cannot be captured"
        states = [side.host_state() for side in sides]
        self.replaying = True
        for kept, made in zip(self.results[name] or (), self.runs[name]() or (), strict=True):
            kept.copy_(made)
        self.replaying = False
        for side, state in zip(sides, states, strict=True):
            side.set_host_state(state)  # the host does nothing in a replay
        if self.wrong is not None:
            self.wrong.add_(1e-3)

    def release(self) -> None:
        self.runs.clear()


def _tensors(eager: EagerStep) -> Iterator[Tensor]:
    """What a step changes on the device."""
    optimizer = eager.optimizer
    yield from (optimizer.network.parameters, optimizer.momentum_buffer, *tree_leaves(eager.workspace._memory))
    for side in optimizer.preconditioners:
        yield from (side.w, side.j, side._stats)


def losses_of(
    task: Task, step: EagerStep | CudaGraphStep, minibatches: int, rates: tuple[float, ...] = (RATE,)
) -> list[float]:
    """An epoch for each rate."""
    found = []
    for epoch, rate in enumerate(rates, 1):
        order = itertools.chain.from_iterable(
            ShuffledSampler(task.train, MINIBATCH, seed=1).epoch(100 * epoch + again) for again in range(99)
        )
        rows = itertools.islice(order, minibatches)
        found += torch.stack([step(task.batch(step, one), rate)[0].clone() for one in rows]).tolist()
    return found


@pytest.mark.parametrize("kind", ["sgd", "ng-sgd"])
def test_a_graph_trains_as_the_eager_step_does(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same bits over 200 minibatches, through a change of the rate; the check before leaves no trace."""
    plain, other = make_task(kind), make_task(kind)
    eager = other.eager()
    graphs = FakeGraphs(eager)
    graphed = CudaGraphStep(eager, graphs)
    assert verified(graphed, other.sample(eager), RATE) is graphed
    assert graphs.replays
    assert torch.equal(other.network.parameters, plain.network.parameters)

    replaying, eigendecompositions = False, []
    factor, replay = NaturalGradient._factor, graphs.replay

    def factored(self: NaturalGradient, n: int) -> Any:
        eigendecompositions.append(replaying)
        return factor(self, n)

    def replayed(name: Any) -> None:
        nonlocal replaying
        replaying = True
        replay(name)
        replaying = False

    monkeypatch.setattr(NaturalGradient, "_factor", factored)
    monkeypatch.setattr(graphs, "replay", replayed)
    graphs.replays.clear()
    graphs.captures.clear()
    rates = (RATE, RATE / 2)
    assert losses_of(other, graphed, 100, rates) == losses_of(plain, plain.eager(), 100, rates)
    assert torch.equal(other.network.parameters, plain.network.parameters)
    assert torch.equal(other.optimizer.momentum_buffer, plain.optimizer.momentum_buffer)
    for one, twin in zip(other.optimizer.preconditioners, plain.optimizer.preconditioners, strict=True):
        assert one.t == twin.t and one.rho == twin.rho and torch.equal(one.w, twin.w)
        assert np.array_equal(one.d, twin.d)
    assert not any(eigendecompositions), "a graph holds no work of the host"
    assert bool(eigendecompositions) == (kind == "ng-sgd")
    if kind == "sgd":
        assert graphs.captures == ["step"], "the first rate's graph is that of the check"
        assert graphs.replays == 200 * ["step"]
    else:
        assert sorted(graphs.captures, key=str) == [False, True, "derivatives"]
        replays = Counter(graphs.replays)
        assert replays["derivatives"] == 200
        assert replays[True] == 10 + 47
        assert replays[False] == 199 - replays[True], "all but the first minibatch, which makes three updates"


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_the_check_leaves_no_trace_in_a_training_that_is_resumed(
    precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no graph rounds W, which changes between them alone."""
    take = RoundedProjection.take

    def taken(self: RoundedProjection, w: Tensor) -> None:
        assert not graphs.replaying
        take(self, w)

    monkeypatch.setattr(RoundedProjection, "take", taken)
    task, twin = make_task("ng-sgd", precision=precision), make_task("ng-sgd", precision=precision)
    graphs = FakeGraphs(task.eager())
    for one in (task, twin):
        losses_of(one, one.eager(), 13)
    graphs = FakeGraphs(eager := task.eager())
    graphed = verified(CudaGraphStep(eager, graphs), task.sample(eager), RATE)
    assert isinstance(graphed, CudaGraphStep)
    assert losses_of(task, graphed, 30) == losses_of(twin, twin.eager(), 30)


def test_a_graph_that_cannot_be_captured_leaves_the_eager_step(caplog: pytest.LogCaptureFixture) -> None:
    task, twin = make_task("ng-sgd"), make_task("ng-sgd")
    eager = task.eager()
    graphed = CudaGraphStep(eager, FakeGraphs(eager, RuntimeError("made up")))
    with caplog.at_level(logging.WARNING, "ddnn"):
        assert verified(graphed, task.sample(eager), RATE) is eager
    assert "could not be captured" in caplog.text and "made up" in caplog.text
    assert len(caplog.records) == 1
    assert losses_of(task, eager, 20) == losses_of(twin, twin.eager(), 20), "the failure left no trace"


def test_a_capture_that_fails_later_leaves_the_eager_step_too(caplog: pytest.LogCaptureFixture) -> None:
    """As memory may be short once the rate has changed."""
    task, twin = make_task(), make_task()
    eager = task.eager()
    graphs = FakeGraphs(eager)
    graphed = CudaGraphStep(eager, graphs)
    expected = losses_of(twin, twin.eager(), 10, (RATE, RATE / 2))
    found = losses_of(task, graphed, 10)
    graphs.fails = torch.OutOfMemoryError("made up")
    order = ShuffledSampler(task.train, MINIBATCH, seed=1).epoch(200)
    found += [graphed(task.batch(graphed, rows), RATE / 2)[0].item() for rows in itertools.islice(order, 10)]
    assert found == expected
    assert len(graphs.captures) == 2 and len(graphs.replays) == 10 and len(caplog.records) == 1


@pytest.mark.parametrize("nan", [False, True])
def test_a_graph_that_does_something_else_is_found_out(nan: bool, caplog: pytest.LogCaptureFixture) -> None:
    task, twin = make_task(), make_task()
    network, eager = task.network, task.eager()
    graphs = FakeGraphs(eager, wrong=biases(network)[0])
    if nan:
        graphs.wrong = network.parameters.new_full((), float("nan"))
        network.parameters[0] = float("nan")
        network.parameters_changed()
    assert verified(CudaGraphStep(eager, graphs), task.sample(eager), RATE) is eager
    assert "CUDA graph disabled" in caplog.text and not graphs.runs
    if not nan:
        assert torch.equal(network.parameters, twin.network.parameters)


@pytest.mark.parametrize("kind", ["sgd", "ng-sgd"])
def test_a_minibatch_of_another_size_captures_again(kind: Kind) -> None:
    """As between two epochs of a growing minibatch; a tensor of one row would fit into any, to be repeated."""
    task, twin = make_task(kind), make_task(kind)
    eager, own = twin.eager(), task.eager()
    graphs = FakeGraphs(own)
    graphed = CudaGraphStep(own, graphs)
    for size in (1, 8, MINIBATCH, 8):
        for rows in torch.split(task.train.indices[: 16 * size], size):
            assert graphed(task.batch(graphed, rows), RATE)[0] == eager(twin.batch(eager, rows), RATE)[0]
    assert torch.equal(task.network.parameters, twin.network.parameters)
    assert graphs.captures.count("step" if kind == "sgd" else "derivatives") == 4 and len(graphs.replays) > 20


def test_a_minibatch_elsewhere_in_memory_is_copied() -> None:
    task, twin = make_task(), make_task()
    eager, other = task.eager(), twin.eager()
    batch = task.batch(eager, task.train.indices[:MINIBATCH])
    elsewhere = Batch(batch.x.clone(), batch.labels)
    assert eager(batch, RATE)[0] == other(elsewhere, RATE)[0]
    assert torch.equal(task.network.parameters, twin.network.parameters)


@pytest.mark.parametrize("kind", ["sgd", "ng-sgd"])
def test_a_replay_is_seen_by_what_copies_the_parameters(kind: Kind) -> None:
    """In bf16, also where another workspace has made its copy in between."""
    task, twin = make_task(kind, precision="bf16"), make_task(kind, precision="bf16")
    own, eager = task.eager(), twin.eager()
    graphed = CudaGraphStep(own, FakeGraphs(own))
    onlooker = task.eager().workspace
    for rows in task.train.indices[: 30 * MINIBATCH].split(MINIBATCH):
        found, expected = (step(one.batch(step, rows), RATE)[0] for step, one in ((graphed, task), (eager, twin)))
        assert torch.equal(found, expected)
        onlooker.x.fill_(0.1)
        assert torch.equal(onlooker.forward(), _logits(task, 0.1))


def _logits(task: Task, value: float) -> Tensor:
    workspace = task.eager().workspace
    workspace.x.fill_(value)
    return workspace.forward()


def test_on_a_cpu_and_where_gradients_are_averaged_the_step_is_eager() -> None:
    eager = make_task().eager()
    assert make_step(eager, lambda count: pytest.fail("asked"), RATE) is eager


@pytest.mark.parametrize("exact", [False, True])
def test_how_often_fisher_matrices_are_updated_is_known_before_the_first_step(exact: bool) -> None:
    network = Network(mlp_layers(DIM, 1, 8, PDFS))
    optimizer = make_optimizer(NgSgdOptions(exact=exact), network)
    EagerStep(Workspace(network, MINIBATCH, make_arithmetic("bf16", CPU)), optimizer)
    assert all(one.updates_rarely is not exact for one in optimizer.preconditioners)


def test_which_steps_of_ng_sgd_begin_updates() -> None:
    task = make_task("ng-sgd")
    step, phases = task.eager(), []
    for _ in range(20):
        task.optimizer.finish_updates()
        phases.append(task.optimizer.phase(MINIBATCH))
        step(task.batch(step, task.train.indices[:MINIBATCH]), RATE)
    begins = [*3 * [False], True]
    assert phases == [None, *10 * [True], *begins, *begins, False]
    assert make_task().optimizer.phase(MINIBATCH) == ()


def test_the_state_of_a_training_is_taken_back_to_the_same_bits() -> None:
    task, twin = make_task("ng-sgd"), make_task("ng-sgd")
    losses_of(task, task.eager(), 30)
    losses_of(twin, twin.eager(), 30)
    snapshot = Snapshot(task.optimizer)
    losses_of(task, task.eager(), 7)
    snapshot.restore()
    assert losses_of(task, task.eager(), 20) == losses_of(twin, twin.eager(), 20)


class HostWaits(TorchDispatchMode):
    """Operations for which the host waits for the device, where `device` stands for a GPU.

    Values that are read, sizes that depend on values, and tensors of several elements that cross between host and
    device.
    """

    READS = ("_local_scalar_dense", "item", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2", "unique_dim")

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device, self.found, self.calls = device, [], 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.calls += 1
        name = func.overloadpacket.__name__
        result = func(*args, **kwargs)
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs, result)) if isinstance(t, Tensor)]
        devices = {t.device.type for t in tensors if t.device.type == self.device.type or t.numel() > 1}
        masks = name in ("index", "index_put_") and any(t.dtype == torch.bool for t in tensors[1:])
        if name in self.READS or len(devices) > 1 or masks:
            self.found.append(name)
        return result


def run_steps(task: Task, minibatches: int) -> None:
    """As the training loop does."""
    device, step = task.network.parameters.device, task.eager()
    sums, averager = FigureSums(device), Averager(Groups.data_parallel(SingleProcess()), task.network, task.optimizer)
    order = ShuffledSampler(task.train, MINIBATCH, seed=1).epoch(1)
    next(order)  # the order of an epoch is drawn and copied at its first minibatch
    with HostWaits(device) as waits:
        for rows in itertools.islice(order, minibatches):
            sums.add(step(task.batch(step, rows), RATE), len(rows))
            averager.after_minibatch(len(rows))
    assert sums.frames == minibatches * MINIBATCH and waits.calls > 10 * minibatches
    assert waits.found == []


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_no_step_of_sgd_waits_for_the_device(
    device: str, precision: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`meta` has no values to wait for, and no copy to the host: what asks for either fails."""
    if device == "meta":  # as GPUs do
        monkeypatch.setattr(arithmetic, "supports_float32_output", lambda device: True)
    run_steps(make_task(device=torch.device(device), precision=precision), 50)


def test_what_would_wait_is_found() -> None:
    for waits_for in (
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).all()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
    ):
        with HostWaits(CPU) as waits:
            waits_for(torch.ones(3))
        assert waits.found, "values are read"
    with HostWaits(torch.device("meta")) as waits:
        torch.ones(3, device="meta")[:2].add_(1.0)
        assert not waits.found
        torch.empty(3, device="meta").copy_(torch.ones(3))
        torch.tensor([1, 2], device="cpu").to("meta")
    assert len(waits.found) == 2


def test_offsets_with_gaps_make_no_index_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = make_task(device=torch.device("meta"))
    monkeypatch.delattr(torch, "tensor")  # of a list it copies, and waits, where no dispatch shows it
    transform = InputTransform((-2, 0, 1), DIM)
    with HostWaits(torch.device("meta")) as waits:
        gather(setup.train.dataset, transform, setup.train.indices[:9], torch.empty(9, 3 * DIM, device="meta"))
        labels_of(setup.train.dataset, setup.train.indices[:9], torch.device("meta"))
    assert waits.calls and not waits.found


def test_common_steps_of_ng_sgd_wait_for_nothing() -> None:
    """Those in which no update of the Fisher matrices starts or ends; the others read r x r results a step later."""
    task = make_task("ng-sgd")
    step, common = task.eager(), 0
    for rows in itertools.islice(itertools.cycle(task.train.indices[: 8 * MINIBATCH].split(MINIBATCH)), 50):
        batch = task.batch(step, rows)
        task.optimizer.finish_updates()
        if task.optimizer.phase(MINIBATCH) is None:
            step(batch, RATE)
            continue
        common += 1
        with HostWaits(CPU) as waits:
            step(batch, RATE)
        assert waits.found == []
    assert common == 49, "all but the first"


def on_gpu(kind: Kind) -> tuple[Task, CudaGraphStep]:
    task = make_task(kind, torch.device("cuda", 0), frames=20_000, hidden=256)
    return task, CudaGraphStep(task.eager(), CudaGraphs(torch.device("cuda", 0)))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["sgd", "ng-sgd"])
def test_a_cuda_graph_trains_as_the_eager_step_does(kind: Kind) -> None:
    plain = make_task(kind, torch.device("cuda", 0), frames=20_000, hidden=256)
    task, graphed = on_gpu(kind)
    rates = (RATE, RATE / 2)
    expected = losses_of(plain, plain.eager(), 100, rates)
    np.testing.assert_allclose(losses_of(task, graphed, 100, rates), expected, rtol=1e-3)
    assert not graphed.disabled


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
def test_no_step_of_sgd_waits_for_a_gpu(graph: bool) -> None:
    task, graphed = on_gpu("sgd")
    step = graphed if graph else task.eager()
    sums, order = FigureSums(torch.device("cuda", 0)), list(ShuffledSampler(task.train, MINIBATCH, seed=1).epoch(1))
    step(task.batch(step, order[0]), RATE)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for rows in order[:50]:
            sums.add(step(task.batch(step, rows), RATE), len(rows))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert np.isfinite(sums.result().loss)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["sgd", "ng-sgd"])
def test_memory_does_not_grow(kind: Kind) -> None:
    """Over 10,000 minibatches, with a new capture now and then."""
    task, step = on_gpu(kind)
    held = []
    for epoch in range(10):
        losses_of(task, step, 1000, (RATE * 0.9**epoch,))
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_reserved())
    assert max(held[2:]) <= held[1]


def make_trainer(task: Task, run: RunDir) -> Trainer:
    """A training of two epochs by a single worker."""
    step, averager = task.eager(), Averager(Groups.data_parallel(SingleProcess()), task.network, task.optimizer)
    sampler, mark = ShuffledSampler(task.train, MINIBATCH, seed=1), averager.timer.mark
    return Trainer(
        model=task.model,
        optimizer=task.optimizer,
        schedule=Newbob(max_epochs=2),
        batches=make_batch_loader(task.train, task.model.transform, sampler, out=step.workspace.x, mark=mark),
        validation=CrossValidation(task.train, averager.groups.data, step.workspace.arithmetic),
        minibatch_sizes=MinibatchSizes(MINIBATCH, MINIBATCH),
        eager_step=step,
        step=step,
        averager=averager,
        checkpoints=NoCheckpoints(),
        run=run,
    )


def test_features_in_host_memory_train_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, shares = [], []

    class Recorder(NullRunDir):
        def record(self, row: MetricsRow) -> None:
            if isinstance(row, WorkerRow):
                shares.append((row.data_fraction or 0.0) + (row.compute_fraction or 0.0))

    for kind in (BatchLoader, PrefetchLoader):
        monkeypatch.setattr("ddnn.data.batches.BatchLoader", kind)
        trained.append(train(make_trainer(make_task(), Recorder(Path("nowhere")))).network.parameters)
    assert torch.equal(*trained)
    assert len(shares) == 4 and all(0.0 < share <= 1.0 for share in shares)


def test_cross_validation_reads_a_corpus_elsewhere() -> None:
    """`meta` stands for the other device: nothing but the copy may mix the two."""
    setup, meta = make_task(), torch.device("meta")
    with pytest.raises(RuntimeError, match="meta"):  # no values there to judge by
        evaluate(setup.model.to(meta), setup.train)
    x = torch.empty(9, setup.model.network.input_dim, device="meta")
    gather(setup.train.dataset, setup.model.to(meta).transform, setup.train.indices[:9], x)
    assert labels_of(setup.train.dataset, setup.train.indices[:9], meta).device == meta


class FakeCuda:
    """What `CudaGraph` asks of torch.cuda, written down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: bool = False) -> None:
        self.calls: list[str] = []
        self.current: object = "main stream"
        self.fails = fails
        for name in ("Stream", "CUDAGraph", "current_stream", "stream", "set_stream", "graph", "synchronize"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, f"_{name}"))

    def _Stream(self, device: object) -> FakeStream:
        return FakeStream()

    def _CUDAGraph(self) -> FakeCapture:
        return FakeCapture(self.calls)

    def _current_stream(self, device: object) -> FakeStream:
        return FakeStream()

    @contextmanager
    def _stream(self, stream: object) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def _set_stream(self, stream: object) -> None:
        self.current = "main stream"

    @contextmanager
    def _graph(self, graph: object, stream: object, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        self.current = stream
        self.calls.append("capture")
        yield
        if self.fails:
            raise RuntimeError("made up")  # before it puts the stream back, as torch does
        self.current = "main stream"

    def _synchronize(self, device: object) -> None:
        self.calls.append("synchronize")


class FakeStream:
    def wait_stream(self, other: object) -> None:
        pass


class FakeCapture:
    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def replay(self) -> None:
        self.calls.append("replay")

    def reset(self) -> None:
        self.calls.append("reset")


def test_one_graph_at_a_time_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old one is gone, and no longer runs, before the new one is warmed up: it takes memory with it."""
    cuda, task = FakeCuda(monkeypatch), make_task()

    class Told(EagerStep):
        def __call__(self, batch: Batch, lr: float) -> Sums:
            cuda.calls.append("step" if cuda.current == "main stream" else "step aside")
            return super().__call__(batch, lr)

    eager = task.eager()
    graphed = CudaGraphStep(Told(eager.workspace, eager.optimizer), CudaGraphs(CPU))
    for rate in (RATE, RATE, RATE / 2):
        graphed(task.batch(graphed, task.train.indices[:MINIBATCH]), rate)
    captured = ["step aside"] * 3 + ["capture", "step aside", "replay"]
    assert cuda.calls == [*captured, "replay", "synchronize", "reset", *captured]
    assert not graphed.disabled


def test_a_graph_keeps_the_memory_that_it_works_on(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    graphs = CudaGraphs(CPU)
    memory = torch.zeros(3)
    seen = weakref.ref(memory)
    graphs.capture("part", partial(memory.add_, 1.0))
    del memory
    assert seen() is not None
    graphs.release()
    assert seen() is None


def test_a_failed_capture_leaves_the_stream_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, task = FakeCuda(monkeypatch, fails=True), make_task()
    graphed = CudaGraphStep(task.eager(), CudaGraphs(CPU))
    graphed(task.batch(graphed, task.train.indices[:MINIBATCH]), RATE)
    assert graphed.disabled and cuda.current == "main stream"
