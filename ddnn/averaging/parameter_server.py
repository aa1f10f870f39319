"""A parameter server: Downpour SGD of Dean et al., "Large Scale Distributed Deep Networks", NIPS 2012, section 4.1.

The server has the parameters. A worker sends the change of its own since it last fetched the server's, which adds it, and
fetches what the server then has. No worker waits for another to train; what it trains on is stale by the changes that others
sent meanwhile. Which changes come first depends on the speed of the workers, so that no training is repeatable.

The server is a thread of worker 0, beside the training of that worker, which exchanges with it in memory. A round begins with
the same parameters on all workers, and ends for all of them: with the epoch, or where a worker has requested something of
all. Within a round this thread alone uses the MPI of its process, so that MPI_THREAD_SERIALIZED is enough. MPI's
one-sided messages would need none, but Open MPI moves them only while the process that they go to is in a call of MPI."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ddnn.averaging.averager import BlockingAverager, Request
from ddnn.averaging.strategy import NoFiniteModelError
from ddnn.distributed.communicator import Communicator, StagingBuffer
from ddnn.distributed.mpi import require_thread_level

log = logging.getLogger(__name__)

LAST = -1
"""`Push.left` of a worker's last exchange of a round that nobody has ended by a request."""
PAUSE = 1e-3
"""Seconds between two looks for a message: who waits takes no core from those who train."""


class Push(NamedTuple):
    """What a worker says with its change."""

    request: int  # what it asks all workers to do, a `Request`; the highest counts
    left: int  # exchanges that it will still make in the epoch before its last; or `LAST`
    counts: bool  # whether the change is to be added


class Answer(NamedTuple):
    """What the server says with its parameters."""

    request: int  # what all workers are to do: this was the worker's last exchange of the round. 0: it continues
    staleness: int  # changes by other workers that were added since this one last fetched


class Link:
    """One worker's connection to the server; the base, which is that of all workers but 0."""

    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def begin(self, parameters: Tensor) -> None:
        """To be called within a round before anything is exchanged; the round begins where it has not. `parameters`:
        (num_parameters,) float32, those from which all workers began it."""

    def exchange(self, vector: Tensor, push: Push) -> Answer:
        """Sends `vector`, (num_parameters,) float32, the change since the last exchange or the beginning of the round;
        vector <- the server's parameters."""
        comm, answer = self.comm, torch.empty(len(Answer._fields), dtype=torch.int64)
        comm.isend(torch.tensor(push, dtype=torch.int64), 0).wait()
        with comm.waiting():
            while comm.poll() is None:
                time.sleep(PAUSE)
        comm.irecv(answer, 0).wait()
        comm.isend(vector, 0).wait()
        comm.irecv(vector, 0).wait()
        return Answer(*answer.tolist())

    def finish(self, vector: Tensor) -> None:
        """On worker 0 vector <- the server's parameters, once every worker has made its last exchange of the round."""


class ParameterServer(Link):
    """The server, and the link of worker 0 to it.

    Attributes:
        parameters: (num_parameters,) float32, on the CPU.
        scale: what each change is multiplied by.
    """

    _thread: threading.Thread | None = None

    def __init__(self, comm: Communicator, like: Tensor, scale: float) -> None:
        """`like`: a vector as those that will be exchanged."""
        super().__init__(comm)
        self.scale, self._lock = scale, threading.Lock()
        self.parameters, self._received = torch.empty_like(like), torch.empty_like(like)

    def begin(self, parameters: Tensor) -> None:
        if self._thread is not None:
            return
        self.parameters.copy_(parameters)
        workers = self.comm.world_size
        self._wanted = self._request = self._num_changes = 0
        self._fetched, self._left = [0] * workers, [0] * workers  # not known yet: none is left for certain
        self._pending = set(range(1, workers))
        self._thread = threading.Thread(target=self._serve, name="parameter server", daemon=True)
        self._thread.start()

    def exchange(self, vector: Tensor, push: Push) -> Answer:
        with self._lock:
            answer = self._answer(0, push)
            self._add(0, vector, push)
            vector.copy_(self.parameters)
        return answer

    def finish(self, vector: Tensor) -> None:
        if self._thread is not None:
            with self.comm.waiting():
                self._thread.join()
        self._thread = None
        vector.copy_(self.parameters)

    def _serve(self) -> None:
        """Answers the other workers until each has made its last exchange of the round."""
        numbers = torch.empty(len(Push._fields), dtype=torch.int64)
        while self._pending:
            source = self.comm.poll()
            if source is None:
                time.sleep(PAUSE)
                continue
            with self._lock:
                self.comm.irecv(numbers, source).wait()
                push = Push(*numbers.tolist())
                answer = self._answer(source, push)
                self.comm.isend(torch.tensor(answer), source).wait()
                self.comm.irecv(self._received, source).wait()
                self._add(source, self._received, push)
                self.comm.isend(self.parameters, source).wait()

    def _answer(self, source: int, push: Push) -> Answer:
        """A request is granted where every other worker will hear of it in an exchange that is not its last."""
        self._wanted, self._left[source] = max(self._wanted, push.request), push.left
        others = self._left[:source] + self._left[source + 1 :]
        if not self._request and push.left != LAST and min(others) > 0:
            self._request = self._wanted
        if self._request or push.left == LAST:
            self._pending.discard(source)
        return Answer(self._request, self._num_changes - self._fetched[source])

    def _add(self, source: int, change: Tensor, push: Push) -> None:
        if push.counts:
            self.parameters.add_(change, alpha=self.scale)
            self._num_changes += 1
        self._fetched[source] = self._num_changes


class AsyncAverager(BlockingAverager):
    """Asynchronous SGD: after each interval of its own this worker sends its change to the parameter server and continues
    from what the server has. Requests travel with these exchanges: all workers that hear of one wait for each other, and
    take the server's parameters, as at the end of an epoch. Within an epoch nothing else may be sent in any group."""

    def _prepare(self) -> None:
        require_thread_level(self.groups.world, "strategy", "async serves")
        self._staging = StagingBuffer(self.parameters, "host")
        self._fetched = self._staging.copy_in(self.parameters).clone()
        data, scale = self.groups.data, self.config.update_scale or 1.0 / self.groups.data.world_size
        self._link = Link(data) if data.rank else ParameterServer(data, self._fetched, scale)

    def begin_epoch(self, num_minibatches: int, num_frames: int) -> int:
        """Each worker exchanges as often as it completes an interval, however many the others do."""
        super().begin_epoch(num_minibatches, num_frames)
        self._averagings_per_epoch = self.interval.completed(num_minibatches, num_frames)
        self._fetched.copy_(self._staging.copy_in(self.parameters))
        return num_minibatches

    def log_averagings(self) -> None:
        if self.groups.world.rank == 0:
            log.info(
                "asynchronous SGD: worker 0 exchanges %d times per epoch with the parameter server, which runs beside it; "
                "results depend on the speed of the workers: no training is repeatable",
                self._averagings_per_epoch,
            )

    def after_minibatch(self, frames: int) -> bool:
        self._link.begin(self._fetched)
        return super().after_minibatch(frames)

    def _after_interval(self, intervals: int) -> bool:
        self.requested = self._exchange((self._averagings_per_epoch or 0) - intervals)
        self.counters.averagings += 1
        if self.requested:
            self._end_round()
        return True

    def _exchange(self, left: int) -> Request:
        """theta <- the server's parameters, which have this worker's change added; `left` as in `Push`."""
        finite, self._remainder_frames = self._is_finite(self.parameters), 0
        with self._staged_parameters() as vector:
            answer = self._link.exchange(vector.sub_(self._fetched), Push(self.local_request(), left, finite))
            self._fetched.copy_(vector)
        self.counters.staleness.append(answer.staleness)
        if not finite:
            self._reset_excluded()
        elif self.config.local_momentum == "reset":
            self.optimizer.clear_momentum()
        return Request(answer.request)

    def _end_round(self) -> None:
        """theta <- the server's parameters once all workers' changes are added. Collective."""
        data = self.groups.data
        with self._staged_parameters() as vector:
            self._link.finish(vector)
            data.barrier()
            data.broadcast(vector, 0)
            self._fetched.copy_(vector)
        if not self._is_finite(self._fetched):
            raise NoFiniteModelError("the training diverged: the parameters of the server are not finite")

    def wait(self) -> None:
        """Ends the round, with what this worker has trained since its last exchange."""
        self._link.begin(self._fetched)
        self._exchange(LAST)
        self._end_round()

    def end_epoch(self) -> None:
        self.wait()
        self.timer.mark("averaging")

    def state_dict(self) -> dict[str, Tensor]:
        staleness = torch.tensor(self.counters.staleness, dtype=torch.float64)
        return super().state_dict() | {"staleness": staleness}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        self.counters.staleness = state["staleness"].tolist()
        self._fetched.copy_(self._staging.copy_in(self.parameters))
