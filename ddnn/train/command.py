"""`ddnn train` and `ddnn pretrain`: from a recipe to a trained run dir."""

from __future__ import annotations

import gc
import logging
import os
import platform
import shlex
import signal
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ddnn import __version__
from ddnn.data.corpus import FeaturePipeline
from ddnn.data.minibatches import FrameSet
from ddnn.device import check_devices, choose_device, device_identity
from ddnn.errors import DIVERGED, RecipeError, UserError
from ddnn.model.acoustic import AcousticModel
from ddnn.model.initialise import initialise_randomly
from ddnn.model.network import Network, hidden_stack
from ddnn.model.precision import allow_tf32, choose_precision
from ddnn.optim.schedule import make_schedule
from ddnn.optim.sgd import make_optimizer
from ddnn.parallel.exchange import Exchange
from ddnn.parallel.failures import Job
from ddnn.parallel.guard import Guard
from ddnn.parallel.mean import AllLeftOut
from ddnn.parallel.survive import WorkerLost
from ddnn.recipe.schema import Recipe
from ddnn.train.averaging import Averaging
from ddnn.train.checkpoint import Checkpoints
from ddnn.train.load import Frames, TrainingData, check_size, input_transform, load_everything, load_training_data
from ddnn.train.loop import Setup, train
from ddnn.train.pretrain import claim, load_stack, pretrain, share_stack
from ddnn.train.recovery import meet
from ddnn.train.resume import check_same_data, data_digest, newest_saved
from ddnn.train.run_dir import RunDir
from ddnn.train.run_dir_files import BEST, CHECKPOINTS, FINAL, PRETRAIN, STACK
from ddnn.train.saving import Saver
from ddnn.train.session import Session, continues, say_as_worker
from ddnn.train.state import Header
from ddnn.train.stopping import Stopped, StoppedEarly, StopRequest

log = logging.getLogger(__name__)


def run_training(
    recipe: Recipe,
    run_dir: Path,
    device: str = "auto",
    exchange: Exchange | None = None,
    *,
    resume: bool = False,
    job: Job | None = None,
) -> None:
    """Trains as the recipe says and leaves everything in `run_dir`; every worker of `exchange` runs it together.

    Args:
        resume: go on from the newest checkpoint of the run dir; where it has none, begin anew in it.
        job: in place of `exchange`; gets the exchange of the workers that are left where some die.

    Raises:
        UserError: anything the user must mend: recipe, data, device, disk.
        Stopped: a signal has ended it, and it can go on with `resume`.
    """
    job = job or Job(exchange or Exchange())
    recipe = for_these_workers(recipe, job.exchange)
    outlives = continues(recipe, job.exchange)
    with StopRequest(speaks=job.exchange.rank == 0) as stop:
        session = Session(recipe, run_dir, device, job, stop, resume)
        say_as_worker(job.exchange)
        if job.exchange.size > 1:
            job.exchange.guard = Guard(job.exchange.rank, job.exchange.host, recipe.parallel.timeout)
        try:
            while True:
                try:
                    _train_together(session)
                    break
                except WorkerLost as error:
                    if not outlives:
                        raise UserError(f"another worker has died: {error}", mend="go on with --resume") from error
                    meet(session, error=None if session.opened else "a worker died as the training began")
                except UserError as error:
                    if outlives and session.exchange.size > 1:
                        meet(session, error=str(error))  # raises it on all
                    raise
                except StoppedEarly as early:
                    name = early.received
                    if outlives and session.exchange.size > 1:
                        meet(session, stopped=name)  # raises Stopped on all
                    raise Stopped(name) from early
        except Stopped as stopped:
            if not session.something_to_go_on_from():
                session.say_in_log(f"on {stopped.received}, before there was a checkpoint")
                raise SystemExit(128 + _number(stopped.received)) from stopped
            session.say_in_log(f"on {stopped.received}; go on with --resume")
            if session.exchange.rank == 0:
                with suppress(OSError):  # nobody may listen any more
                    command = f"ddnn train {shlex.quote(str(run_dir))} --resume"
                    os.write(2, f"ddnn: stopped on {stopped.received}; go on with: {command}\n".encode())
            raise
        except (UserError, KeyboardInterrupt) as error:
            session.say_in_log(str(error) or "interrupted")
            raise
        finally:
            session.close()


def _train_together(session: Session) -> None:
    """One training from loading to its end, by the workers that there are now."""
    _enter(session)
    run, exchange = session.run, session.exchange
    session.setup = setup = _prepare(session)
    log.info(
        "%d parameters, %d frames to train on, %d to judge by; rates%s multiply the gradient summed over %d frames%s",
        setup.model.network.parameters.numel(),
        sum(exchange.gather(len(setup.train))),
        sum(exchange.gather(len(setup.cv))),
        f" x {setup.averaging.rate_scale}" if setup.averaging.rate_scale > 1 else "",
        setup.minibatch,
        "" if setup.averaging.alone else " of each worker",
    )
    trained = _train(setup, run)
    if exchange.guard is not None:
        exchange.guard.disarm()  # a slow disk is no hang
    run.finish(trained.to(torch.device("cpu")))
    exchange.barrier()  # until the model is there, a worker that is left can write it
    log.info("finished: %s", run.path / FINAL)


def _enter(session: Session) -> None:
    """What comes first, also after a death: signals end loading at once, and the run dir is this training's."""
    session.stop.safe = False
    if session.stop.received is not None:  # in a meeting, after all had told each other
        raise StoppedEarly(session.stop.received)
    gc.collect()  # the frames of before a death, which a cycle of its exception may hold
    if not session.opened:
        session.open_run_dir()
    if session.exchange.guard is not None:
        session.exchange.guard.disarm()  # loading may take longer than any minibatch


def _prepare(session: Session) -> Setup:
    """Loads this worker's data and makes what the loop needs, from the beginning or as it was saved. Collective."""
    recipe, run, exchange = session.recipe, session.run, session.exchange
    on = device_of_worker(recipe, session.device, exchange)
    log.info("ddnn %s, torch %s, %s, python %s", __version__, torch.__version__, on, platform.python_version())
    allow_tf32(recipe.tf32, on)
    _log_workers(recipe, on, exchange)
    checkpoints = Checkpoints(run.path / CHECKPOINTS, recipe.checkpoint.keep, exchange)
    resumes = session.saved is None and session.resume
    if resumes:
        session.saved = newest_saved(checkpoints, recipe, exchange)
        if session.saved is None:
            log.info("there is no checkpoint to go on from: the training begins")
            run.forget_epochs_after(-1)
    saved, pretrain_dir = session.saved, run.path / PRETRAIN
    begins_with_rbms = saved is None and recipe.init == "rbm" and recipe.pretrain.from_ is None
    if begins_with_rbms and exchange.rank == 0:
        claim(recipe, pretrain_dir)  # before anything of an earlier run is written over
    if saved is None:
        run.write_recipe(session.recipe_text)
    stack = _replicated_stack(recipe, on, pretrain_dir, exchange) if begins_with_rbms else None
    data = load_training_data(recipe, on, exchange)
    session.data = data_digest(data)
    check_size("minibatch", recipe.minibatch, data.train_utterances, data.frames, exchange)
    if saved is None:
        model = initial_model(recipe, data, pretrain_dir, exchange, stack).to(on)
    else:
        check_same_data(saved, session.data, recipe.data.train)
        model = saved.model().to(on)
        model.check_features(data.frames.corpus.dim, recipe.data.train)
        run.write_recipe(session.recipe_text)
        if resumes:
            run.forget_epochs_after(saved.header.epoch)
            run.record(resumed_row(saved.header, exchange))
    run.write_counts(data.source.pdf_counts())
    optimizer = make_optimizer(recipe.optimizer, model.network)
    averaging = Averaging(exchange, recipe.parallel, model.network.parameters, optimizer, recipe.minibatch)
    if recipe.optimizer.max_change_mode != "each-worker":
        optimizer.shared_by = averaging.rate_scale
    averaging.share()
    return Setup(
        model=model,
        optimizer=optimizer,
        schedule=make_schedule(recipe.schedule),
        train=data.train,
        cv=data.cv,
        minibatch=recipe.minibatch,
        seed=recipe.seed,
        averaging=averaging,
        precision=choose_precision(
            recipe.precision if saved is None else saved.header.precision, model.network, recipe.minibatch, exchange
        ),
        graphs=recipe.graphs == "auto",
        saver=Saver(
            checkpoints,
            recipe.checkpoint,
            session.stop,
            recipe=session.recipe_text,
            data=session.data,
            first=exchange.rank == 0,
        ),
        saved=saved,
    )


def resumed_row(header: Header, exchange: Exchange) -> dict[str, Any]:
    """A row of metrics.jsonl that says where a training went on."""
    return {
        "epoch": header.epoch,
        "split": "resumed",
        "minibatch": header.minibatch,
        "workers": exchange.size,
    }


def _number(name: str) -> int:
    return int(signal.Signals[name]) if name in signal.Signals.__members__ else int(signal.SIGTERM)


def _train(setup: Setup, run: RunDir) -> AcousticModel:
    """`train`; where no worker's model is finite any more, the error names the last good one."""
    try:
        return train(setup, run)
    except AllLeftOut as error:
        good = run.path / BEST
        raise UserError(
            f"{DIVERGED}: {error.what}: their models are not finite",
            where=run.path,
            mend=(f"the last good model is {good}; " if good.exists() else "") + "lower schedule.initial, or average "
            "more often",
        ) from error


def for_these_workers(recipe: Recipe, exchange: Exchange) -> Recipe:
    """The recipe with as many workers as there are.

    Raises:
        RecipeError: it says another number.
    """
    said, there = recipe.parallel.workers, exchange.size
    if said not in (1, there):
        raise RecipeError(
            f"{said} found, but {there} workers were started",
            where="parallel.workers",
            mend=f"start {said} workers, or say --workers {there}",
        )
    return recipe.model_copy(update={"parallel": recipe.parallel.model_copy(update={"workers": there})})


def device_of_worker(recipe: Recipe, device: str, exchange: Exchange) -> torch.device:
    """Where this worker computes; UserError where two would share a GPU and the recipe does not allow it."""
    on = choose_device(device, exchange.local_rank, threads=recipe.parallel.threads)
    places = exchange.gather([exchange.rank, exchange.host, device_identity(on)])
    check_devices(places, recipe.parallel.share_devices)
    return on


def _log_workers(recipe: Recipe, on: torch.device, exchange: Exchange) -> None:
    everyone = exchange.gather(f"{exchange.rank}: {exchange.host} {on}")
    if exchange.size == 1:
        return
    parallel = recipe.parallel
    log.info("%d workers (%s)", exchange.size, ", ".join(everyone))
    log.info(
        "reduce %s%s, wire %s%s",
        parallel.reduce,
        " at every minibatch" if parallel.reduce == "gradient" else f", every {parallel.every} minibatches",
        parallel.wire,
        ", overlapped" if parallel.overlap else "",
    )


def describe(recipe: Recipe) -> str:
    """One paragraph of what a recipe would train, without reading any data."""
    hidden = f"{recipe.model.hidden_layers} x {recipe.model.hidden_units} {recipe.model.activation}"
    return (
        f"{hidden}, init {recipe.init}, {recipe.optimizer.name}, minibatch {recipe.minibatch}, {recipe.schedule.name} "
        f"from {recipe.schedule.initial:g} (times the gradient summed over a minibatch, "
        f"{recipe.schedule.initial * recipe.minibatch:g} on its mean), {recipe.parallel.workers} worker(s)"
    )


def initial_model(
    recipe: Recipe, data: TrainingData, pretrain_dir: Path, exchange: Exchange, stack: AcousticModel | None
) -> AcousticModel:
    """The model that training starts from, on the CPU: random, or on a stack of RBMs, trained where there is none."""
    if recipe.init == "random":
        transform = input_transform(recipe, data.frames, data.train_utterances, exchange)
    else:
        if recipe.pretrain.from_ is not None:
            stack = load_stack(recipe, recipe.pretrain.from_)
            stack.check_features(data.frames.corpus.dim, recipe.pretrain.from_)
        elif stack is None:
            stack = pretrain_on(recipe, data.frames, pretrain_dir, exchange)
        transform = stack.transform.to(torch.device("cpu"))
    model = recipe.model
    layers = hidden_stack(
        transform.output_dim, model.hidden_layers, model.hidden_units, data.source.num_pdfs, model.activation
    )
    if stack is not None:  # nnet1 makes the output layer on a stack without the output bias's rate of 0.1
        layers = (*layers[:-1], replace(layers[-1], bias_rate=1.0))
    network = Network(layers)
    initialise_randomly(network, recipe.seed)
    if stack is not None:
        network.parameters[: stack.network.parameters.numel()] = stack.network.parameters.cpu()
    return AcousticModel(FeaturePipeline(recipe.data.cmvn, recipe.data.deltas), transform, network)


def pretrain_on(recipe: Recipe, frames: Frames, directory: Path, exchange: Exchange) -> AcousticModel:
    """A stack of RBMs on all utterances of the corpus, those held out too: pretraining reads no labels."""
    everything = list(range(len(frames.plan.entries)))
    transform = input_transform(recipe, frames, everything, exchange).to(frames.device)
    check_size("pretrain.minibatch", recipe.pretrain.minibatch, everything, frames, exchange)
    here = FrameSet(frames.corpus, frames.corpus.rows_of(range(len(frames.shard))).to(frames.device))
    return pretrain(recipe, here, transform, directory, exchange)


def _replicated_stack(recipe: Recipe, on: torch.device, directory: Path, exchange: Exchange) -> AcousticModel | None:
    """`parallel.pretrain: replicated`: the stack that one worker makes of the whole corpus, for all; else None."""
    makes_one = recipe.init == "rbm" and recipe.pretrain.from_ is None
    if not makes_one or exchange.size == 1 or recipe.parallel.pretrain == "sharded":
        return None
    stack = None
    if exchange.rank == 0:
        alone = Exchange()
        stack = pretrain_on(recipe, load_everything(recipe, on, alone), directory, alone)
    dim = exchange.gather(stack.transform.dim if stack is not None else None)[0]
    return share_stack(recipe, stack, dim, on, exchange, layers=recipe.model.hidden_layers)


def run_pretraining(recipe: Recipe, run_dir: Path, device: str = "auto", exchange: Exchange | None = None) -> None:
    """`ddnn pretrain`: leaves a stack of RBMs in `run_dir`, for `pretrain.from`.

    Raises:
        UserError: anything the user must mend.
    """
    check_pretrains(recipe)
    exchange = exchange or Exchange()
    recipe = for_these_workers(recipe, exchange)
    on = device_of_worker(recipe, device, exchange)
    say_as_worker(exchange)
    allow_tf32(recipe.tf32, on)
    if _replicated_stack(recipe, on, run_dir, exchange) is None:
        pretrain_on(recipe, load_everything(recipe, on, exchange), run_dir, exchange)
    log.info("finished: %s", run_dir / STACK)


def check_pretrains(recipe: Recipe) -> None:
    """RecipeError where the recipe has no RBMs to train."""
    if recipe.init != "rbm" or recipe.pretrain.from_ is not None:
        raise RecipeError(
            "the recipe has nothing to pretrain",
            where="init" if recipe.init != "rbm" else "pretrain.from",
            mend="set init: rbm, and leave pretrain.from out",
        )
