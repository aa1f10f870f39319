"""The training step of a worker that holds one stage of a network: a minibatch goes through the stages in microbatches.

A stage takes them in the order of `pipeline_schedule`; the links of its workspace (`ddnn.nn.stages`) receive and send.
Parameters change after the last backward pass alone, so that the step is that of one worker, to rounding. By default the rows
of all microbatches stay until then, and the gradient is that of the whole minibatch at once: products are as large as
without a pipeline, nothing is added up, NG-SGD preconditions what it always does, and the stages that have nothing more to
receive have these products left to compute. With SGD and the schedule `1f1b` the memory of a microbatch is used again once its
backward pass is over, and gradients are added up in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ddnn.data.batches import Batch
from ddnn.distributed.cost import Layout, Schedule, held_microbatches
from ddnn.nn.arithmetic import Float32
from ddnn.nn.network import Network, Workspace
from ddnn.nn.objective import CrossEntropy, MakeObjective, Sums
from ddnn.nn.stages import StagePartition
from ddnn.optim.ng_sgd import NgSgd
from ddnn.optim.schedule import MinibatchSizes
from ddnn.optim.sgd import Sgd
from ddnn.training.microbatches import cut_rows, default_microbatches, pipeline_schedule
from ddnn.training.step import EagerStep

Average = Callable[[Tensor], None]


class PipelineStep(EagerStep):
    """Keeps the rows of all microbatches until the update.

    Args:
        workspace: for a minibatch.
        partition: of the network.
        microbatches, schedule: into how many a minibatch is cut, and the order in which stages take them.
    """

    def __init__(
        self,
        workspace: Workspace,
        optimizer: Sgd,
        average: Average | None,
        make_objective: MakeObjective,
        partition: StagePartition,
        microbatches: int,
        schedule: Schedule,
    ) -> None:
        super().__init__(workspace, optimizer, average, make_objective)
        self.partition, self.microbatches = partition, microbatches
        self.passes = pipeline_schedule(schedule, partition.stage.world_size, microbatches)[partition.stage.rank]
        self._parts = list[tuple[slice, Workspace]]()  # rows of each microbatch, and where they are

    def differentiate(self, batch: Batch) -> Sums:
        """All passes of a minibatch; the figures are those of the last stage."""
        frames = batch.num_frames
        if sum(len(workspace.x) for _, workspace in self._parts) != frames:
            self._parts = [(rows, self.place(i, rows)) for i, rows in enumerate(cut_rows(frames, self.microbatches))]
        figures = torch.zeros(len(self.objective.figures), dtype=torch.float64)
        for i, _, forward in self.passes:
            rows, workspace = self._parts[i]
            if forward:
                figures += self.forward(workspace, Batch(batch.x[rows], batch.labels[rows]))
            else:
                self.backward(workspace)
        self.workspace.wait()
        return self.partition.of_last_stage(figures).unbind()

    def place(self, microbatch: int, rows: slice) -> Workspace:
        """Where these rows of a minibatch are."""
        return self.workspace.rows(rows)

    def forward(self, workspace: Workspace, batch: Batch) -> Tensor:
        """The figures of a microbatch, float64."""
        if not workspace.receives and workspace.x.data_ptr() != batch.x.data_ptr():
            workspace.x.copy_(batch.x)
        return torch.stack([*self.objective(workspace.forward(), batch, workspace.derivative)])

    def backward(self, workspace: Workspace) -> None:
        workspace.backward()


class AccumulatingPipelineStep(PipelineStep):
    """Keeps as many microbatches as are under way at once, and adds up their gradients: for SGD.

    Args:
        frames: of a minibatch at most.
        workspace: for `held` microbatches, each as long as the longest.
    """

    def __init__(self, frames: int, held: int, workspace: Workspace, optimizer: Sgd, *rest: Any) -> None:
        super().__init__(workspace, optimizer, *rest)
        network, self.held = optimizer.network, held
        if not workspace.receives:
            self.inputs = workspace.x.new_empty(frames, workspace.x.shape[1])
        self._gradients = network.split(optimizer.gradient)
        block = optimizer.gradient.new_empty(max(layer.num_parameters for layer in network.layers))
        own = [layer.views(block[: layer.num_parameters]) for layer in network.layers]
        self._made = workspace.layer_gradients or own

    def differentiate(self, batch: Batch) -> Sums:
        self.optimizer.gradient.zero_()
        return super().differentiate(batch)

    def place(self, microbatch: int, rows: slice) -> Workspace:
        start = microbatch % self.held * (len(self.workspace.x) // self.held)
        return self.workspace.rows(slice(start, start + rows.stop - rows.start))

    def backward(self, workspace: Workspace) -> None:
        super().backward(workspace)
        for i in self.optimizer.trainable:
            workspace.layer_gradient(i, self._made[i])
            for name, made in self._made[i].items():
                self._gradients[i][name].add_(made)

    def update(self, frames: int, lr: float) -> None:
        self.optimizer.step_along_gradient(frames, lr, self.average)


def make_eager_step(
    network: Network,
    sizes: MinibatchSizes,
    arithmetic: Float32,
    optimizer: Sgd,
    average: Average | None = None,
    make_objective: MakeObjective = CrossEntropy,
    *,
    generator: torch.Generator | None = None,
    schedule: Schedule = "fill-drain",
    microbatches: int | None = None,
) -> EagerStep:
    """The step of this worker's part of a network, for minibatches of these sizes. `generator`: as of `Workspace`, where one worker
    has all layers. `microbatches`: of a pipeline; None: `default_microbatches`."""
    partition, frames = network.partition, sizes.end
    if not isinstance(partition, StagePartition):
        workspace = Workspace(network, frames, arithmetic, generator)
        return EagerStep(workspace, optimizer, average, make_objective)
    stage, stages = partition.stage.rank, partition.stage.world_size
    number = microbatches or default_microbatches(sizes.start, stages, network.parameters.device.type)
    rest = (optimizer, average, make_objective, partition, number, schedule)
    held = held_microbatches(schedule, stage, Layout(stages=stages, microbatches=number))
    if held == number or isinstance(optimizer, NgSgd):
        return PipelineStep(Workspace(network, frames, arithmetic), *rest)
    workspace = Workspace(network, held * -(-frames // number), arithmetic)
    return AccumulatingPipelineStep(frames, held, workspace, *rest)
