"""A training of one worker, over stops and deaths: its run dir, its exchange, what it goes on from."""

from __future__ import annotations

import logging
from pathlib import Path

from ddnn.errors import RecipeError, UserError
from ddnn.parallel.exchange import Exchange, Member
from ddnn.parallel.failures import Job
from ddnn.parallel.launch import fault_tolerant
from ddnn.progress import only_first_worker_shows
from ddnn.recipe.load import dump_recipe
from ddnn.recipe.schema import Recipe
from ddnn.train.loop import Setup
from ddnn.train.run_dir import NoRunDir, RunDir
from ddnn.train.run_dir_files import CHECKPOINTS, PRETRAIN
from ddnn.train.state import Saved, Standing
from ddnn.train.stopping import StopRequest

log = logging.getLogger(__name__)


class Session:
    """A training, as it goes on over stops and over the deaths of workers. Each worker has one.

    Attributes:
        recipe: as it was begun; `exchange.size` may since have become smaller than its number of workers.
        saved: what to go on from; None to begin.
        setup: of the loop, once it is about to run; None while data is loaded.
        opened: whether the run dir is this training's. Before, no worker may take it over: it may be another one's.
        lost: workers that have died and are not yet recorded.
    """

    def __init__(self, recipe: Recipe, run_dir: Path, device: str, job: Job, stop: StopRequest, resume: bool) -> None:
        self.recipe, self.device, self.job, self.stop, self.resume = recipe, device, job, stop, resume
        self.run: RunDir = NoRunDir(run_dir)
        self.opened = False
        self.recipe_text = dump_recipe(recipe)
        self.data = ""
        self.saved: Saved | None = None
        self.setup: Setup | None = None
        self.lost: list[Member] = []
        self._log_file: logging.Handler | None = None

    @property
    def exchange(self) -> Exchange:
        """This worker's way to those that are left."""
        return self.job.exchange

    @exchange.setter
    def exchange(self, exchange: Exchange) -> None:
        self.job.exchange = exchange

    @property
    def standing(self) -> Standing | None:
        """Where the loop stands; None before it."""
        return None if self.setup is None or self.setup.saver is None else self.setup.saver.standing

    def open_run_dir(self) -> None:
        """The first worker claims the run dir, and all know whether it may. Collective.

        Raises:
            UserError: it may not; on all workers.
        """
        refused = None
        if self.exchange.rank == 0:
            try:
                self.run = RunDir(self.run.path, self.resume)
                self.open_log()
            except UserError as error:
                refused = [error.what, error.where, error.mend]
        told = self.exchange.gather(refused)[0]
        if told is not None:
            raise UserError(told[0], where=told[1], mend=told[2])
        self.opened = True

    def open_log(self) -> None:
        """train.log gets what is said from here on."""
        self._log_file = self.run.open_log()
        logging.getLogger("ddnn").addHandler(self._log_file)

    def take_over_run_dir(self) -> None:
        """The first worker has died, and this one is the first now."""
        assert isinstance(self.run, NoRunDir)
        say_as_worker(self.exchange)
        self.run = self.run.take_over()
        self.open_log()
        log.info("worker %d writes the run dir from here on", self.exchange.number)

    def say_in_log(self, text: str) -> None:
        """A line for whoever reads the log later; the command line tells the person."""
        said = {"msg": f"stopped: {text}", "levelno": logging.ERROR, "levelname": "ERROR"}
        if self._log_file is not None:
            self._log_file.handle(logging.makeLogRecord(said))

    def close(self) -> None:
        """Ends what runs beside the training, and lets go of the run dir."""
        if self.setup is not None:
            self.setup.averaging.close()
        if self.exchange.guard is not None:
            self.exchange.guard.disarm()
        if self._log_file is not None:
            logging.getLogger("ddnn").removeHandler(self._log_file)
            self._log_file.close()

    def something_to_go_on_from(self) -> bool:
        """Whether --resume would not begin from nothing."""
        path = self.run.path
        return any((path / CHECKPOINTS).glob("[0-9]*")) or (path / PRETRAIN / "rbm1.safetensors").exists()


def continues(recipe: Recipe, exchange: Exchange) -> bool:
    """Whether the workers that are left go on where one dies: the recipe asks for it, and this MPI can.

    Raises:
        RecipeError: parameters would travel by NCCL, which no worker survives.
    """
    if recipe.parallel.on_failure == "stop" or exchange.size == 1:
        return False
    if recipe.parallel.transport == "nccl":
        raise RecipeError(
            "NCCL ends with the first worker that dies",
            where="parallel.on_failure: continue, parallel.transport: nccl",
            mend="set parallel.transport to host or device, or parallel.on_failure to stop",
        )
    if fault_tolerant():
        return True
    log.warning(
        "parallel.on_failure is continue, but this MPI job ends with the first worker that dies: it was not started by "
        "mpirun --with-ft ulfm (which `ddnn train --workers N` does where the Open MPI has ULFM); all will stop"
    )
    return False


def say_as_worker(exchange: Exchange) -> None:
    """The first worker says everything and shows progress, the others only warnings, with their number."""
    logging.getLogger("ddnn").setLevel(logging.INFO if exchange.rank == 0 else logging.WARNING)
    only_first_worker_shows(exchange.rank)
