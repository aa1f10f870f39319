"""The step as a graph, with a made-up graph in place of CUDA's; what the host does in a step; the same on a GPU."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ddnn.data.corpus import Corpus, FeaturePipeline
from ddnn.data.minibatches import FrameSet, frame_set, shuffled_minibatches
from ddnn.data.streaming import Stream
from ddnn.data.transform import InputTransform, gather, labels_of, plain_splice
from ddnn.model.acoustic import AcousticModel
from ddnn.model.initialise import initialise_randomly
from ddnn.model.network import Buffers, Network, Precision, hidden_stack
from ddnn.optim.natural_gradient import NaturalGradient
from ddnn.optim.schedule import make_schedule
from ddnn.optim.sgd import Sgd, make_optimizer
from ddnn.recipe.schema import Optimizer, Schedule
from ddnn.train import loop
from ddnn.train.averaging import no_averaging
from ddnn.train.evaluate import Tally, evaluate
from ddnn.train.loop import Setup, train_minibatch
from ddnn.train.run_dir import NoRunDir
from ddnn.train.step import CHECKED, CudaGraph, Feed, GraphedStep, Result, State, Step, checked, fisher_matrices
from ddnn.train.step import host_has_work as has_work

DIM, SPLICE, PDFS, MINIBATCH, RATE = 5, 2, 7, 16, 0.02
CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
Kind = Literal["sgd", "ng-sgd"]


def make_setup(kind: Kind = "sgd", device: torch.device = CPU, frames: int = 900, hidden: int = 12) -> Setup:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, PDFS, (frames,), generator=generator, dtype=torch.int32)
    store = torch.randn(PDFS, DIM, generator=generator)[labels.long()] + torch.randn(frames, DIM, generator=generator)
    spoken = frames - 2 * SPLICE
    corpus = Corpus(store, labels, ("u",), ("s",), np.array([SPLICE]), np.array([spoken]), SPLICE)
    width = DIM * (2 * SPLICE + 1)
    transform = InputTransform(plain_splice(DIM, SPLICE).offsets, DIM, torch.full((width,), 0.1), torch.ones(width))
    network = Network(hidden_stack(width, 2, hidden, PDFS, "sigmoid"))
    initialise_randomly(network, 1)
    model = AcousticModel(FeaturePipeline(), transform, network).to(device)
    train = frame_set(corpus.to(device), [0])
    optimizer = make_optimizer(Optimizer(name=kind, momentum=0.5, rank_in=3, rank_out=4), model.network)
    alone = no_averaging(model.network.parameters, optimizer, MINIBATCH)
    return Setup(model, optimizer, make_schedule(Schedule()), train, train, MINIBATCH, 1, alone)


def plain_step(setup: Setup) -> Step:
    buffers = Buffers(setup.model.network, MINIBATCH, setup.precision, multiple=64)
    return lambda inputs, rate: train_minibatch(setup, buffers, inputs[0], rate)


class FakeGraph:
    """Runs the function again where CUDA would replay its kernels, into results that stay the same tensors."""

    def __init__(self, optimizer: Sgd, fails: Exception | None = None, wrong: Tensor | None = None) -> None:
        self.optimizer, self.fails, self.wrong = optimizer, fails, wrong
        self.captures = self.replays = self.held = 0

    def warm_up(self, run: Callable[[], Result]) -> None:
        for _ in range(3):
            run()

    def capture(self, run: Callable[[], Result]) -> Result:
        self.captures += 1
        self.held += 1
        assert self.held == 1, "one graph at a time"
        assert not has_work(self.optimizer), "the host cannot be captured"
        run()  # as CUDA, changes what the host counts; worse, the parameters too
        if self.fails is not None:
            raise self.fails
        self.run, self.result = run, (torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64))
        return self.result

    def replay(self) -> None:
        self.replays += 1
        for kept, made in zip(self.result, self.run(), strict=True):
            kept.copy_(made)
        for side in fisher_matrices(self.optimizer):
            side.t -= 1  # the host does nothing in a replay
        if self.wrong is not None:
            self.wrong.add_(1e-3)

    def release(self) -> None:
        self.held = 0


def losses_of(setup: Setup, step: Step, minibatches: int, rates: tuple[float, ...] = (RATE,)) -> list[float]:
    """An epoch for each rate."""
    found = []
    for epoch, rate in enumerate(rates, 1):
        order = itertools.chain.from_iterable(
            shuffled_minibatches(setup.train, MINIBATCH, seed=1, epoch=100 * epoch + again) for again in range(99)
        )
        results = [step((rows,), rate)[0].clone() for rows in itertools.islice(order, minibatches)]
        found += torch.stack(results).tolist()
    return found


@pytest.mark.parametrize("kind", ["sgd", "ng-sgd"])
def test_a_graph_trains_as_the_plain_step_does(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same bits over 200 minibatches, through a change of the rate; the check before leaves no trace."""
    plain, other = make_setup(kind), make_setup(kind)
    graph = FakeGraph(other.optimizer)
    graphed = GraphedStep(plain_step(other), other.model.network, other.optimizer, graph)
    assert checked(graphed, Feed(other.train, other.model.transform, MINIBATCH, CPU).some(CHECKED), RATE) is graphed
    assert graph.replays > 0
    assert torch.equal(other.model.network.parameters, plain.model.network.parameters)

    replaying, updates = False, []
    start, finish, replay = NaturalGradient._start_update, NaturalGradient.finish_update, graph.replay

    def started(self: NaturalGradient, *args: Any) -> None:
        updates.append(replaying)
        start(self, *args)

    def finished(self: NaturalGradient) -> None:
        if self._pending_n:
            updates.append(replaying)
        finish(self)

    def replayed() -> None:
        nonlocal replaying
        replaying = True
        replay()
        replaying = False

    monkeypatch.setattr(NaturalGradient, "_start_update", started)
    monkeypatch.setattr(NaturalGradient, "finish_update", finished)
    monkeypatch.setattr(graph, "replay", replayed)
    graph.replays = graph.captures = 0
    rates = (RATE, RATE / 2)
    assert losses_of(other, graphed, 100, rates) == losses_of(plain, plain_step(plain), 100, rates)
    assert torch.equal(other.model.network.parameters, plain.model.network.parameters)
    assert torch.equal(other.optimizer.correction, plain.optimizer.correction)
    for one, twin in zip(fisher_matrices(other.optimizer), fisher_matrices(plain.optimizer), strict=True):
        assert one.t == twin.t and torch.equal(one.w, twin.w)
    assert not any(updates), "a graph holds no work of the host"
    assert bool(updates) == (kind == "ng-sgd")
    assert graph.captures == 1, "the first rate's graph is that of the check"
    assert graph.replays == (200 if kind == "sgd" else 200 - 12 - 2 * 47)


def test_a_graph_that_cannot_be_captured_leaves_the_plain_step(caplog: pytest.LogCaptureFixture) -> None:
    setup, twin = make_setup("ng-sgd"), make_setup("ng-sgd")
    plain = plain_step(setup)
    graphed = GraphedStep(
        plain, setup.model.network, setup.optimizer, FakeGraph(setup.optimizer, RuntimeError("made up"))
    )
    some = Feed(setup.train, setup.model.transform, MINIBATCH, CPU).some(CHECKED)
    with caplog.at_level(logging.WARNING, "ddnn"):
        assert checked(graphed, some, RATE) is plain
    assert "could not be captured" in caplog.text and "made up" in caplog.text
    assert len(caplog.records) == 1
    assert losses_of(setup, plain, 20) == losses_of(twin, plain_step(twin), 20), "the failure left no trace"


def test_a_capture_that_fails_later_leaves_the_plain_step_too(caplog: pytest.LogCaptureFixture) -> None:
    """As memory may be short once the rate has changed."""
    setup, twin = make_setup(), make_setup()
    graph = FakeGraph(setup.optimizer)
    graphed = GraphedStep(plain_step(setup), setup.model.network, setup.optimizer, graph)
    expected = losses_of(twin, plain_step(twin), 10, (RATE, RATE / 2))
    found = losses_of(setup, graphed, 10)
    graph.fails = torch.OutOfMemoryError("made up")
    order = shuffled_minibatches(setup.train, MINIBATCH, seed=1, epoch=200)
    found += [graphed((rows,), RATE / 2)[0].item() for rows in itertools.islice(order, 10)]
    assert found == expected
    assert graph.captures == 2 and graph.replays == 10 and len(caplog.records) == 1


@pytest.mark.parametrize("nan", [False, True])
def test_a_graph_that_does_something_else_is_found_out(nan: bool, caplog: pytest.LogCaptureFixture) -> None:
    setup, twin = make_setup(), make_setup()
    network, plain = setup.model.network, plain_step(setup)
    graph = FakeGraph(setup.optimizer, wrong=network.biases[0])
    if nan:
        graph.wrong = network.parameters.new_full((), float("nan"))
        network.parameters[0] = float("nan")
    some = Feed(setup.train, setup.model.transform, MINIBATCH, CPU).some(CHECKED)
    assert checked(GraphedStep(plain, network, setup.optimizer, graph), some, RATE) is plain
    assert "is not the plain one" in caplog.text and graph.held == 0
    if not nan:
        assert torch.equal(network.parameters, twin.model.network.parameters)


def test_a_graph_takes_only_minibatches_of_its_size() -> None:
    """A tensor of one row would fit into any, to be repeated."""
    setup = make_setup()
    graphed = GraphedStep(plain_step(setup), setup.model.network, setup.optimizer, FakeGraph(setup.optimizer))
    graphed((setup.train.rows[:MINIBATCH],), RATE)
    with pytest.raises(ValueError, match=r"\(1,\), the graph was captured for \(16,\)"):
        graphed((setup.train.rows[:1],), RATE)


def test_which_steps_of_ng_sgd_have_work_for_the_host() -> None:
    setup = make_setup("ng-sgd")
    step, found = plain_step(setup), []
    for _ in range(20):
        found.append(has_work(setup.optimizer))
        step((setup.train.rows[:MINIBATCH],), RATE)
    assert found == 12 * [True] + 2 * ([False] * 2 + [True] * 2)
    assert not has_work(make_setup().optimizer)


def test_the_state_of_a_training_is_taken_back_to_the_same_bits() -> None:
    setup, twin = make_setup("ng-sgd"), make_setup("ng-sgd")
    losses_of(setup, plain_step(setup), 30)
    losses_of(twin, plain_step(twin), 30)
    state = State(setup.model.network, setup.optimizer)
    losses_of(setup, plain_step(setup), 7)
    state.restore()
    assert losses_of(setup, plain_step(setup), 20) == losses_of(twin, plain_step(twin), 20)


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


def run_steps(setup: Setup, step: Step, minibatches: int) -> None:
    """As the training loop does."""
    tally = Tally(setup.model.network.parameters.device)
    order = shuffled_minibatches(setup.train, MINIBATCH, seed=1, epoch=1)
    next(order)  # the order of an epoch is drawn and copied at its first minibatch
    with HostWaits(setup.model.network.parameters.device) as waits:
        for rows in itertools.islice(order, minibatches):
            tally.add(*step((rows,), RATE), len(rows))
            setup.averaging.after_minibatch(len(rows))
    assert tally.frames == minibatches * MINIBATCH and waits.calls > 10 * minibatches
    assert waits.found == []


@pytest.mark.parametrize(("device", "precision"), [("cpu", "float32"), ("cpu", "bf16"), ("meta", "float32")])
def test_no_step_of_sgd_waits_for_the_device(device: str, precision: Precision) -> None:
    """`meta` has no values to wait for, and no copy to the host: what asks for either fails."""
    setup = replace(make_setup(device=torch.device(device)), precision=precision)
    run_steps(setup, plain_step(setup), 50)


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


def test_offsets_with_gaps_make_no_index_on_the_host() -> None:
    setup = make_setup(device=torch.device("meta"))
    transform = InputTransform((-2, 0, 1), DIM)
    with HostWaits(torch.device("meta")) as waits:
        gather(setup.train.corpus, transform, setup.train.rows[:9], torch.empty(9, 3 * DIM, device="meta"))
        labels_of(setup.train.corpus, setup.train.rows[:9], torch.device("meta"))
    assert waits.calls and not waits.found


def test_common_steps_of_ng_sgd_wait_for_nothing() -> None:
    """Those in which no update of the Fisher matrices starts or ends; the others read r x r results a step later."""
    setup = make_setup("ng-sgd")
    step, common = plain_step(setup), 0
    for rows in itertools.islice(itertools.cycle(setup.train.rows[: 8 * MINIBATCH].split(MINIBATCH)), 50):
        if has_work(setup.optimizer):
            step((rows,), RATE)
            continue
        common += 1
        with HostWaits(CPU) as waits:
            step((rows,), RATE)
        assert waits.found == []
    assert common == 20


def on_gpu(kind: Kind) -> tuple[Setup, Step]:
    setup = make_setup(kind, torch.device("cuda", 0), frames=20_000, hidden=256)
    graph = CudaGraph(torch.device("cuda", 0))
    return setup, GraphedStep(plain_step(setup), setup.model.network, setup.optimizer, graph)


@needs_gpu
@pytest.mark.parametrize("kind", ["sgd", "ng-sgd"])
def test_a_cuda_graph_trains_as_the_plain_step_does(kind: Kind) -> None:
    """Not yet seen on a GPU."""
    plain = make_setup(kind, torch.device("cuda", 0), frames=20_000, hidden=256)
    setup, graphed = on_gpu(kind)
    assert isinstance(graphed, GraphedStep)
    rates = (RATE, RATE / 2)
    expected = losses_of(plain, plain_step(plain), 100, rates)
    np.testing.assert_allclose(losses_of(setup, graphed, 100, rates), expected, rtol=1e-3)
    assert not graphed.given_up


@needs_gpu
@pytest.mark.parametrize("graph", [False, True])
def test_no_step_of_sgd_waits_for_a_gpu(graph: bool) -> None:
    """Not yet seen on a GPU."""
    setup, step = on_gpu("sgd")
    step = step if graph else plain_step(setup)
    tally, order = Tally(torch.device("cuda", 0)), list(shuffled_minibatches(setup.train, MINIBATCH, seed=1, epoch=1))
    step((order[0],), RATE)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for rows in order[:50]:
            tally.add(*step((rows,), RATE), len(rows))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert np.isfinite(tally.evaluation().loss)


@needs_gpu
@pytest.mark.parametrize("kind", ["sgd", "ng-sgd"])
def test_memory_does_not_grow(kind: Kind) -> None:
    """Over 10,000 minibatches, with a new capture now and then. Not yet seen on a GPU."""
    setup, step = on_gpu(kind)
    held = []
    for epoch in range(10):
        losses_of(setup, step, 1000, (RATE * 0.9**epoch,))
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_reserved())
    assert max(held[2:]) <= held[1]


def test_rows_of_a_resident_corpus_pass_through() -> None:
    setup = make_setup()
    order = list(shuffled_minibatches(setup.train, MINIBATCH, seed=1, epoch=1))
    laps: list[str] = []
    feed = Feed(setup.train, setup.model.transform, MINIBATCH, CPU, laps.append)
    assert feed.stream is None
    assert all(rows is given[0] for rows, given in zip(order, feed.over(order), strict=True))
    assert laps == ["data"] * len(order)
    short = FrameSet(setup.train.corpus, setup.train.rows[: MINIBATCH + 3])
    some = Feed(short, setup.model.transform, MINIBATCH, CPU).some(CHECKED)
    assert len(some) == CHECKED and all(torch.equal(rows, short.rows[:MINIBATCH]) for (rows,) in some)


class Streamed(Feed):
    """As if the corpus lay elsewhere than the model."""

    def __init__(
        self, frames: FrameSet, transform: InputTransform, minibatch: int, device: torch.device, *lap: Any
    ) -> None:
        super().__init__(frames, transform, minibatch, device, *lap)
        self.stream = Stream(frames.corpus, transform, minibatch, device)


def test_a_streamed_corpus_trains_to_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, shares = [], []

    class Recorder(NoRunDir):
        def record(self, metrics: dict[str, Any]) -> None:
            if metrics["split"] == "worker":
                shares.append(metrics["data_share"] + metrics["compute_share"])

    for feed in (Feed, Streamed):
        monkeypatch.setattr(loop, "Feed", feed)
        setup = replace(make_setup(), schedule=make_schedule(Schedule(epochs=2)))
        trained.append(loop.train(setup, Recorder(Path("nowhere"))).network.parameters)
    assert torch.equal(*trained)
    assert len(shares) == 4 and all(0.0 < share <= 1.0 for share in shares)
    some = Streamed(setup.train, setup.model.transform, MINIBATCH, CPU).some(CHECKED)
    plain = Feed(setup.train, setup.model.transform, MINIBATCH, CPU).some(CHECKED)
    for (frames, labels), (rows,) in zip(some, plain, strict=True):
        assert torch.equal(labels, setup.train.corpus.labels[rows])
        assert torch.equal(frames[:, 2 * DIM : 3 * DIM], setup.train.corpus.store[rows])


def test_cross_validation_reads_a_corpus_elsewhere() -> None:
    """`meta` stands for the other device: nothing but the copy may mix the two."""
    setup, meta = make_setup(), torch.device("meta")
    with pytest.raises(RuntimeError, match="meta"):  # no values there to judge by
        evaluate(setup.model.to(meta), setup.train)
    x = torch.empty(9, setup.model.network.input_dim, device="meta")
    gather(setup.train.corpus, setup.model.to(meta).transform, setup.train.rows[:9], x)
    assert labels_of(setup.train.corpus, setup.train.rows[:9], meta).device == meta


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
    cuda, setup = FakeCuda(monkeypatch), make_setup()
    plain = plain_step(setup)

    def told(inputs: Any, rate: float) -> Result:
        cuda.calls.append("step" if cuda.current == "main stream" else "step aside")
        return plain(inputs, rate)

    graphed = GraphedStep(told, setup.model.network, setup.optimizer, CudaGraph(CPU))
    for rate in (RATE, RATE, RATE / 2):
        graphed((setup.train.rows[:MINIBATCH],), rate)
    captured = ["step aside"] * 3 + ["capture", "step aside", "replay"]
    assert cuda.calls == [*captured, "replay", "synchronize", "reset", *captured]
    assert not graphed.given_up


def test_a_failed_capture_leaves_the_stream_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, setup = FakeCuda(monkeypatch, fails=True), make_setup()
    graphed = GraphedStep(plain_step(setup), setup.model.network, setup.optimizer, CudaGraph(CPU))
    graphed((setup.train.rows[:MINIBATCH],), RATE)
    assert graphed.given_up and cuda.current == "main stream"
