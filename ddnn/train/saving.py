"""When a training writes a checkpoint, and when it ends on a signal with one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ddnn.errors import UserError
from ddnn.recipe.schema import Checkpoint
from ddnn.train.averaging import CHECKPOINT, NOTHING, STOP
from ddnn.train.checkpoint import Checkpoints
from ddnn.train.run_dir import RunDir
from ddnn.train.state import Standing, header_of, own_state, shared_state
from ddnn.train.stopping import Stopped, StopRequest

if TYPE_CHECKING:
    from ddnn.train.loop import Setup

log = logging.getLogger(__name__)


class Saver:
    """A training's checkpoints: after each epoch, at the intervals of the recipe, and where it is asked to stop.

    Args:
        recipe, data: the resolved recipe and a digest of the data, by which a resume knows that it goes on with the
            same training.
        first: whether this is the first worker, whose clock counts.
        clock: seconds.

    Attributes:
        standing: where the training stands; None before it begins.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        options: Checkpoint,
        stop: StopRequest,
        *,
        recipe: str,
        data: str,
        first: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.checkpoints, self.options, self.stop = checkpoints, options, stop
        self.recipe, self.data = recipe, data
        self._first, self._clock = first, clock
        self.standing: Standing | None = None
        self._saved_at, self._saved_done = clock(), 0

    def begin(self, setup: Setup, at: Standing) -> None:
        """The training begins: from here on a signal is heard at the next averaging."""
        self.standing, self._saved_at, self._saved_done = at, self._clock(), at.done
        setup.averaging.wish = self._wish
        self.stop.safe = True
        if setup.averaging.exchange.guard is not None:
            setup.averaging.exchange.guard.arm()

    def _wish(self) -> int:
        if self.stop.received is not None:
            return STOP
        if not self._first or self.standing is None:
            return NOTHING
        if self._clock() - self._saved_at >= 60.0 * self.options.every_minutes:
            return CHECKPOINT
        every = self.options.every_minibatches
        return CHECKPOINT if every is not None and self.standing.done - self._saved_done >= every else NOTHING

    def save(self, setup: Setup, at: Standing, run: RunDir) -> None:
        """Writes a checkpoint; collective, after an averaging in which `asked` was agreed, or between two epochs.

        Raises:
            Stopped: a worker was asked to stop.
            UserError: so it was, but there is no checkpoint to go on from.
        """
        averaging, stop = setup.averaging, setup.averaging.asked == STOP
        started = self._clock()
        with averaging.exchange.busy():
            run.settle()
            own = own_state(setup, at)  # first: it waits for what is under way, which shared_state is to have, too
            written = self.checkpoints.write(header_of(setup, at, self.recipe, self.data), shared_state(setup, at), own)
        self._saved_at, self._saved_done = self._clock(), at.done
        averaging.asked = NOTHING
        if written and at.length is not None:
            log.info(
                "checkpoint in epoch %d after %d of %d minibatches, %.1f s",
                *(at.epochs + 1, at.done, at.length, self._saved_at - started),
            )
        if not stop:
            averaging.start_block()
            return
        if not written and self.checkpoints.newest() is None:
            raise UserError(
                "the training was asked to stop, but no checkpoint could be written: it is lost",
                where=self.checkpoints.directory,
            )
        raise Stopped(self.stop.received or "a signal to another worker")
