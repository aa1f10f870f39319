"""`ddnn train` and `ddnn pretrain` on every worker: from a recipe to a trained run dir. All choices of a training are
made here, once: device, data, arithmetic, optimizer, averager. Below this module nothing reads the recipe;
`ddnn.training.options` translates its sections."""

from __future__ import annotations

import logging
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ddnn import __version__
from ddnn.averaging.choice import make_averager
from ddnn.averaging.strategy import NoFiniteModelError
from ddnn.data.batches import make_batch_loader
from ddnn.data.pipeline import (
    TrainingData,
)
from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.distributed.groups import Groups, watch
from ddnn.distributed.signals import GracefulShutdown, InterruptedBeforeTraining, TrainingInterrupted
from ddnn.distributed.transport import open_transport
from ddnn.nn.acoustic_model import AcousticModel, load_model
from ddnn.nn.layers import describe_sizes
from ddnn.nn.network import noise_generator
from ddnn.nn.precision import allow_tf32, choose_arithmetic
from ddnn.recipe.load import dump_recipe
from ddnn.recipe.schema import Recipe, TrainedModelConfig
from ddnn.runs import run_status
from ddnn.runs.checkpoint import CheckpointStore
from ddnn.runs.metrics import read_metrics
from ddnn.runs.rows import EndReason, MetricsRow, StartRow
from ddnn.runs.run_dir import RunDir, open_run_dir
from ddnn.runs.run_status import BEST, CHECKPOINTS, DBN, FINAL, METRICS, Kind, newest_checkpoint, resume_command
from ddnn.training import options
from ddnn.training.auto_averaging import with_averaging_frames
from ddnn.training.auto_layout import with_layout
from ddnn.training.criterion import Criterion, make_criterion
from ddnn.training.data import load_data
from ddnn.training.data_identity import DataIdentity, check_shared_data, data_identity, split_digests
from ddnn.training.initial_model import (
    initial_model,
    with_initial_model,
)
from ddnn.training.loop import train
from ddnn.training.network_layers import describe_parameters, frozen_layers
from ddnn.training.pipeline import make_eager_step
from ddnn.training.pretraining import pretrain_dbn, pretraining_recipe
from ddnn.training.resume import check_same_data, load_latest, record_resume, with_recorded_averaging
from ddnn.training.state import CheckpointPolicy, LoadedCheckpoint
from ddnn.training.step import check_split, make_step
from ddnn.training.trainer import CHECKS, Trainer
from ddnn.util.errors import DataError, DivergedError, RecipeError, UserError
from ddnn.util.progress import only_first_worker_shows
from ddnn.util.system import (
    check_devices,
    choose_device,
    compute_resources,
    compute_units,
    device_identity,
)
from ddnn.util.text import SUCCESS, printable, terminal_level

log = logging.getLogger(__name__)


@dataclass
class Job:
    """What a training and a pretraining have in common, on this worker."""

    recipe: Recipe  # with as many workers as there are
    recipe_text: str  # resolved but for `precision: auto`, which the run dir's recipe.yaml does not keep
    groups: Groups
    run: RunDir  # locked, with its log
    shutdown: GracefulShutdown  # whether the job was asked to stop
    device: torch.device  # where this worker computes

    def checkpoint_policy(self, run: RunDir, groups: Groups) -> CheckpointPolicy:
        """Checkpoints of these workers in `run`, as often as the recipe says."""
        config = self.recipe.checkpoint
        store = CheckpointStore(run.path / CHECKPOINTS, config.keep_last, groups.world, groups)
        return CheckpointPolicy(store, self.shutdown, run, config.interval_minutes, config.interval_minibatches)


def run_training(
    recipe: Recipe, run_dir: Path, device: str = "auto", comm: Communicator | None = None, *, resume: bool = False,
    on_row: Callable[[MetricsRow], object] | None = None, on_end: Callable[[Path], object] | None = None,
) -> None:  # fmt: skip
    """Trains as the recipe says and leaves everything in `run_dir`; all workers of `comm` run it together. With
    `resume` it continues from the newest checkpoint of the run dir; if there is none, it starts from the beginning.
    `on_row`: called on rank 0 with each row of metrics.jsonl, once it is written; `on_end`: with the run dir, once the
    model is written, or the training has diverged or failed; an error of it is a warning.
    UserError: anything for the user to fix: recipe, data, device, disk. DivergedError: the training diverged, or its model,
    which is written all the same, has learned nothing; one that started from `init.model` is only warned of.
    TrainingInterrupted: a signal has ended it, and it can be resumed."""
    recipe, trained = with_initial_model(recipe, run_dir if resume else None)
    with open_job("training", recipe, run_dir, device, comm or SingleProcess(), resume=resume) as job:
        job.run.on_row, job.run.on_end = on_row or job.run.on_row, on_end or job.run.on_end
        trainer = build_trainer(job, resume, trained)
        with closing(trainer.averager), closing(trainer.batches):
            try:
                with _recording_the_end(trainer):
                    model = train(trainer)
            except NoFiniteModelError as error:
                best = run_dir / BEST
                hint = f"the last good model is {best}; " if best.exists() else ""
                hint += f"lower schedule.initial_learning_rate or average more often; {trainer.hint}"
                raise DivergedError(error.message, location=run_dir, hint=hint) from error
        job.groups.world.watchdog.disable()  # a slow disk is no hang
        job.run.set_status(epoch=trainer.progress.epoch)
        end = trainer.end_row()
        job.run.record(end)
        job.run.finish(model.to(torch.device("cpu")), keep_checkpoint=trainer.may_be_longer)
        job.groups.world.barrier()  # no worker ends before the model is written
        log.info("finished: %s, %s", run_dir / FINAL, end.summary, extra=SUCCESS)
        with suppress(DataError):  # damaged meanwhile: the model is written all the same
            if job.groups.world.rank == 0 and (warning := read_metrics(run_dir / METRICS).warning):
                log.warning(warning)
        job.run.report("the model is written")
    if trainer.learned_nothing and not isinstance(recipe.init, TrainedModelConfig):
        message = "the training learned nothing: its model is no better than one that ignores its input, neither in "
        message += "cross-validation loss nor in frame accuracy"
        raise DivergedError(message, location=run_dir / FINAL, hint=f"{trainer.hint}; {CHECKS}")


@contextmanager
def _recording_the_end(trainer: Trainer) -> Iterator[None]:
    """Records why a training ended that did not finish, and reports one that diverged or failed."""
    try:
        yield
    except BaseException as error:
        stopped, diverged = isinstance(error, (SystemExit, KeyboardInterrupt)), isinstance(error, DivergedError)
        reason: EndReason = "stopped" if stopped else "diverged" if diverged else "failed"
        detail = f"on {error.signal_name}" if isinstance(error, TrainingInterrupted) else ""
        with suppress(UserError):
            trainer.run.record(trainer.end_row(reason, detail or getattr(error, "message", "") or repr(error)))
        if not stopped:
            trainer.run.report("the end is recorded")
        raise


def run_pretraining(recipe: Recipe, run_dir: Path, device: str = "auto", comm: Communicator | None = None) -> None:
    """`ddnn pretrain`: leaves a DBN of RBMs in `run_dir`, for `pretrain.dbn`. An interrupted one is resumed. Raises as
    `run_training`."""
    options.check_pretrains(recipe)
    with open_job("pretraining", recipe, run_dir, device, comm or SingleProcess(), resume=True) as job:
        record_resume(None, job.run, job.groups.world)
        if replicated_dbn(job, job.run) is None:
            train_dbn(job, job.run, job.groups)
        job.groups.world.barrier()
        log.info("finished: %s; to train on it: %s", run_dir / DBN, run_status.dbn_settings(run_dir), extra=SUCCESS)


@contextmanager
def open_job(
    kind: Kind, recipe: Recipe, run_dir: Path, device: str, world: Communicator, *, resume: bool
) -> Iterator[Job]:
    """Locks the run dir, starts log, watchdog and signal handling, opens the transport of GPUs' parameters for all that
    the job trains, and records how it ends. Collective. Where a
    signal has ended it, raises TrainingInterrupted if there is something to resume from, else SystemExit."""
    recipe = options.with_world_size(recipe, world.world_size)
    text = dump_recipe(recipe) if kind == "training" else pretraining_recipe(recipe)
    # Rank 0 logs everything and shows progress, the others log warnings only.
    logging.getLogger("ddnn").setLevel(min(terminal_level(), logging.INFO) if world.rank == 0 else logging.WARNING)
    only_first_worker_shows(world.rank)
    with GracefulShutdown(verbose=world.rank == 0) as shutdown:
        watch(world, recipe.parallel.hang_timeout)
        tensorboard = recipe.log.tensorboard
        run = open_run_dir(run_dir, world, kind, resume=resume, recipe=text, tensorboard=tensorboard)
        run.log_interval = 60.0 * recipe.log.interval_minutes
        try:
            if kind == "training":
                recipe = with_layout(recipe, device, world, run_dir if resume else None)
                text = dump_recipe(recipe)
            chosen = assign_device(recipe, device, world)
            groups = Groups.split(world, *recipe.parallel.split)
            with open_transport(recipe.parallel.gpu_transport, chosen, groups):
                yield Job(recipe, text, groups, run, shutdown, chosen)
        except (TrainingInterrupted, InterruptedBeforeTraining) as stopped:
            name = stopped.signal_name
            if newest_checkpoint(run_dir) is None:
                run.close(stopped, f"stopped on {name}, before there was a checkpoint")
                number = signal.Signals[name] if name in signal.Signals.__members__ else signal.SIGTERM
                raise SystemExit(128 + int(number)) from stopped
            message = f"stopped on {name}; resume with: {resume_command(run_dir, kind)}"
            run.close(TrainingInterrupted(name), message)
            if world.rank == 0:
                with suppress(OSError):  # nobody may be listening any more
                    os.write(2, f"ddnn: {message}\n".encode())
            raise TrainingInterrupted(name) from stopped
        except BaseException as error:
            run.close(error)
            raise
        finally:
            world.watchdog.disable()
            run.close()


def assign_device(recipe: Recipe, device: str, world: Communicator) -> torch.device:
    """Where this worker computes; UserError if two would share a GPU and the recipe does not allow it. Collective."""
    chosen = choose_device(device, world.local_rank, threads=recipe.parallel.cpu_threads)
    identities = world.all_gather_object([world.rank, world.host, device_identity(chosen)])
    check_devices(identities, recipe.parallel.oversubscribe_gpus)
    columns, stages = recipe.parallel.split
    for replica in (identities[first : first + columns] for first in range(0, len(identities), columns)):
        if len(hosts := list(dict.fromkeys(host for _, host, _ in replica))) > 1 and world.rank == 0:
            which = f"workers {replica[0][0]} to {replica[-1][0]} share every layer, but are on {' and '.join(hosts)}"
            log.warning("%s: two messages for each layer and minibatch go over the network", which)
    if stages > 1 and (gpus := [rank for rank, _, identity in identities if identity != "cpu"]):
        message = f"{stages} found, but worker {gpus[0]} computes on a GPU: networks are split into stages on CPUs only"
        raise RecipeError(message, location="parallel.stages", hint="set it to 1, or train with --device cpu")
    log.info("ddnn %s, torch %s, %s, python %s", __version__, torch.__version__, chosen, platform.python_version())
    allow_tf32(recipe.allow_tf32, chosen)
    devices = world.all_gather_object(f"{world.rank}: {world.host} {chosen}")
    if world.world_size > 1:
        parallel = recipe.parallel
        log.info("%d workers (%s)", world.world_size, ", ".join(devices))
        log.info(
            "strategy %s, averaging period %s, sent as %s%s",
            *(parallel.strategy, parallel.period, parallel.comm_dtype),
            ", overlapped" if parallel.overlap else "",
        )
    return chosen


def build_trainer(job: Job, resume: bool, trained: AcousticModel | None = None) -> Trainer:
    """Loads this worker's data and makes all parts of its training, new or as a checkpoint has them; `trained`: the
    model of `init.model`. Collective."""
    recipe, run, groups, world = job.recipe, job.run, job.groups, job.groups.world
    checkpoints = job.checkpoint_policy(run, groups)
    with run.may_refuse_resume(world, RecipeError):
        loaded = load_latest(checkpoints.store, recipe) if resume else None
    if loaded is None:
        run.truncate_after(-1)
    else:
        recipe = with_recorded_averaging(recipe, loaded)
        job = replace(job, recipe=recipe, recipe_text=dump_recipe(recipe))
    needs_dbn = loaded is None and recipe.init == "rbm" and recipe.pretrain.dbn is None
    with run.may_refuse_resume(world):
        pretraining = run.pretraining(pretraining_recipe(recipe)) if needs_dbn else None
    if loaded is None:
        run.write_recipe(job.recipe_text)
    dbn = replicated_dbn(job, pretraining) if pretraining is not None else None
    criterion = make_criterion(recipe, job.device, groups, run, resumed=loaded is not None)
    data = criterion.data
    identity = data_identity(data, groups.data)
    check_shared_data(identity, groups)
    if pretraining is not None and dbn is None:
        dbn = train_dbn(job, pretraining, groups, data)
    if loaded is None:
        model = initial_model(recipe, data, dbn, trained, groups)
    else:
        with run.may_refuse_resume(world):
            check_same_data(loaded.metadata.data, identity, recipe, loaded.location)
        model = loaded.model()
        model.check_features(data.dataset.dim, data.source.parts[0].corpus.data)
        run.truncate_after(loaded.metadata.epoch if loaded.metadata.started else -1)
    record_resume(loaded, run, world)
    run.write_pdf_counts(criterion.counts)
    run.write_cv_utterances(data.cv_index().utterances)
    layers = model.network.layers
    whole = model.network.to(job.device).with_frozen(frozen_layers(recipe, layers))
    network = whole.part_of(options.make_partition(layers, groups))
    model = replace(model, transform=model.transform.to(job.device), network=network)
    trainer = assemble_trainer(job, model, data, criterion, identity, checkpoints, loaded)
    if groups.replica.world_size > 1:
        check_split(whole, network.partition, trainer.eager_step.workspace.arithmetic)
    recipe = with_averaging_frames(recipe, trainer)
    # Only now: a resume that is refused changes nothing.
    run.write_recipe(dump_recipe(recipe.model_copy(update={"precision": trainer.precision})))
    run.record(start_row(trainer, data, f"{describe_sizes(layers)}, {describe_parameters(recipe, layers)}"))
    progress, epochs = trainer.progress, trainer.schedule.max_epochs
    run.set_status(
        phase="training", epoch=progress.epoch, minibatch=progress.minibatch, max_epochs=epochs, rbm=None, num_rbms=None
    )
    checkpoints.begin(trainer)
    return trainer


def assemble_trainer(
    job: Job,
    model: AcousticModel,
    data: TrainingData,
    criterion: Criterion,
    identity: DataIdentity,
    checkpoints: CheckpointPolicy,
    loaded: LoadedCheckpoint | None,
) -> Trainer:
    """Chooses the parts of the training of `model`, each once; restores them if there is a checkpoint. Collective."""
    recipe, groups, network, sizes = job.recipe, job.groups, model.network, criterion.sizes
    shared = groups.replica.world_size > 1  # by workers that exchange within a step
    optimizer = options.optimizer_of(recipe.optimizer, network)
    averaging = options.averaging_options(recipe.parallel, recipe.optimizer.momentum)
    averager = make_averager(averaging, groups, network, optimizer)
    averager.broadcast()
    optimizer.set_lr_scale(averager.lr_scale)
    precision = criterion.precision if loaded is None else loaded.metadata.precision
    arithmetic = choose_arithmetic(precision, network, sizes.start, groups.world, resumed=loaded is not None)
    generator, parallel = noise_generator(network, recipe.seed, groups.data.rank), recipe.parallel
    eager = make_eager_step(
        *(network, sizes, arithmetic, optimizer, averager.average_gradient, criterion.make_objective),
        generator=generator, schedule=parallel.pipeline, microbatches=parallel.microbatches,
    )  # fmt: skip
    kernel, mark = arithmetic.gather_kernel, averager.timer.mark
    batches = make_batch_loader(
        *(data.train, model.transform, criterion.sampler()),
        out=eager.inputs, gather_kernel=kernel, mark=mark, labels_only=eager.workspace.receives,
    )  # fmt: skip
    schedule = options.make_schedule(recipe.schedule)
    scaled_lr = schedule.learning_rate * averager.lr_scale
    graphs = recipe.cuda_graphs == "auto" and not shared and criterion.graphs
    trainer = Trainer(
        model=model,
        optimizer=optimizer,
        schedule=schedule,
        batches=batches,
        validation=criterion.validation(arithmetic),
        minibatch_sizes=sizes,
        eager_step=eager,
        step=make_step(eager, batches.sample, scaled_lr, graphs=graphs),
        averager=averager,
        combination=options.make_combination(recipe, network, groups, batches),
        checkpoints=checkpoints,
        run=job.run,
        warmup=recipe.parallel.warmup if groups.data.world_size > 1 else "none",
        warmup_minibatches=recipe.parallel.warmup_minibatches,
        recipe=job.recipe_text,
        data=identity,
        may_keep_initial=isinstance(recipe.init, TrainedModelConfig) and recipe.init.output_layer == "keep",
    )
    if loaded is not None:
        trainer.restore(loaded)
    return trainer


def start_row(trainer: Trainer, data: TrainingData, network: str) -> StartRow:
    """What this start of the training found, which is also logged, as the `network` in words. Collective."""
    groups, world, scale = trainer.groups, trainer.groups.world, trainer.averager.lr_scale
    frames = groups.data.all_gather_object([len(data.train), len(data.cv)])
    train_frames, cv_frames = map(sum, zip(*frames, strict=True))
    log.info(
        "network: %s; %s training frames, %s cross-validation frames; learning rates%s multiply the gradient summed "
        "over %d frames%s",
        *(network, f"{train_frames:,}", f"{cv_frames:,}"),
        f" times {scale:g}" if scale > 1 else "",
        *(trainer.minibatch_size, " of each worker" if groups.data.world_size > 1 else ""),
    )
    train_digest, cv_digest = split_digests(data)
    kinds, cores_per_worker = compute_resources(world.all_gather_object(compute_units(data.device, world.host)))
    return StartRow(
        epoch=trainer.progress.epoch,
        date=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        command=printable(shlex.join(["ddnn", *sys.argv[1:]]))[:1000],
        version=f"ddnn {__version__}, torch {torch.__version__}",
        host=world.host,
        machine=kinds,
        precision=trainer.precision,
        world_size=world.world_size,
        cpu_threads=torch.get_num_threads(),
        cores_per_worker=cores_per_worker,
        learning_rate_scale=scale,
        train_frames=train_frames,
        cv_frames=cv_frames,
        train_digest=train_digest,
        cv_digest=cv_digest,
        baseline=dict(trainer.validation.baseline.figures),
    )


def train_dbn(job: Job, run: RunDir, groups: Groups, data: TrainingData | None = None) -> AcousticModel:
    """A DBN trained by the workers of these groups on `data`, or on the whole corpus, which is loaded. Collective."""
    if data is None:
        data = load_data(job.recipe, job.device, groups, held_out=False)
    return pretrain_dbn(job.recipe, data, job.checkpoint_policy(run, groups), groups)


def replicated_dbn(job: Job, run: RunDir) -> AcousticModel | None:
    """`parallel.pretrain_data: replicated`: the DBN that rank 0 trains on the whole corpus, for all; else None. Collective.
    Where rank 0 was asked to stop, all workers raise TrainingInterrupted, once it has written its checkpoint."""
    world, shutdown, interrupted = job.groups.world, job.shutdown, None
    if world.world_size == 1 or job.recipe.parallel.pretrain_data == "sharded":
        return None
    if world.rank == 0:
        try:
            train_dbn(job, run, Groups.data_parallel(SingleProcess()))
        except (TrainingInterrupted, InterruptedBeforeTraining) as stopped:
            interrupted = stopped.signal_name
    else:
        shutdown.deferred = True  # rank 0 decides
    world.barrier()
    interrupted = world.all_gather_object(interrupted)[0]
    if interrupted is not None:
        raise TrainingInterrupted(interrupted)
    shutdown.deferred = False
    return load_model(run.path / DBN)
