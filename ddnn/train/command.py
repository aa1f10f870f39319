"""`ddnn train` and `ddnn pretrain`: from a recipe to a trained run dir."""

from __future__ import annotations

import logging
import platform
from dataclasses import replace
from pathlib import Path

import torch

from ddnn import __version__
from ddnn.data.corpus import FeaturePipeline
from ddnn.data.minibatches import FrameSet
from ddnn.device import check_devices, choose_device, device_identity
from ddnn.errors import RecipeError, UserError
from ddnn.model.acoustic import AcousticModel
from ddnn.model.initialise import initialise_randomly
from ddnn.model.network import Network, hidden_stack
from ddnn.model.precision import allow_tf32, choose_precision
from ddnn.optim.schedule import make_schedule
from ddnn.optim.sgd import make_optimizer
from ddnn.parallel.exchange import Exchange
from ddnn.parallel.mean import AllLeftOut
from ddnn.progress import only_first_worker_shows
from ddnn.recipe.load import dump_recipe
from ddnn.recipe.schema import Recipe
from ddnn.train.averaging import Averaging
from ddnn.train.load import Frames, TrainingData, check_size, input_transform, load_everything, load_training_data
from ddnn.train.loop import Setup, train
from ddnn.train.pretrain import STACK, claim, load_stack, pretrain, share_stack
from ddnn.train.run_dir import BEST, PRETRAIN, NoRunDir, RunDir

log = logging.getLogger(__name__)


def run_training(recipe: Recipe, run_dir: Path, device: str = "auto", exchange: Exchange | None = None) -> None:
    """Trains as the recipe says and leaves everything in `run_dir`; every worker of `exchange` runs it together.

    Raises:
        UserError: anything the user must mend: recipe, data, device, disk.
    """
    exchange = exchange or Exchange()
    recipe = for_these_workers(recipe, exchange)
    on = device_of_worker(recipe, device, exchange)
    run = RunDir(run_dir) if exchange.rank == 0 else NoRunDir(run_dir)
    log_file = run.open_log()
    root = logging.getLogger("ddnn")
    root.addHandler(log_file)
    say_as_worker(exchange)
    averaging = None
    try:
        log.info("ddnn %s, torch %s, %s, python %s", __version__, torch.__version__, on, platform.python_version())
        allow_tf32(recipe.tf32, on)
        _log_workers(recipe, on, exchange)
        if recipe.init == "rbm" and recipe.pretrain.from_ is None and exchange.rank == 0:
            claim(recipe, run_dir / PRETRAIN)  # before anything of an earlier run is written over
        run.write_recipe(dump_recipe(recipe))
        stack = _replicated_stack(recipe, on, run_dir / PRETRAIN, exchange)
        data = load_training_data(recipe, on, exchange)
        check_size("minibatch", recipe.minibatch, data.train_utterances, data.frames, exchange)
        model = initial_model(recipe, data, run_dir / PRETRAIN, exchange, stack).to(on)
        run.write_counts(data.source.pdf_counts())
        optimizer = make_optimizer(recipe.optimizer, model.network)
        averaging = Averaging(exchange, recipe.parallel, model.network.parameters, optimizer, recipe.minibatch)
        averaging.share()
        setup = Setup(
            model=model,
            optimizer=optimizer,
            schedule=make_schedule(recipe.schedule),
            train=data.train,
            cv=data.cv,
            minibatch=recipe.minibatch,
            seed=recipe.seed,
            averaging=averaging,
            precision=choose_precision(recipe.precision, model.network, recipe.minibatch, exchange),
            graphs=recipe.graphs == "auto",
        )
        log.info(
            "%d parameters, %d frames to train on, %d to judge by; rates%s multiply the gradient summed over %d frames"
            "%s",
            model.network.parameters.numel(),
            sum(exchange.gather(len(setup.train))),
            sum(exchange.gather(len(setup.cv))),
            f" x {averaging.rate_scale}" if averaging.rate_scale > 1 else "",
            recipe.minibatch,
            "" if averaging.alone else " of each worker",
        )
        trained = _train(setup, run)
        run.finish(trained.to(torch.device("cpu")))
        log.info("finished: %s", run_dir / "final.safetensors")
    except (UserError, KeyboardInterrupt) as error:
        # The command line tells the person; whoever reads the log later is told here.
        said = {"msg": f"stopped: {str(error) or 'interrupted'}", "levelno": logging.ERROR, "levelname": "ERROR"}
        log_file.handle(logging.makeLogRecord(said))
        raise
    finally:
        if averaging is not None:
            averaging.close()
        root.removeHandler(log_file)
        log_file.close()


def _train(setup: Setup, run: RunDir) -> AcousticModel:
    """`train`; where no worker's model is finite any more, the error names the last good one."""
    try:
        return train(setup, run)
    except AllLeftOut as error:
        good = run.path / BEST
        raise UserError(
            f"{error.what}: their models are not finite",
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


def say_as_worker(exchange: Exchange) -> None:
    """The first worker says everything and shows progress, the others only warnings, with their number."""
    logging.getLogger("ddnn").setLevel(logging.INFO if exchange.rank == 0 else logging.WARNING)
    only_first_worker_shows(exchange.rank)


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
    if recipe.init != "rbm" or recipe.pretrain.from_ is not None:
        raise RecipeError(
            "the recipe has nothing to pretrain",
            where="init" if recipe.init != "rbm" else "pretrain.from",
            mend="set init: rbm, and leave pretrain.from out",
        )
    exchange = exchange or Exchange()
    recipe = for_these_workers(recipe, exchange)
    on = device_of_worker(recipe, device, exchange)
    say_as_worker(exchange)
    allow_tf32(recipe.tf32, on)
    if _replicated_stack(recipe, on, run_dir, exchange) is None:
        pretrain_on(recipe, load_everything(recipe, on, exchange), run_dir, exchange)
    log.info("finished: %s", run_dir / STACK)
