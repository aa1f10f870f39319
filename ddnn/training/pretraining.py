"""RBM pretraining: a deep belief network (DBN) of RBMs, trained layer by layer as Kaldi nnet1's
steps/nnet/pretrain_dbn.sh, on all utterances of the training data: no label is read. An interrupted pretraining resumes
to the same bits: what is random in an RBM depends on the recipe's seed, the layer and the worker's rank alone, and the
state of the generator is in the checkpoint. Several workers start from the same RBM, each on its shard, and average
weights and biases by the averager that trains networks too. Learning rates are not scaled; momentum stays with its
worker."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddnn.averaging.choice import make_averager
from ddnn.averaging.strategy import AveragingOptions
from ddnn.data.batches import Batch, Sampler, SequentialSampler, ShuffledSampler, make_batch_loader
from ddnn.data.dataset import STATISTICS_UTTERANCES, FrameSubset
from ddnn.data.pipeline import TrainingData
from ddnn.distributed.communicator import Communicator
from ddnn.distributed.groups import Groups
from ddnn.kaldi.data_dir import FRAMES_PER_HOUR
from ddnn.kaldi.nnet1_file import read_nnet1
from ddnn.nn.acoustic_model import AcousticModel, from_nnet1, load_model, save_model
from ddnn.nn.elementwise import Dropout
from ddnn.nn.figures import RECONSTRUCTION_ERROR
from ddnn.nn.layer import Layer
from ddnn.nn.layers import Affine, num_parameters
from ddnn.nn.network import Network, Workspace
from ddnn.nn.objective import Sums
from ddnn.nn.rbm import Cd1Options, Rbm, cd1_step
from ddnn.recipe.load import dump_recipe
from ddnn.recipe.schema import (
    AveragingConfig,
    CrossValidationConfig,
    LogConfig,
    NewbobConfig,
    PretrainConfig,
    Recipe,
    SgdConfig,
)
from ddnn.runs.rows import PretrainRow, throughput
from ddnn.runs.run_dir import load_run
from ddnn.runs.run_status import DBN, PRETRAIN
from ddnn.training.combination import Combination
from ddnn.training.data_identity import DataIdentity, data_identity
from ddnn.training.evaluation import EpochFigures, EvalResult
from ddnn.training.loop import train_epoch
from ddnn.training.network_layers import network_layers
from ddnn.training.normalization import input_transform
from ddnn.training.options import model_features, require_minibatch
from ddnn.training.resume import check_same_data
from ddnn.training.state import CheckpointPolicy, Stateful, TrainingProgress, restore_state
from ddnn.util.errors import DataError, DivergedError
from ddnn.util.text import duration

log = logging.getLogger(__name__)

FRAMES_PER_BLOCK = 1024  # per forward pass where only the statistics of the outputs are wanted
EXPLODED_RATIO = 2.0  # to the error of the untrained RBM: sound ones were below 0.9, those that exploded above 5
LEARNED_RATIO = 0.99  # to the error of the data's mean
MIN_MINIBATCHES = 100  # of a worker on average, before an RBM can have learned: sound ones took 20 to 80


ABOVE_CONVOLUTION_STDDEV = 0.05  # of the initial weights, as Kaldi's run_cnn.sh; else 0.1


def epochs_for_rbm(config: PretrainConfig, index: int, frames: int, *, gauss: bool) -> int:
    """How often RBM `index` (0 is the lowest) sees the `frames` of the corpus, at least once. From `epochs` (its last
    number serves all further RBMs), else from `hours` of speech, a Gaussian RBM twice as many, at most
    `max_epochs`."""
    if config.epochs is not None:
        return config.epochs[min(index, len(config.epochs) - 1)]
    epochs = (2 if gauss else 1) * max(1, round(config.hours * FRAMES_PER_HOUR / frames))
    return min(epochs, config.max_epochs)


class RbmTrainer:
    """All parts of the training of RBM `index` (from 0) on this worker: on the outputs of the layers `below` it, or on the
    features, untrained. `total_error`, `total_frames`: of all finished epochs and workers. `mean_error`: per frame, of a
    reconstruction by the mean of the data."""

    def __init__(
        self,
        recipe: Recipe,
        index: int,
        frames: FrameSubset,
        below: AcousticModel,
        checkpoints: CheckpointPolicy,
        groups: Groups,
    ) -> None:
        """Collective."""
        self.index, self.run, self.checkpoints, self.progress = index, checkpoints.run, checkpoints, TrainingProgress()
        self.combination = Combination()  # the last epoch's RBM is the result
        self.data = DataIdentity(contents={}, features={})  # of what it is trained on
        config, device, comm = recipe.pretrain, frames.indices.device, groups.data
        seed = (recipe.seed * 1_000_003 + 7919 * (index + 1)) % 2**63
        self.generator = torch.Generator(device).manual_seed(seed)
        gauss, units = not below.network.layers, recipe.model.rbm_units()
        visible = below.transform.output_dim if gauss else below.network.output_dim
        mean, variance = visible_statistics(below, frames, comm)
        self.mean_error = 0.5 * variance
        self.rate_key = "gaussian_learning_rate" if gauss else "learning_rate"
        rate = getattr(config, self.rate_key)
        self.options = Cd1Options(rate, l2=config.l2, kaldi_momentum=config.kaldi_momentum)
        on_convolution = recipe.pretrain.below is not None
        # On a convolution the visible biases of the first RBM begin at 0, those of others at the logit of the mean.
        visible_mean = None if gauss else mean if index else torch.full_like(mean, 0.5)
        stddev = {"stddev": ABOVE_CONVOLUTION_STDDEV} if on_convolution else {}
        self.rbm = Rbm(visible, units[index], self.generator, visible_mean, **stddev)
        self.max_error = EXPLODED_RATIO * self.rbm.untrained_error(variance)
        if comm.rank:  # another draw of the hidden units; an odd factor keeps the ranks apart
            self.generator.manual_seed((seed + comm.rank * 2_654_435_761) % 2**63)
        sampler = ShuffledSampler(frames, config.minibatch_size, seed=recipe.seed, rank=comm.rank)
        self.inputs = HiddenRepresentation(below, frames, sampler, comm)
        averaging = AveragingOptions(averaging_period=recipe.parallel.averaging_period, scale_learning_rate=False)
        self.averager = make_averager(averaging, groups, self.rbm, self.rbm)
        total_frames = int(sum(comm.all_gather_object(len(frames))))
        self.num_epochs = epochs_for_rbm(config, index, total_frames, gauss=gauss)
        trainer = weakref.proxy(self)  # no cycle of references: the memory of an RBM is free when it is trained
        self.losses = EpochFigures(
            device,
            (RECONSTRUCTION_ERROR,),
            lambda result: trainer.raise_if_diverged(result),
            excludes=self.averager.excludes,
        )
        self.total_error, self.total_frames, self.epoch_seconds = 0.0, 0, math.nan

    @property
    def finished(self) -> bool:
        return self.progress.epoch >= self.num_epochs

    @property
    def may_be_longer(self) -> bool:
        return False

    def train_minibatch(self, batch: Batch) -> Sums:
        """One minibatch of CD-1. Where other workers train on, a worker whose RBM is not finite waits for theirs."""
        try:
            return (cd1_step(self.rbm, batch.x, self.options, self.generator),)
        except DivergedError as error:
            if not self.averager.excludes:
                raise DivergedError(error.message, hint=f"{error.hint}; {self.lower_rate()}") from error
            self.rbm.parameters.fill_(math.nan)
            return (torch.full((), math.nan),)

    def raise_if_diverged(self, result: EvalResult) -> None:
        """DivergedError where the error of an epoch is not finite."""
        if not math.isfinite(result.loss):
            message = f"the pretraining diverged: {self.describe(result)} in epoch {self.progress.epoch + 1}"
            raise DivergedError(message, hint=self.lower_rate())

    def describe(self, result: EvalResult) -> str:
        return f"the reconstruction error of RBM {self.index + 1} is {result.loss:.6g}"

    def end_epoch(self) -> None:
        """Records the epoch's reconstruction error, over all workers. Collective."""
        progress, result = self.progress, self.losses.committed.result(self.averager.groups.data)
        self.raise_if_diverged(result)
        self.total_error += result.loss * result.frames
        self.total_frames += result.frames
        self.epoch_seconds = progress.elapsed()
        row = PretrainRow(
            rbm=self.index + 1,
            epoch=progress.epoch + 1,
            num_epochs=self.num_epochs,
            reconstruction_error=result.loss,
            mean_reconstruction_error=self.total_error / self.total_frames,
            data_mean_error=self.mean_error,
            guard_count=self.rbm.guard_count,
            seconds_left=self.seconds_left(progress.epoch + 1),
            **throughput(result.frames, self.epoch_seconds),
        )
        self.run.record(row)
        self.losses.reset()
        progress.end_epoch()
        self.run.set_status(epoch=progress.epoch, minibatch=0)
        self.check_error(result)

    def check_error(self, result: EvalResult) -> None:
        """DivergedError where the `result` of the epoch that has ended shows that the RBM diverged with finite numbers.

        A reconstruction by the mean of the data, which ignores each frame, has half the sum of the variances of the
        visible units as its error, dim / 2 for normalized features. An RBM must be below it in the end: one that is
        not has learned nothing, or its hidden units are constant, and the layers above would see no data. Before the
        end it may be above: random weights of a wide layer add to the error, and a small corpus has few minibatches
        in an epoch to shrink them. After very few minibatches in all it is a warning. All workers decide alike, by
        figures that are the same on each. Exploding weights of a Gaussian
        RBM are recognized after any epoch, by an error far above that of the untrained RBM: later the guard shrinks
        them, and what remains reconstructs the mean.

        Measured, the ratio to the error of the mean: sound RBMs of AN4 (512 to 2048 units) 0.27 to 0.90 in the first
        epoch; of 78 minibatches of synthetic speech (32 to 128 units) 0.51 to 0.93 in the first and 0.50 to 0.86 in
        the last; with learning rates 10 times too high 1.05 to 1.8, 100 times 2.5 to 3.7; dead RBMs 1.003 to 1.07."""
        figures = f"{self.describe(result)} in epoch {self.progress.epoch}; the mean of the data alone gives {self.mean_error:.6g}"
        if result.loss > self.max_error:
            raise DivergedError(f"the pretraining diverged: {figures}", hint=self.lower_rate())
        if not self.finished or result.loss < LEARNED_RATIO * self.mean_error:
            return
        longer = f"train it on more than {self.total_frames} frames (pretrain.epochs), or take less than "
        longer += f"{len(self.rbm.hidden_bias)} hidden units"
        hint = self.lower_rate() if self.options.rate > self.default_rate else longer
        if self.total_frames >= MIN_MINIBATCHES * self.inputs.batch_size * self.averager.groups.data.world_size:
            raise DivergedError(f"the pretraining diverged, an RBM has learned nothing: {figures}", hint=hint)
        log.warning("an RBM has learned nothing yet: %s; %s", figures, hint)

    @property
    def default_rate(self) -> float:
        return float(PretrainConfig.model_fields[self.rate_key].default)

    def lower_rate(self) -> str:
        """Advice: the default learning rate, or a tenth of a lower one."""
        rate, default = self.options.rate, self.default_rate
        change = f"from {rate:g} to {default if rate > default else rate / 10:g}"
        return f"lower pretrain.{self.rate_key}, which multiplies the mean gradient of a minibatch, {change}"

    def seconds_left(self, epochs: int) -> float:
        """For this RBM after so many epochs, if the others take as long as the last; NaN before the first has ended."""
        return (self.num_epochs - epochs) * self.epoch_seconds

    def begin_epoch(self) -> None:
        self.progress.start_clock()
        if self.progress.num_minibatches is None:
            minibatches = len(self.inputs)
            frames = minibatches * self.inputs.batch_size
            self.progress.num_minibatches = self.averager.begin_epoch(minibatches, frames)

    def epoch_batches(self) -> Iterator[Batch]:
        """`Batch.x`: (frames, visible) float32."""
        epoch = self.progress.epoch + 1
        batches = self.inputs.epoch(10_000 * (self.index + 1) + epoch, skip=self.progress.minibatch)
        name, left = f"rbm {self.index + 1} epoch {epoch} of {self.num_epochs}", self.seconds_left(epoch - 1)
        more = f", {duration(left)} left" if math.isfinite(left) else ""
        return self.progress.remaining(batches, self.run, name, self.losses, more)

    @property
    def parts(self) -> dict[str, Stateful]:
        """What each rank saves of its own: the pretraining continues from these to the same bits."""
        return {
            "rbm": self.rbm,
            "averager": self.averager,
            "losses": self.losses,
            "totals": self,
            "progress": self.progress,
        }

    @property
    def shared_parts(self) -> dict[str, Stateful]:
        return {}

    def metadata(self) -> dict[str, Any]:
        place = {"rbm": self.index + 1, "epoch": self.progress.epoch, "minibatch": self.progress.minibatch}
        return {**place, "data": self.data.model_dump()}

    def state_dict(self) -> dict[str, Tensor]:
        """`generator`, its state, uint8; `totals` (2,) float64: error and frames of all finished epochs."""
        totals = torch.tensor([self.total_error, self.total_frames], dtype=torch.float64)
        return {"generator": self.generator.get_state(), "totals": totals}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores `state_dict`; KeyError, ValueError, TypeError or RuntimeError where it does not fit."""
        self.generator.set_state(state["generator"])
        self.total_error, total_frames = state["totals"].tolist()
        self.total_frames = int(total_frames)


def train_rbm(trainer: RbmTrainer) -> Rbm:
    """Trains one RBM for its epochs. All workers run it together, each on its shard. Raises as `pretrain_dbn`."""
    while not trainer.finished:
        train_epoch(trainer)
        trainer.end_epoch()
        trainer.checkpoints.after_epoch(trainer)
    return trainer.rbm


class HiddenRepresentation:
    """The visible units of an RBM: spliced, normalized frames, through the layers below it, on the device of
    `below`."""

    def __init__(self, below: AcousticModel, frames: FrameSubset, sampler: Sampler, comm: Communicator) -> None:
        self.comm, self.batch_size = comm, sampler.batch_size
        self.workspace = Workspace(below.network, sampler.batch_size) if below.network.layers else None
        out = None if self.workspace is None else self.workspace.x
        self.loader = make_batch_loader(
            frames, below.transform, sampler, device=below.network.parameters.device, out=out
        )

    def __len__(self) -> int:
        return len(self.loader)

    def epoch(self, number: int = 0, skip: int = 0) -> Iterator[Batch]:
        """Minibatches whose `x` are visible units, (frames, visible) float32, valid until the next."""
        for batch in self.loader.epoch(number, skip):
            self.comm.watchdog.heartbeat()
            yield batch if self.workspace is None else batch._replace(x=self.workspace.of(batch.num_frames).forward())


def visible_statistics(below: AcousticModel, frames: FrameSubset, comm: Communicator) -> tuple[Tensor, float]:
    """(visible,) mean of each unit that the next RBM sees, and the sum of their variances, over at most about 10,000
    utterances. Collective."""
    dataset, device = frames.dataset, frames.indices.device
    dim = below.network.output_dim if below.network.layers else below.transform.output_dim
    total, squares = (
        torch.zeros(dim, dtype=torch.float64, device=device),
        torch.zeros((), dtype=torch.float64).to(device),
    )
    last = min(-(-STATISTICS_UTTERANCES // comm.world_size), len(dataset.utterances)) - 1
    end = int(dataset.offsets[last] + dataset.num_frames[last])
    chosen = FrameSubset(dataset, frames.indices[frames.indices < end])
    for batch in HiddenRepresentation(below, chosen, SequentialSampler(chosen, FRAMES_PER_BLOCK), comm).epoch():
        visible = batch.x
        total += visible.sum(dim=0, dtype=torch.float64)
        squares += visible.square().sum(dtype=torch.float64)
    sums = torch.cat([total.cpu(), torch.tensor([squares.item(), len(chosen)], dtype=torch.float64)])
    comm.all_reduce(sums)
    mean = sums[:-2] / sums[-1]
    return mean, max(0.0, float(sums[-2] / sums[-1] - mean.square().sum()))


def pretrain_dbn(recipe: Recipe, data: TrainingData, checkpoints: CheckpointPolicy, groups: Groups) -> AcousticModel:
    """Trains the RBMs that are not finished yet, and leaves each in the run dir of `checkpoints`. Collective. Returns
    the DBN as a network of hidden layers behind the input transform it was trained with, the same on all workers.
    DataError: the run dir has RBMs for other features, or a checkpoint from other data. DivergedError: an RBM diverged.
    UserError: the disk is full. TrainingInterrupted: the pretraining was asked to stop; a checkpoint was written."""
    run, world = checkpoints.run, groups.world
    device, num_rbms, utterances = data.device, len(recipe.model.rbm_units()), range(len(data.dataset.utterances))
    frames = FrameSubset(data.dataset, data.dataset.rows_of(utterances).to(device))
    require_minibatch(data.index, "pretrain.minibatch_size", recipe.pretrain.minibatch_size, data.shards)
    handle, identity = checkpoints.store.latest(), data_identity(data, groups.data).of("data.train")  # no label is read
    if handle is not None:
        with run.may_refuse_resume(world):
            check_same_data(handle.metadata.get("data"), identity, recipe, handle.path)
    dbn = _below(recipe, data, groups.data).to(device)
    for index in range(num_rbms):
        path = run.path / f"rbm{index + 1}.safetensors"
        if world.all_gather_object(world.rank == 0 and path.exists())[0]:
            dbn = load_model(path).to(device)
            dbn.check_features(frames.dataset.dim, path)
            log.info("rbm %d: finished before", index + 1)
            continue
        trainer = RbmTrainer(recipe, index, frames, dbn, checkpoints, groups)
        trainer.data = identity
        if handle is not None and handle.metadata.get("rbm") == index + 1:
            restore_state(trainer.parts, handle.rank_state(checkpoints.store.rank), handle.path)
            done = f"epoch {trainer.progress.epoch}, {trainer.progress.minibatch} minibatches"
            log.info("rbm %d: resumed from checkpoint %d: after %s", index + 1, handle.number, done)
        run.truncate_after(trainer.progress.epoch, rbm=index + 1)
        epoch, epochs = trainer.progress.epoch, trainer.num_epochs
        run.set_status(phase="pretraining", rbm=index + 1, num_rbms=num_rbms, epoch=epoch, max_epochs=epochs)
        checkpoints.begin(trainer)
        with closing(trainer.averager), closing(trainer.inputs.loader):
            dbn = append_rbm(dbn, train_rbm(trainer))
        checkpoints.end()
        if world.rank == 0:
            save_model(path, dbn)
    run.finish(dbn)
    return dbn


def _below(recipe: Recipe, data: TrainingData, comm: Communicator) -> AcousticModel:
    """What the lowest RBM is trained on: the spliced, normalized features, or the layers of `pretrain.below`, with its input.
    Collective. DataError: that network does not fit the recipe."""
    if recipe.pretrain.below is None:
        transform = input_transform(data, comm, all_utterances=True)
        return AcousticModel(model_features(recipe), transform, Network(()))
    model = lower_layers(recipe)
    model.check_features(data.dataset.dim, recipe.pretrain.below)
    return model


def lower_layers(recipe: Recipe) -> AcousticModel:
    """The layers of `pretrain.below` that RBMs are trained on, as those of `model.layers` below its last affine ones. DataError:
    there is no such network, or it has other layers or another input than the recipe."""
    assert recipe.pretrain.below is not None
    location = recipe.pretrain.below
    model = load_run(location)
    _check_same_input(recipe, model, "the network", location)
    *found, _ = without_dropout(model.network.layers)
    *wanted, _ = without_dropout(network_layers(recipe, model.transform.output_dim, 1))
    count = len(wanted) - len(recipe.model.rbm_units())
    _check_same_layers(found[:count], wanted[:count], "the network", location)
    size = num_parameters(wanted[:count])
    return replace(model, network=Network(wanted[:count], model.network.parameters[:size].clone()))


def without_dropout(layers: Sequence[Layer]) -> list[Layer]:
    """A network's layers but for dropout, which has no parameters: the others have the same part of the flat buffer."""
    return [layer for layer in layers if layer.kind != Dropout.kind]


def append_rbm(below: AcousticModel, rbm: Rbm) -> AcousticModel:
    hidden, visible = rbm.weight.shape
    layers = (*below.network.layers, Affine(visible, hidden, "sigmoid"))
    parameters = torch.cat([below.network.parameters, rbm.weight.flatten(), rbm.hidden_bias])
    return AcousticModel(below.features, below.transform, Network(layers, parameters))


def pretraining_recipe(recipe: Recipe) -> str:
    """recipe.yaml of a pretraining directory: only what its RBMs depend on."""
    workers = recipe.parallel.replicas if recipe.parallel.pretrain_data == "sharded" else 1
    period = recipe.parallel.averaging_period if workers > 1 else 10
    read = {
        "data": recipe.data.model_copy(update={"cv": CrossValidationConfig()}),
        "parallel": AveragingConfig(workers=workers, averaging_period=period),
        "optimizer": SgdConfig(),
        "schedule": NewbobConfig(),
        "log": LogConfig(),
        "minibatch_size": recipe.pretrain.minibatch_size,
        "minibatch_scope": "worker",
        "precision": "auto",  # RBMs are trained in float32
    }
    return dump_recipe(recipe.model_copy(update=read))


def load_dbn(recipe: Recipe, source: Path) -> AcousticModel:
    """A finished DBN: a pretraining dir, or Kaldi's `N.dbn` with `pretrain.feature_transform`. DataError if it is
    unfinished, damaged, or not of the recipe's layers, splice and feature pipeline."""
    if source.is_dir() and not (source / DBN).exists():
        hint = "let ddnn pretrain finish: started again with the same recipe, it resumes"
        if (source / PRETRAIN / DBN).exists():
            hint = f"the RBMs of this training are in {source / PRETRAIN}: set pretrain.dbn to that"
        raise DataError(f"there is no {DBN}: no pretraining has finished here", location=source, hint=hint)
    if source.is_dir():
        dbn = load_model(source / DBN)
    else:
        front = recipe.pretrain.feature_transform
        components = read_nnet1(front) if front is not None else ()
        dbn = from_nnet1(read_nnet1(source), components, location=source, features=model_features(recipe))
    _check_same_input(recipe, dbn, "the DBN", source)
    *wanted, _ = network_layers(recipe, dbn.transform.output_dim, 1, on_dbn=True)
    _check_same_layers(dbn.network.layers, wanted, "the DBN", source)
    return dbn


def _check_same_input(recipe: Recipe, model: AcousticModel, name: str, location: Path) -> None:
    """DataError where a model's input is not the recipe's."""
    splice = recipe.data.splice
    for key, found, expected in (
        ("data.splice", model.transform.offsets, tuple(range(-splice, splice + 1))),
        ("data.cmvn, data.deltas and data.transforms", model.features, model_features(recipe)),
        ("data.normalize", model.transform.scale is not None, recipe.data.normalize),
    ):
        _refuse_other(name, key, found, expected, location)


def _check_same_layers(layers: Sequence[Layer], wanted: Sequence[Layer], name: str, location: Path) -> None:
    """DataError where `layers` are not those that are wanted, but for dropout, rates and initial values."""
    both = [without_dropout(each) for each in (layers, wanted)]
    texts = [", ".join(f"{one.output_dim} {one.label}" for one in each) for each in both]
    if texts[0] == texts[1]:
        sizes = [[{k: v for k, v in one.config().items() if not isinstance(v, float)} for one in each] for each in both]
        texts = [", ".join(map(str, each)) for each in sizes] if sizes[0] != sizes[1] else texts
    _refuse_other(name, "model", texts[0], texts[1], location)


def _refuse_other(name: str, key: str, found: object, expected: object, location: Path) -> None:
    if found != expected:
        hint = f"set {key} to what {name} was trained with"
        raise DataError(f"{name} was trained with {found}, the recipe has {expected}", location=location, hint=hint)
