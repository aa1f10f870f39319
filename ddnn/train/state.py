"""All that a training is made of at one moment: for checkpoints, and to go on in memory after a worker's death.

Three parts: a header of plain values and `shared` tensors, the same on every worker, and each worker's `own` tensors.
Put back on as many workers, they are the training to the same bits. On another number of workers (or after a death) it
goes on from the mean of the workers' models: `Saved.exact` says which, and docs/reliability.md what is not exact then.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from ddnn.data.minibatches import num_minibatches
from ddnn.errors import DataError
from ddnn.model.acoustic import AcousticModel, assemble_model, describe_model, transform_tensors
from ddnn.train.evaluate import Tally
from ddnn.train.step import fisher_matrices

if TYPE_CHECKING:
    from ddnn.train.loop import Setup

Count = Annotated[int, Field(ge=0, le=2**53)]


class Header(BaseModel):
    """Plain values of a checkpoint, from a file that anybody may have written.

    Attributes:
        epoch, minibatch: epochs finished, and minibatches of the next one that the first worker has behind it.
        share: the same as a share of that epoch, 0 to 1.
        schedule: its state.
        precision: that the training chose.
        model: `describe_model`.
        recipe: the resolved recipe.
        data: digest of the utterances, their lengths and their pdfs.
        rows: of metrics.jsonl, the last finished epoch's.
        seconds: that the epoch under way has taken.
        whole: false where it was written by workers that had just lost others, so that no exact resume is possible.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    epoch: Count
    minibatch: Count
    share: Annotated[float, Field(ge=0.0, le=1.0)]
    schedule: dict[str, float | int | bool]
    precision: Literal["float32", "bf16"]
    model: dict[str, Any]
    recipe: str
    data: str
    rows: list[dict[str, Any]] = []
    seconds: Annotated[float, Field(ge=0.0, le=1e9)] = 0.0
    whole: bool = True


def read_header(values: object, where: Path) -> Header:
    """The header, checked; DataError where it is none."""
    try:
        return Header.model_validate(values)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_context=False, include_input=False)[0]
        key = ".".join(str(part) for part in detail["loc"])
        raise DataError(f"no checkpoint of a training: {key}: {detail['msg']}", where=where) from error


@dataclass
class Standing:
    """Where a training stands within its epochs, on this worker.

    Attributes:
        best: (num_parameters,) parameters of the last epoch that was kept.
        epochs: finished ones.
        done: minibatches of the epoch under way that are behind it.
        length: minibatches of that epoch; None between two epochs.
        seconds: that the epoch took before it was broken off.
        begun: when it would have begun had it not been, by time.perf_counter.
        tally, block: sums of the epoch, and those since the last averaging.
        rows: see `Header`.
    """

    best: Tensor
    epochs: int = 0
    done: int = 0
    length: int | None = None
    seconds: float = 0.0
    begun: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tally, self.block = Tally(self.best.device), Tally(self.best.device)

    def elapsed(self) -> float:
        """Seconds that the epoch under way has taken; between two epochs 0, or what is to be gone on with had taken."""
        return self.seconds if self.length is None else time.perf_counter() - self.begun

    def end_epoch(self) -> None:
        """The epoch under way is finished."""
        self.epochs, self.done, self.length, self.seconds = self.epochs + 1, 0, None, 0.0
        self.tally, self.block = Tally(self.best.device), Tally(self.best.device)


@dataclass(frozen=True)
class Saved:
    """What a training goes on from.

    Attributes:
        exact: whether all is as it was on this number of workers, to the same bits.
        where: the checkpoint, for messages.
    """

    header: Header
    shared: Mapping[str, Tensor]
    own: Mapping[str, Tensor]
    exact: bool
    where: Path

    def model(self) -> AcousticModel:
        """The model with its best parameters, on the CPU."""
        tensors = {name: value for name, value in self.shared.items() if name.startswith("transform.")}
        if "best" not in self.shared:
            raise DataError("best: nothing found, parameters of a network expected", where=self.where)
        return assemble_model(self.header.model, {**tensors, "parameters": self.shared["best"]}, self.where)


def header_of(setup: Setup, at: Standing, recipe: str, data: str) -> dict[str, Any]:
    """The header, as JSON."""
    total = num_minibatches(setup.train, setup.minibatch)
    return {
        "epoch": at.epochs,
        "minibatch": at.done,
        "share": at.done / total if total else 0.0,
        "schedule": setup.schedule.state(),
        "precision": setup.precision,
        "model": describe_model(setup.model),
        "recipe": recipe,
        "data": data,
        "rows": at.rows,
        "seconds": at.elapsed(),
    }


def shared_state(setup: Setup, at: Standing) -> dict[str, Tensor]:
    """Tensors that are the same on every worker: `best`, `transform.*` and `Mixing.shared_state`.

    (num_parameters,) float32 each on the training's device, `transform.*` (input_dim,) on the CPU; those in use, not
    copies.
    """
    blocks = {} if setup.averaging.alone else setup.averaging.mixing.shared_state()
    return {"best": at.best, **transform_tensors(setup.model), **blocks}


def own_state(setup: Setup, at: Standing, *, exact: bool = True) -> dict[str, Tensor]:
    """Tensors of this worker; those in use, not copies, where they are.

    `parameters` and, with momentum, `momentum`: (num_parameters,) float32. `fisher.N.*`: `NaturalGradient.state_dict`.
    `tallies`: (2, 3) float64, loss, rightly classified frames and frames of the epoch and of a block. `standing`: (2,)
    int64, minibatches done and in all, -1 between epochs. `seconds`: 0-dim float64. `averaging.*`: `Averaging.state`.

    Args:
        exact: False leaves out what cannot be had in the middle of an averaging: momentum and all from `standing` on.
    """
    found = {"parameters": setup.model.network.parameters}
    for number, side in enumerate(fisher_matrices(setup.optimizer)):
        found |= {f"fisher.{number}.{name}": value for name, value in side.state_dict().items()}
    sums = torch.tensor(
        [[t.loss.item(), float(t.right.item()), float(t.frames)] for t in (at.tally, at.block)], dtype=torch.float64
    )
    if not exact:  # a block that a model left out has made is in no figure
        sums[~sums.isfinite().all(dim=1)] = 0.0
    found["tallies"] = sums
    if exact:
        if setup.optimizer.momentum:
            found["momentum"] = setup.optimizer.correction
        found["standing"] = torch.tensor([at.done, -1 if at.length is None else at.length], dtype=torch.int64)
        found["seconds"] = torch.tensor(at.elapsed(), dtype=torch.float64)
        found |= {f"averaging.{name}": value for name, value in setup.averaging.state().items()}
    return found


def mean_of_parts(parts: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The first worker's own tensors where there are fewer or more than before: mean model, all workers' sums.

    The mean counts every worker alike, as if each had trained on as many frames since the last averaging.
    """
    first: Mapping[str, Tensor] = {}
    workers = 0
    for part in parts:
        workers += 1
        if not first:
            first, total, sums = part, part["parameters"].double(), part["tallies"].clone()
        else:
            total += part["parameters"]
            sums += part["tallies"]
    return {**first, "parameters": (total / workers).float(), "tallies": sums}


def restore(setup: Setup, saved: Saved) -> Standing:
    """Puts everything back. Collective where not `exact`: all take the first worker's model.

    Raises:
        DataError: it does not fit this training.
    """
    header, own, shared, where = saved.header, saved.own, saved.shared, saved.where
    parameters, averaging = setup.model.network.parameters, setup.averaging
    setup.schedule.load(header.schedule)
    parameters.copy_(_like(parameters, own, "parameters", where))
    at = Standing(parameters.clone().copy_(_like(parameters, shared, "best", where)))
    at.epochs, at.rows = header.epoch, list(header.rows)
    for number, side in enumerate(fisher_matrices(setup.optimizer)):
        prefix = f"fisher.{number}."
        state = {name.removeprefix(prefix): value for name, value in own.items() if name.startswith(prefix)}
        if state or saved.exact:  # a worker that was not there before has none
            side.load_state_dict(state)
    sums = _like(torch.zeros(2, 3, dtype=torch.float64), own, "tallies", where)
    if not bool((sums.abs() < 2**53).all()):  # false for NaN too
        raise DataError("tallies: sums of an epoch expected, found others", where=where)
    for tally, (loss, right, frames) in zip((at.tally, at.block), sums.tolist(), strict=True):
        tally.loss.fill_(loss)
        tally.right.fill_(int(right))
        tally.frames = int(frames)
    if not saved.exact:
        at.tally.take_over(at.block)
        if averaging.alone:
            at.tally, at.block = at.block, at.tally
        total = num_minibatches(setup.train, setup.minibatch)
        at.done, at.seconds = min(total, round(header.share * total)), header.seconds
        averaging.share()
        return at
    if setup.optimizer.momentum:
        setup.optimizer.correction.copy_(_like(parameters, own, "momentum", where))
    at.done, length = _like(torch.zeros(2, dtype=torch.int64), own, "standing", where).tolist()
    at.length = None if length < 0 else length
    at.seconds = float(_like(torch.zeros((), dtype=torch.float64), own, "seconds", where))
    try:
        prefix = "averaging."
        averaging.load({name.removeprefix(prefix): one for name, one in own.items() if name.startswith(prefix)})
        if not averaging.alone:
            averaging.mixing.load_shared_state(shared)
    except (KeyError, ValueError, TypeError, IndexError, OverflowError, RuntimeError) as error:
        raise DataError(f"the checkpoint's averaging does not fit: {error}", where=where) from error
    return at


def _like(wanted: Tensor, tensors: Mapping[str, Tensor], name: str, where: Path) -> Tensor:
    found = tensors.get(name)
    if found is None or found.shape != wanted.shape or found.dtype != wanted.dtype:
        shown = "nothing" if found is None else f"{tuple(found.shape)} {found.dtype}"
        raise DataError(f"{name}: {shown} found, {tuple(wanted.shape)} {wanted.dtype} expected", where=where)
    return found
