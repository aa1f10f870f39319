"""One training step: forward, loss, backward, update; and the same as CUDA graphs, which launch its some sixty kernels,
with NG-SGD three hundred, at once, as the host is too slow for one by one. The eager step is the reference, and what runs
wherever a graph does not: on a CPU, where gradients are averaged, where layers draw random numbers, and where a graph
could not be captured or gave something else when it was checked. A graph fixes the addresses of all tensors (so a
minibatch is copied into its own), the learning rate and the size of the minibatch (so a change of these captures the step
again)."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ddnn.data.batches import Batch
from ddnn.nn.arithmetic import Float32
from ddnn.nn.network import Network, Workspace
from ddnn.nn.objective import CrossEntropy, MakeObjective, Sums
from ddnn.nn.partition import Partition
from ddnn.optim.sgd import Sgd
from ddnn.util.errors import UserError

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Step = Callable[[Batch, float], Sums]
"""Minibatch, learning rate -> the sums of the objective's figures, a graph's overwritten by the next; changes parameters
and optimizer."""

WARM_UP = 3  # steps on the capturing stream before a capture: libraries take their memory then
VERIFIED = (
    16  # minibatches of the check: NG-SGD, if it updates its matrices at every fourth, has all its phases among them
)
LOSS_TOLERANCE, CHANGE_TOLERANCE = 1e-3, 2e-2
"""How far the graph's losses, and its change of the parameters, may be from the eager step's, relative to them. Both
run the same kernels; a library may choose another one for a product on another stream."""

CHECKED = 32  # frames of noise
GRADIENT_TOLERANCE = {"float32": 1e-3, "bf16": 0.2}
"""How far the gradient of a network that workers share may be from that of the whole one, relative to its norm."""


class EagerStep:
    """Forward, objective, backward and update, one operation after another; arguments as of `Sgd.step`. Afterwards the
    workspace's derivatives hold other values, and with NG-SGD its activations and `x` too: a minibatch that is used twice is
    loaded twice.

    Attributes:
        inputs: (frames, input_dim), where a minibatch is read without a copy.
        microbatches: in how many parts it goes through the network.
    """

    microbatches = 1

    def __init__(
        self,
        workspace: Workspace,
        optimizer: Sgd,
        average: Callable[[Tensor], None] | None = None,
        make_objective: MakeObjective = CrossEntropy,
    ) -> None:
        self.workspace, self.optimizer, self.average = workspace, optimizer, average
        self.objective, self.inputs = make_objective(workspace), workspace.x
        optimizer.set_arithmetic(workspace.arithmetic)

    def averaged_by(self, average: Callable[[Tensor], None] | None) -> EagerStep:
        """The same step, in the same memory, where workers average gradients otherwise."""
        step = copy.copy(self)
        step.average = average
        return step

    def __call__(self, batch: Batch, lr: float) -> Sums:
        sums = self.differentiate(batch)
        self.update(batch.num_frames, lr)
        return sums

    def differentiate(self, batch: Batch) -> Sums:
        """Forward, objective and backward."""
        workspace = self.workspace.of(batch.num_frames)
        self.load(batch)
        sums = self.objective(workspace.forward(), batch, workspace.derivative)
        workspace.backward()
        return sums

    def update(self, frames: int, lr: float) -> None:
        """Where workers average gradients, each has its part in all of their updates."""
        if self.objective.updates or self.average is not None:
            self.optimizer.step(self.workspace.of(frames), lr, self.average)

    def load(self, batch: Batch) -> None:
        """Copies the minibatch to `workspace.x` where it is elsewhere."""
        x = self.workspace.x[: batch.num_frames]
        if batch.x.data_ptr() != x.data_ptr():
            x.copy_(batch.x)


class CudaGraphs:
    """Records the work that functions give to the device, to do it again without the host: CUDA graphs by name, each with
    its own pool of memory, captured on a stream of their own. They are released together, as one that is destroyed takes
    cuBLAS's workspace of its stream with it, and others captured there still use that (pytorch issue 193402)."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, object]] = {}  # beside each what holds its memory

    def warm_up(self, run: Callable[[], object]) -> None:
        """Runs it `WARM_UP` times where it will be captured."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UP):
                run()
        current.wait_stream(self._stream)

    def capture(self, name: Hashable, run: Callable[[], Result]) -> Result:
        """Records it without running it; the results are filled by `replay`. RuntimeError where it cannot be.

        Other threads may keep using the device: they read minibatches ahead."""
        current = torch.cuda.current_stream(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                result = run()
        finally:
            torch.cuda.set_stream(current)  # a capture that fails at its end leaves its own stream behind
        self._graphs[name] = graph, run
        return result

    def replay(self, name: Hashable) -> None:
        """Does what was captured under this name, in the order of the current stream."""
        self._graphs[name][0].replay()

    def release(self) -> None:
        """Gives back what the captures hold."""
        if self._graphs:
            torch.cuda.synchronize(self._device)  # they may be running
        for graph, _ in self._graphs.values():
            graph.reset()
        self._graphs.clear()


class CudaGraphStep:
    """The eager step as graphs, captured at the first minibatch and whenever learning rate or minibatch size change. Without
    work for the host the whole step is one graph. Else there is one up to the derivatives, during which the host does
    what the last step has left to it, and one for each `Sgd.phase` of the update. Where a capture fails, a warning gives
    the reason, and the eager step runs from then on."""

    def __init__(self, eager: EagerStep, graphs: CudaGraphs) -> None:
        self.eager, self.optimizer, self.graphs = eager, eager.optimizer, graphs
        self.disabled = False  # a capture has failed
        self._made_for: tuple[float, int] | None = None  # this learning rate and minibatch size
        self._labels = torch.empty(0)
        self._results: dict[Hashable, Any] = {}  # of the graphs

    def __call__(self, batch: Batch, lr: float) -> Sums:
        size, optimizer = batch.num_frames, self.optimizer
        if not self.disabled and self._made_for != (lr, size):
            self._prepare(batch, lr)
        if self.disabled:
            self.graphs.release()
            return self.eager(batch, lr)
        self._copy_inputs(batch)
        own, replayed = self._own_batch(size), partial(optimizer.replayed, size)
        if not optimizer.preconditioners:
            return self._do("step", partial(self.eager, own, lr), replayed)
        sums = self._do("derivatives", partial(self.eager.differentiate, own))
        optimizer.finish_updates()
        phase, update = optimizer.phase(size), partial(self.eager.update, size, lr)
        if phase is None:
            update()
        else:
            self._do(phase, update, replayed)
        return sums

    def _copy_inputs(self, batch: Batch) -> None:
        self.eager.load(batch)
        self._labels.copy_(batch.labels)

    def _own_batch(self, size: int) -> Batch:
        return Batch(self.eager.workspace.x[:size], self._labels)

    def _prepare(self, batch: Batch, lr: float) -> None:
        """Gives back the graphs, and warms up for those of another learning rate or size of a minibatch."""
        size = batch.num_frames
        self._results.clear()
        self._labels = self._labels if len(self._labels) == size else batch.labels.clone()
        self._copy_inputs(batch)
        own, snapshot = self._own_batch(size), Snapshot(self.optimizer)
        try:
            self.graphs.release()
            self.graphs.warm_up(lambda: self.eager(own, lr))
            self._made_for = lr, size
        except RuntimeError as error:
            self._give_up(error)
        finally:
            snapshot.restore()

    def _do(self, name: Hashable, run: Callable[[], Result], replayed: Callable[[], None] = lambda: None) -> Result:
        """`run` by the graph of that name, which is captured if there is none, and `replayed` after it; without a graph
        `run` itself."""
        if name not in self._results and not self.disabled:
            self._capture(name, run)
        if self.disabled:
            return run()
        self.graphs.replay(name)
        replayed()
        return cast(Result, self._results[name])

    def _capture(self, name: Hashable, run: Callable[[], object]) -> None:
        sides = self.optimizer.preconditioners
        states = [side.host_state() for side in sides]
        try:
            self._results[name] = self.graphs.capture(name, run)
        except RuntimeError as error:
            self._give_up(error)
        finally:
            for side, state in zip(sides, states, strict=True):
                side.set_host_state(state)

    def _give_up(self, error: RuntimeError) -> None:
        self.disabled = True
        log.warning("the step could not be captured as a CUDA graph, training eagerly: %s", error)


class Snapshot:
    """Parameters, momentum and Fisher matrices of a training as they are now."""

    def __init__(self, optimizer: Sgd) -> None:
        self._optimizer, self._parameters = optimizer, optimizer.network.parameters.clone()
        self._state = {name: value.clone() for name, value in optimizer.state_dict().items()}

    def restore(self) -> None:
        """To the same bits, in the same memory."""
        self._optimizer.network.load_parameters(self._parameters)
        self._optimizer.load_state_dict(self._state)


def make_step(eager: EagerStep, sample: Callable[[int], list[Batch]], lr: float, *, graphs: bool = True) -> Step:
    """The eager step, or on a GPU the same as a CUDA graph where `graphs` are allowed and it does the same here: at
    `lr`, on some minibatches that `sample` (`BatchLoader.sample`) gives."""
    device = eager.workspace.x.device
    if device.type != "cuda" or not graphs or eager.average is not None or eager.workspace.generator is not None:
        return eager
    return verified(CudaGraphStep(eager, CudaGraphs(device)), sample(VERIFIED), lr)


def verified(graphed: CudaGraphStep, minibatches: list[Batch], lr: float) -> Step:
    """`graphed` where it does on `minibatches` what its eager step does, else the eager step, with a warning.
    Parameters and optimizer are left as they were."""
    network = graphed.optimizer.network
    before, snapshot = network.parameters.clone(), Snapshot(graphed.optimizer)
    found = []
    for step in (graphed.eager, graphed):
        losses = torch.stack([step(batch, lr)[0].clone() for batch in minibatches])
        found.append((losses, network.parameters - before))
        snapshot.restore()
    if graphed.disabled:
        return graphed.eager
    (eager_losses, eager_change), (losses, change) = found
    loss, moved = _difference(losses, eager_losses), _difference(change, eager_change)
    if loss <= LOSS_TOLERANCE and moved <= CHANGE_TOLERANCE:
        log.info(
            "the step is captured as a CUDA graph; over %d minibatches its losses differ from the eager step's by %.1e, "
            "its updates by %.1e (both relative)",
            *(len(minibatches), loss, moved),
        )
        return graphed
    log.warning(
        "CUDA graph disabled, training eagerly: over %d minibatches its losses differ from the eager step's by %.1e "
        "(limit %.0e), its updates by %.1e (limit %.0e)",
        *(len(minibatches), loss, LOSS_TOLERANCE, moved, CHANGE_TOLERANCE),
    )
    graphed.graphs.release()
    return graphed.eager


def check_split(whole: Network, partition: Partition, arithmetic: Float32) -> None:
    """UserError where the workers that share a network do not compute its gradient, as where messages arrive in the wrong
    place: that of `CHECKED` frames of noise is compared with the whole network's, which each of them computes by itself.
    Collective over the replica."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(CHECKED, whole.input_dim, generator=generator)
    labels = torch.randint(whole.output_dim, (CHECKED,), generator=generator).to(whole.parameters.device)
    gradients = []
    for network in (whole, whole.part_of(partition)):
        workspace = Workspace(network, CHECKED, arithmetic)
        if not workspace.receives:
            workspace.x.copy_(x)
        CrossEntropy(workspace)(workspace.forward(), Batch(workspace.x, labels), workspace.derivative)
        workspace.backward()
        gradients.append(workspace.gradient(torch.zeros_like(network.parameters)))
    expected = partition.own(gradients[0])
    difference, norm = (float(partition.norm(vector)) for vector in (gradients[1] - expected, expected))
    if not difference <= GRADIENT_TOLERANCE[arithmetic.precision] * norm:
        message = f"the gradient of {CHECKED} frames that workers compute together differs by {difference:.3g} "
        message += f"from that of one, whose norm is {norm:.3g}: their messages do not arrive as they were sent"
        raise UserError(message, hint="try another MPI, or train with workers that do not share a model")


def _difference(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected|; NaN where either is not finite."""
    difference = float(torch.linalg.vector_norm(found - expected))
    size = float(torch.linalg.vector_norm(expected))
    return 0.0 if difference == 0.0 else difference / size if size else math.inf
