"""RBM pretraining: a greedy stack of RBMs, layer by layer, after Kaldi nnet1's steps/nnet/pretrain_dbn.sh.

All utterances of the training data are used, those held out for cross-validation too, as Kaldi does: no label is read.
A pretraining dir holds

recipe.yaml              the recipe as it was run
metrics.jsonl            one JSON object a line: per layer and pass
rbm1.safetensors, ...    each RBM once it is finished
stack.safetensors        all of them as hidden layers, once the last is finished

A dir whose pretraining was broken off goes on at the layer where it was, to the same bits: what is random in a layer
depends on the recipe's seed, the layer and the worker's rank alone.

Several workers each train on their shard from the same RBM, and take the mean of their weights and biases after every
`parallel.every` minibatches and after each pass. Rates stay as they are; momentum stays with its worker. The first
worker alone reads and writes the dir.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddnn.data.corpus import FeaturePipeline
from ddnn.data.minibatches import FrameSet, in_order, num_minibatches, shuffled_minibatches
from ddnn.data.transform import STATISTICS_UTTERANCES, InputTransform, gather, plain_splice
from ddnn.errors import DataError, UserError
from ddnn.files import make_directory, read_regular, write_text
from ddnn.kaldi.features import FRAMES_PER_HOUR
from ddnn.kaldi.nnet1 import read_nnet1
from ddnn.model.acoustic import AcousticModel, load_model, save_model
from ddnn.model.exchange import from_nnet1
from ddnn.model.network import Buffers, Layer, Network, forward, hidden_stack
from ddnn.model.rbm import Cd1Options, Rbm, VisibleKind, cd1_step, init_rbm
from ddnn.parallel.exchange import Exchange
from ddnn.parallel.mean import mean
from ddnn.progress import frame_counter
from ddnn.recipe.load import dump_recipe
from ddnn.recipe.schema import CrossValidation, Optimizer, Parallel, Pretrain, Recipe, Schedule
from ddnn.train.read_metrics import MOST_BYTES
from ddnn.train.run_dir_files import METRICS, RECIPE, STACK
from ddnn.train.run_files import append_metrics

log = logging.getLogger(__name__)


def passes_of_layer(recipe: Pretrain, layer: int, frames: int) -> int:
    """How often RBM `layer` (0 is the lowest) sees the data, at least once.

    From `passes` (its last number serves all further layers), else from `hours` of speech: the Gauss RBM twice as many.
    """
    if recipe.passes is not None:
        return recipe.passes[min(layer, len(recipe.passes) - 1)]
    return (2 if layer == 0 else 1) * max(1, round(recipe.hours * FRAMES_PER_HOUR / frames))


def pretrain(
    recipe: Recipe, frames: FrameSet, transform: InputTransform, directory: Path, exchange: Exchange | None = None
) -> AcousticModel:
    """Trains the stack that the recipe asks for, or what is missing of it, and leaves it in `directory`. Collective.

    Args:
        frames: this worker's frames to train on, on the device to train on.

    Returns:
        The stack as a network of hidden layers behind the input transform it was trained with, the same on all workers.

    Raises:
        UserError: `directory` holds something else, or layers for other features; an RBM explodes beyond its guard.
    """
    exchange = exchange or Exchange()
    first = exchange.rank == 0
    if first:
        claim(recipe, directory)
    pipeline = FeaturePipeline(recipe.data.cmvn, recipe.data.deltas)
    stack = AcousticModel(pipeline, transform, Network((), torch.zeros(0, device=frames.rows.device)))
    for layer in range(recipe.model.hidden_layers):
        path = directory / f"rbm{layer + 1}.safetensors"
        if exchange.gather(first and path.exists())[0]:
            found = None
            if first:
                found = load_model(path).to(frames.rows.device)
                found.check_features(frames.corpus.dim, path)
                log.info("rbm %d: finished before", layer + 1)
            stack = share_stack(recipe, found, frames.corpus.dim, frames.rows.device, exchange, layers=layer + 1)
            continue
        if first:
            _forget_layers(directory / METRICS, layer)
        with exchange.guarded():
            rbm = _train_layer(recipe, layer, frames, stack, directory / METRICS, exchange)
        stack = _with_rbm(stack, rbm)
        if first:
            save_model(path, stack)
    if first:
        save_model(directory / STACK, stack)
    return stack


def share_stack(
    recipe: Recipe, stack: AcousticModel | None, dim: int, device: torch.device, exchange: Exchange, layers: int
) -> AcousticModel:
    """The first worker's stack of `layers` layers, on every worker. Collective; the others give None."""
    transform = plain_splice(dim, recipe.data.splice)
    shape = hidden_stack(transform.output_dim, layers, recipe.model.hidden_units, 1, recipe.model.activation)[:-1]
    sizes = [sum(layer.num_parameters for layer in shape), transform.output_dim, transform.output_dim]
    flat = torch.zeros(sum(sizes))
    if stack is not None:
        if exchange.size == 1:
            return stack
        parts = torch.split(flat, sizes)
        parts[0].copy_(stack.network.parameters)
        if stack.transform.shift is not None and stack.transform.scale is not None:
            parts[1].copy_(stack.transform.shift)
            parts[2].copy_(stack.transform.scale)
    exchange.broadcast(flat)
    parameters, shift, scale = (part.to(device) for part in torch.split(flat, sizes))
    if recipe.data.normalise:
        transform = replace(transform, shift=shift, scale=scale)
    return AcousticModel(FeaturePipeline(recipe.data.cmvn, recipe.data.deltas), transform, Network(shape, parameters))


def _train_layer(
    recipe: Recipe, layer: int, frames: FrameSet, below: AcousticModel, metrics: Path, exchange: Exchange
) -> Rbm:
    """One RBM on the outputs of the layers below it."""
    settings, device = recipe.pretrain, frames.rows.device
    seed = (recipe.seed * 1_000_003 + 7919 * (layer + 1)) % 2**63
    generator = torch.Generator(device).manual_seed(seed)
    visible = below.transform.output_dim if layer == 0 else recipe.model.hidden_units
    mean_output = _mean_output(below, frames, exchange) if layer else None
    kind: VisibleKind = "bernoulli" if layer else "gauss"
    rbm = init_rbm(visible, recipe.model.hidden_units, kind, generator, visible_mean=mean_output)
    if exchange.rank:  # another draw of the hidden units; an odd factor keeps the ranks apart
        generator.manual_seed((seed + exchange.rank * 2_654_435_761) % 2**63)
    options = Cd1Options(
        rate=settings.rate if layer else settings.gauss_rate,
        l2=settings.l2,
        momentum_as_kaldi=settings.momentum_as_kaldi,
    )
    reader = _Reader(below, frames, settings.minibatch, exchange)
    everyone = int(sum(exchange.gather(len(frames))))
    passes = passes_of_layer(settings, layer, everyone)
    averagings = exchange.agree_min(num_minibatches(frames, settings.minibatch) // recipe.parallel.every)
    total, seen = 0.0, 0
    for number in range(1, passes + 1):
        started, error, count = time.perf_counter(), torch.zeros((), dtype=torch.float64, device=device), 0
        with frame_counter(f"rbm {layer + 1} pass {number}/{passes}", len(frames)) as bar:
            order = shuffled_minibatches(
                frames, settings.minibatch, seed=recipe.seed, epoch=10_000 * (layer + 1) + number, rank=exchange.rank
            )
            for minibatch, rows in enumerate(order, 1):
                error += cd1_step(rbm, reader.read(rows), options, generator)
                count += len(rows)
                bar.update(len(rows))
                if minibatch % recipe.parallel.every == 0 and minibatch // recipe.parallel.every <= averagings:
                    _average(rbm, exchange)
        _average(rbm, exchange, weight=count)
        both = exchange.all_gather(torch.tensor([error.item(), count], dtype=torch.float64)).sum(dim=0).tolist()
        total, seen = total + both[0], seen + int(both[1])
        if not math.isfinite(total):
            raise UserError(
                f"the reconstruction error of RBM {layer + 1} is {total} in pass {number}",
                mend=f"lower pretrain.{'rate' if layer else 'gauss_rate'}, now {options.rate:g}",
            )
        if exchange.rank == 0:
            seconds = time.perf_counter() - started
            _record(metrics, layer, number, both[0] / both[1], total / seen, int(both[1]), seconds, rbm)
    return rbm


def _average(rbm: Rbm, exchange: Exchange, weight: float = 1.0) -> None:
    """Weights and biases <- their mean over the workers, the same bits on each."""
    if exchange.size > 1:
        staging = rbm.parameters.cpu()
        mean(exchange, staging, weight)
        rbm.parameters.copy_(staging)


class _Reader:
    """Minibatches as the layer to train sees them: spliced, normalised, through the layers below."""

    def __init__(self, below: AcousticModel, frames: FrameSet, minibatch: int, exchange: Exchange) -> None:
        self.below, self.frames, self.exchange = below, frames, exchange
        self.x = torch.empty(minibatch, below.transform.output_dim, device=frames.rows.device)
        self.buffers = Buffers(below.network, minibatch) if below.network.layers else None

    def read(self, rows: Tensor) -> Tensor:
        """(frames, visible) float32, valid until the next call."""
        self.exchange.tick()
        if self.buffers is None:
            return gather(self.frames.corpus, self.below.transform, rows, self.x[: len(rows)])
        buffers = self.buffers.of(len(rows))
        gather(self.frames.corpus, self.below.transform, rows, buffers.x)
        return forward(self.below.network, buffers)


def _mean_output(below: AcousticModel, frames: FrameSet, exchange: Exchange) -> Tensor:
    """(visible,) mean activation of the units that the next RBM sees, over at most about 10,000 utterances."""
    reader = _Reader(below, frames, 1024, exchange)
    total = torch.zeros(below.network.output_dim, dtype=torch.float64, device=frames.rows.device)
    last = min(-(-STATISTICS_UTTERANCES // exchange.size), len(frames.corpus.utterances)) - 1
    end = int(frames.corpus.first_row[last] + frames.corpus.num_frames[last])
    chosen = FrameSet(frames.corpus, frames.rows[frames.rows < end])
    for rows in in_order(chosen, 1024):
        total += reader.read(rows).sum(dim=0, dtype=torch.float64)
    together = torch.cat([total.cpu(), torch.tensor([len(chosen)], dtype=torch.float64)])
    exchange.sum_in_place(together)
    return together[:-1] / together[-1]


def _with_rbm(below: AcousticModel, rbm: Rbm) -> AcousticModel:
    hidden, visible = rbm.weight.shape
    layers = (*below.network.layers, Layer(visible, hidden, "sigmoid"))
    parameters = torch.cat([below.network.parameters, rbm.weight.flatten(), rbm.hidden_bias])
    return AcousticModel(below.pipeline, below.transform, Network(layers, parameters))


def claim(recipe: Recipe, directory: Path) -> None:
    """Takes a new directory for the recipe's pretraining, or one in which the same pretraining was begun.

    Raises:
        UserError: something else is there.
    """
    workers = recipe.parallel.workers if recipe.parallel.pretrain == "sharded" else 1
    read = recipe.model_copy(
        update={
            "data": recipe.data.model_copy(update={"cv": CrossValidation()}),
            "parallel": Parallel(workers=workers, every=recipe.parallel.every if workers > 1 else 10),
            "optimizer": Optimizer(),
            "schedule": Schedule(),
            "minibatch": recipe.pretrain.minibatch,
        }
    )
    text, written = dump_recipe(read), directory / RECIPE
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        if not written.is_file() or _text_of(written, MOST_BYTES) != text:
            raise UserError(
                "the directory exists already, and holds no pretraining by the same data, model, pretrain and seed",
                where=directory,
                mend="name another --run-dir, or remove this one if it is not needed; "
                "a finished stack is taken by pretrain.from",
            )
        if (directory / METRICS).exists():
            log.info("%s: going on where it was broken off", directory)
        return
    make_directory(directory)
    write_text(written, text)


def _text_of(path: Path, most: int) -> str:
    try:
        return read_regular(path, most).decode("utf-8", "replace")
    except OSError as error:
        raise DataError(f"cannot read {path.name}: {error.strerror}", where=path, mend="take it away") from error


def _forget_layers(metrics: Path, layer: int) -> None:
    """Takes out the lines of a layer that is begun again, and one that was cut as it was written."""
    if metrics.exists():
        whole = r'\{"layer": ([0-9]{1,9}), .*\}\n'
        lines = _text_of(metrics, MOST_BYTES).splitlines(keepends=True)
        found = [(line, re.fullmatch(whole, line)) for line in lines]
        write_text(metrics, "".join(line for line, match in found if match and int(match[1]) <= layer))


def _record(
    metrics: Path, layer: int, number: int, error: float, average: float, frames: int, seconds: float, rbm: Rbm
) -> None:
    line: dict[str, Any] = {
        "layer": layer + 1,
        "pass": number,
        "reconstruction_error": error,
        "reconstruction_error_all_passes": average,
        "frames": frames,
        "seconds": round(seconds, 4),
        "frames_per_second": round(frames / seconds, 1),
        "guard_count": rbm.guard_count,
    }
    log.info(
        "rbm %d pass %2d reconstruction error %.4f  (all passes %.4f)  %.1f s  %.0f frames/s",
        *(layer + 1, number, error, average, seconds, frames / seconds),
    )
    append_metrics(metrics, line)


def load_stack(recipe: Recipe, source: Path) -> AcousticModel:
    """A finished stack: a pretraining dir, or Kaldi's `N.dbn` with `pretrain.feature_transform`.

    Raises:
        DataError: unfinished, damaged, or not of the recipe's layers, splice and feature pipeline.
    """
    stack = _read_stack(recipe, source)
    model, splice = recipe.model, recipe.data.splice
    for key, found, expected in (
        (
            "model",
            _describe([(layer.outputs, layer.activation) for layer in stack.network.layers]),
            _describe([(model.hidden_units, model.activation)] * model.hidden_layers),
        ),
        ("data.splice", stack.transform.offsets, tuple(range(-splice, splice + 1))),
        ("data.cmvn and data.deltas", stack.pipeline, FeaturePipeline(recipe.data.cmvn, recipe.data.deltas)),
        ("data.normalise", stack.transform.scale is not None, recipe.data.normalise),
    ):
        if found != expected:
            raise DataError(
                f"the stack was trained with {found}, the recipe has {expected}",
                where=source,
                mend=f"set {key} to what the stack was trained with",
            )
    return stack


def _describe(layers: Sequence[tuple[int, str]]) -> str:
    return ", ".join(f"{units} {activation}" for units, activation in layers)


def _read_stack(recipe: Recipe, source: Path) -> AcousticModel:
    if source.is_dir():
        if not (source / STACK).exists():
            raise DataError(
                f"there is no {STACK}: no pretraining has finished here",
                where=source,
                mend="let ddnn pretrain finish: started again with the same recipe, it goes on where it was",
            )
        return load_model(source / STACK)
    front = recipe.pretrain.feature_transform
    components = read_nnet1(front) if front is not None else ()
    pipeline = FeaturePipeline(recipe.data.cmvn, recipe.data.deltas)
    return from_nnet1(read_nnet1(source), components, where=source, pipeline=pipeline)
