"""How a minibatch reaches the training step, and the step as one CUDA graph.

A step of SGD on a GPU is some sixty kernels, short ones among them; launched one by one, the host is slower than the
device. A graph holds them all and is launched at once. The plain step is the reference, and what runs wherever a graph
does not: on a CPU, where gradients are averaged, in the steps of NG-SGD that have work for the host, and where a graph
could not be captured or, in the first minibatches on the real device, gave something else.

What a graph fixes: the addresses of all tensors (so a minibatch is copied into the graph's own) and the learning rate
(so the step is captured anew when that changes, once an epoch at most).

Not yet seen on a GPU.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterable
from itertools import cycle, islice
from typing import Protocol

import torch
from torch import Tensor

from ddnn.data.minibatches import FrameSet, in_order
from ddnn.data.streaming import Stream
from ddnn.data.transform import InputTransform
from ddnn.model.network import Network
from ddnn.optim.natural_gradient import NaturalGradient
from ddnn.optim.ng_sgd import NaturalGradientDirection
from ddnn.optim.sgd import Sgd

log = logging.getLogger(__name__)

Inputs = tuple[Tensor, ...]
"""A minibatch: (rows,) of a corpus on the device, or (frames, labels) of one in host memory, from `Stream`."""
Result = tuple[Tensor, Tensor]
"""Summed loss and number of frames classified rightly, 0-dim, on the device. A graph's are overwritten by the next."""
Step = Callable[[Inputs, float], Result]
"""Minibatch, rate -> result; changes parameters and optimizer."""

WARM_UP = 3
"""Steps on the capturing stream before a capture: libraries take their memory then."""
CHECKED = 16
"""Minibatches of the check. NG-SGD has its first two steps without work for the host among them."""
LOSS_TOLERANCE, CHANGE_TOLERANCE = 1e-3, 2e-2
"""How far the graph's losses, and its change of the parameters, may be from the plain step's, relative to them. Both
run the same kernels; a library may choose another one for a product on another stream."""


class Feed:
    """The minibatches of a training set as a step reads them: by their rows, or streamed where the corpus lies in host
    memory and the training is on a GPU.

    Args:
        lap: as of `Stream.over`.
    """

    def __init__(
        self,
        frames: FrameSet,
        transform: InputTransform,
        minibatch: int,
        device: torch.device,
        lap: Callable[[str], None] = lambda what: None,
    ) -> None:
        self.frames, self.minibatch, self.lap = frames, minibatch, lap
        here = frames.corpus.store.device.type == device.type
        self.stream = None if here else Stream(frames.corpus, transform, minibatch, device)

    def over(self, order: Iterable[Tensor]) -> Generator[Inputs, None, None]:
        """One minibatch of `order` after another, each valid until the next. To be closed where it is left early."""
        if self.stream is not None:
            yield from self.stream.over(order, self.lap)
            return
        for rows in order:
            self.lap("data")
            yield (rows,)

    def some(self, count: int) -> list[Inputs]:
        """Copies of `count` minibatches from the start of the set, the same ones again where it is short."""
        whole = min(4, len(self.frames) // self.minibatch)
        taken = islice(in_order(self.frames, self.minibatch), whole)
        copies = [tuple(part.clone() for part in inputs) for inputs in self.over(taken)]
        return list(islice(cycle(copies), count))


class Graph(Protocol):
    """What records a function's work on the device, to do it again without the host."""

    def warm_up(self, run: Callable[[], Result]) -> None:
        """Runs it, where it will be captured."""

    def capture(self, run: Callable[[], Result]) -> Result:
        """Records it without running it; the results are filled by `replay`. RuntimeError where it cannot be."""

    def replay(self) -> None:
        """Does what was captured, in the order of the current stream."""

    def release(self) -> None:
        """Gives back what the last capture holds."""


class CudaGraph:
    """A CUDA graph with its own pool of memory, one at a time, captured on a stream of its own.

    One at a time, as a graph that is destroyed takes cuBLAS's workspace of its stream with it, and others captured
    there still use that (pytorch issue 193402).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None

    def warm_up(self, run: Callable[[], Result]) -> None:
        """Runs it `WARM_UP` times on the capturing stream."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP):
                run()
        current.wait_stream(self._stream)

    def capture(self, run: Callable[[], Result]) -> Result:
        """As `Graph.capture`. Other threads may go on with the device: they read minibatches ahead."""
        current = torch.cuda.current_stream(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                result = run()
        finally:
            torch.cuda.set_stream(current)  # a capture that fails at its end leaves its own stream behind
        self._graph = graph
        return result

    def replay(self) -> None:
        """As `Graph.replay`."""
        assert self._graph is not None
        self._graph.replay()

    def release(self) -> None:
        """As `Graph.release`."""
        if self._graph is not None:
            torch.cuda.synchronize(self._device)  # it may be running
            self._graph.reset()
        self._graph = None


class GraphedStep:
    """`plain` as a graph, captured at the first minibatch and whenever the rate changes.

    Where a capture fails, a warning gives the reason, and `plain` runs from then on.

    Args:
        plain: may have no host work but NG-SGD's updates of the Fisher matrices, whose steps are left to it.
        network, optimizer: what it changes.
    """

    def __init__(self, plain: Step, network: Network, optimizer: Sgd, graph: Graph) -> None:
        self.plain, self.network, self.optimizer, self.graph = plain, network, optimizer, graph
        self.given_up = False
        self._rate: float | None = None
        self._inputs: Inputs = ()
        self._result: Result | None = None

    def __call__(self, inputs: Inputs, rate: float) -> Result:
        """As `Step`."""
        if self.given_up or host_has_work(self.optimizer):
            return self.plain(inputs, rate)
        if rate != self._rate:
            self._capture(inputs, rate)
        if self._result is None:
            return self.plain(inputs, rate)
        self._take_in(inputs)
        self.graph.replay()
        for side in fisher_matrices(self.optimizer):
            side.t += 1  # what `precondition` does on the host
        return self._result

    def _take_in(self, inputs: Inputs) -> None:
        for own, given in zip(self._inputs, inputs, strict=True):
            if own.shape != given.shape:
                raise ValueError(f"minibatch is {tuple(given.shape)}, the graph was captured for {tuple(own.shape)}")
            own.copy_(given)

    def _capture(self, inputs: Inputs, rate: float) -> None:
        self._rate = self._result = None
        self._inputs = self._inputs or tuple(part.clone() for part in inputs)
        self._take_in(inputs)
        state = State(self.network, self.optimizer)
        try:
            self.graph.release()
            self.graph.warm_up(lambda: self.plain(self._inputs, rate))
            state.restore()
            self._result = self.graph.capture(lambda: self.plain(self._inputs, rate))
            self._rate = rate
        except RuntimeError as error:
            self.given_up = True
            log.warning("the step could not be captured as a CUDA graph, the plain step trains: %s", error)
        finally:
            state.restore()


class State:
    """Parameters, momentum and Fisher matrices as they are now."""

    def __init__(self, network: Network, optimizer: Sgd) -> None:
        self._tensors = [(one, one.clone()) for one in (network.parameters, optimizer.correction)]
        self._fisher = [(one, one.state_dict()) for one in fisher_matrices(optimizer)]

    def restore(self) -> None:
        """Makes them what they were, to the same bits, in the same memory."""
        for tensor, value in self._tensors:
            tensor.copy_(value)
        for side, state in self._fisher:
            side.load_state_dict(state)


def fisher_matrices(optimizer: Sgd) -> list[NaturalGradient]:
    """Those of NG-SGD, without the sides that have none; of SGD none."""
    direction = optimizer.direction
    if not isinstance(direction, NaturalGradientDirection):
        return []
    return [side for side in (*direction.inputs, *direction.outputs) if side.rank]


def host_has_work(optimizer: Sgd) -> bool:
    """Whether the next step starts an update of Fisher matrices, or ends the one that the last step started."""
    return any(side.updates_at(side.t) or side.updates_at(side.t - 1) for side in fisher_matrices(optimizer))


def checked(graphed: GraphedStep, minibatches: list[Inputs], rate: float) -> Step:
    """`graphed` where it does on `minibatches` what its plain step does, else the plain step, with a warning.

    Parameters and optimizer are left as they were. Waits for the device.
    """
    network, before = graphed.network, graphed.network.parameters.clone()
    state = State(network, graphed.optimizer)
    found = []
    for step in (graphed.plain, graphed):
        losses = torch.stack([step(inputs, rate)[0].clone() for inputs in minibatches])
        found.append((losses, network.parameters - before))
        state.restore()
    if graphed.given_up:
        return graphed.plain
    (plain_losses, plain_change), (losses, change) = found
    loss = _difference(losses, plain_losses)
    moved = _difference(change, plain_change)
    if loss <= LOSS_TOLERANCE and moved <= CHANGE_TOLERANCE:
        log.info(
            "the step is captured as a CUDA graph; over %d minibatches its losses differ by %.1e of the plain step's, "
            "what it makes of the parameters by %.1e of their change",
            *(len(minibatches), loss, moved),
        )
        return graphed
    log.warning(
        "the step captured as a CUDA graph is not the plain one, which trains: over %d minibatches the losses differ "
        "by %.1e of the plain step's (at most %.0e expected), what it makes of the parameters by %.1e of their change "
        "(%.0e)",
        *(len(minibatches), loss, LOSS_TOLERANCE, moved, CHANGE_TOLERANCE),
    )
    graphed.graph.release()
    return graphed.plain


def _difference(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|; NaN where either is not finite."""
    difference = float(torch.linalg.vector_norm(found - expected))
    size = float(torch.linalg.vector_norm(expected))
    return 0.0 if difference == 0.0 else difference / size if size else math.inf
