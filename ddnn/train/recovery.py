"""What the workers do that are left when one has died (`parallel.on_failure: continue`).

They meet (`ddnn.parallel.survive.survivors`) and tell each other where they stand. Those that have come furthest count:
the model is the mean of theirs, schedule and best model are theirs too. A worker that was in the middle of an averaging
brings its model from before it, so no work of a survivor is lost. Then the data is shared out anew, and the epoch goes
on at the same share of its minibatches. Fisher matrices stay with their worker; momentum, and that of blocks, begin
anew.
"""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ddnn.errors import UserError
from ddnn.model.acoustic import transform_tensors
from ddnn.parallel.exchange import Exchange
from ddnn.parallel.mean import mean
from ddnn.parallel.survive import WorkerLost, survivors
from ddnn.train.checkpoint import Checkpoints
from ddnn.train.run_dir import NoRunDir
from ddnn.train.run_dir_files import CHECKPOINTS
from ddnn.train.state import Saved, header_of, own_state, read_header
from ddnn.train.stopping import Stopped

if TYPE_CHECKING:
    from ddnn.train.session import Session

log = logging.getLogger(__name__)


def meet(session: Session, error: str | None = None, stopped: str | None = None) -> None:
    """Meets the other workers that are left, and puts into `session` what they go on from. Collective.

    Args:
        error: what this worker cannot go on for: then none does.
        stopped: name of the signal that ended this worker before the training loop.

    Raises:
        UserError: a worker has an error.
        Stopped: a worker was ended by a signal.
    """
    session.stop.safe = True  # a signal is noted here, and acted on below
    if session.setup is not None:
        session.setup.averaging.abandon()
    while True:
        stopped = stopped or session.stop.received
        said = {"header": _header(session), "transform": _transform(session) is not None}
        told: list[dict[str, Any]]
        before = session.exchange
        session.exchange, told, lost = survivors(before, {**said, "error": error, "stopped": stopped})
        session.lost += [before.members[rank] for rank in lost]
        for one in told:
            if one["error"] is not None:
                raise UserError(one["error"])
        signals = [one["stopped"] for one in told if one["stopped"] is not None]
        if session.exchange.rank == 0 and isinstance(session.run, NoRunDir):
            session.take_over_run_dir()
        if session.exchange.rank == 0:
            for worker in session.lost[len(session.lost) - len(lost) :]:
                log.warning(
                    "worker %d on %s is lost; %d worker(s) go on, from the mean of their models, without momentum; its "
                    "frames are shared out",
                    *(worker.number, worker.host, session.exchange.size),
                )
        try:
            saved = _agree(session, told)
            if signals and saved is not None:
                _leave_checkpoint(session, saved)
        except WorkerLost:
            continue
        break
    session.saved, session.setup = saved, None
    if session.lost and saved is not None:
        session.run.forget_epochs_after(saved.header.epoch)
        for row in saved.header.rows:
            session.run.record_once(row)
    for worker in session.lost:
        epoch = 0 if saved is None else saved.header.epoch
        row = {"epoch": epoch, "minibatch": 0 if saved is None else saved.header.minibatch, "split": "lost"}
        session.run.record({**row, "rank": worker.number, "host": worker.host, "workers": session.exchange.size})
    session.lost.clear()
    if signals:
        raise Stopped(signals[0])


def _leave_checkpoint(session: Session, saved: Saved) -> None:
    """All are to stop: what they would have gone on from is what a resume goes on from. Collective."""
    checkpoints = Checkpoints(session.run.path / CHECKPOINTS, session.recipe.checkpoint.keep, session.exchange)
    checkpoints.write({**saved.header.model_dump(), "whole": False}, dict(saved.shared), dict(saved.own))


def _header(session: Session) -> dict[str, Any] | None:
    """Where this worker stands, as JSON; None before the training loop."""
    if session.standing is not None and session.setup is not None:
        return header_of(session.setup, session.standing, session.recipe_text, session.data)
    return None if session.saved is None else session.saved.header.model_dump()


def _transform(session: Session) -> Tensor | None:
    """Shift and scale of the input, (2, input_dim); None where there are none here."""
    if session.standing is not None and session.setup is not None:
        found = transform_tensors(session.setup.model)
    elif session.saved is not None:
        found = {name: one for name, one in session.saved.shared.items() if name.startswith("transform.")}
    else:
        return None
    return torch.stack([found["transform.shift"], found["transform.scale"]]) if len(found) == 2 else None


def _own(session: Session) -> tuple[dict[str, Tensor], Tensor | None]:
    """This worker's tensors, and its best parameters, on the CPU."""
    if session.standing is not None and session.setup is not None:
        own = own_state(session.setup, session.standing, exact=False)
        return {name: value.cpu().clone() for name, value in own.items()}, session.standing.best.cpu().clone()
    if session.saved is not None:
        return {name: value.clone() for name, value in session.saved.own.items()}, session.saved.shared["best"]
    return {}, None


def _agree(session: Session, told: list[dict[str, Any]]) -> Saved | None:
    """What all go on from; None where none has begun."""
    exchange = session.exchange
    headers = [None if one["header"] is None else read_header(one["header"], session.run.path) for one in told]
    places = {rank: (one.epoch, one.share) for rank, one in enumerate(headers) if one is not None}
    if not places:
        return None
    root = max(places, key=lambda rank: (places[rank], -rank))
    header = headers[root]
    assert header is not None
    own, best = _own(session)
    layers = header.model["layers"]
    size = sum(layer["outputs"] * (layer["inputs"] + 1) for layer in layers)
    best = _from(root, best, (size,), exchange)
    shared = {"best": best}
    if told[root]["transform"]:
        normalised = _from(root, _transform(session), (2, layers[0]["inputs"]), exchange)
        shared["transform.shift"], shared["transform.scale"] = normalised[0].clone(), normalised[1].clone()
    parameters = own["parameters"] if "parameters" in own else torch.zeros(size)
    counts = exchange.rank in places and places[exchange.rank][0] == header.epoch
    finite = math.isfinite(float(torch.linalg.vector_norm(parameters)))
    mean(exchange, parameters, float(counts and finite))
    own["parameters"] = parameters
    if not counts:
        own["tallies"] = torch.zeros(2, 3, dtype=torch.float64)
    return Saved(header, shared, own, exact=False, where=session.run.path)


def _from(root: int, mine: Tensor | None, shape: tuple[int, ...], exchange: Exchange) -> Tensor:
    """The tensor of worker `root`, float32 on the CPU, on every worker."""
    buffer = torch.zeros(shape)
    if exchange.rank == root and mine is not None:
        buffer.copy_(mine)
    exchange.broadcast(buffer, root)
    return buffer
