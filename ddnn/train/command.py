"""`ddnn train`: from a recipe to a trained run dir."""

from __future__ import annotations

import logging
import platform
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ddnn import __version__
from ddnn.data.corpus import Corpus, FeaturePipeline, load_corpus
from ddnn.data.minibatches import FrameSet, frame_set
from ddnn.data.split import DEFAULT_FRACTION, split_by_fraction, split_by_speakers_file
from ddnn.data.transform import InputTransform, normalising, plain_splice
from ddnn.device import choose_device
from ddnn.errors import DataError, RecipeError, UserError
from ddnn.kaldi.alignments import Alignments, pdf_counts, read_alignments
from ddnn.model.acoustic import AcousticModel
from ddnn.model.initialise import initialise_randomly
from ddnn.model.network import Network, hidden_stack
from ddnn.optim.schedule import make_schedule
from ddnn.optim.sgd import make_optimizer
from ddnn.progress import progress_bar
from ddnn.recipe.load import dump_recipe
from ddnn.recipe.schema import Recipe
from ddnn.train.loop import Setup, train
from ddnn.train.pretrain import STACK, claim, load_stack, pretrain
from ddnn.train.run_dir import PRETRAIN, RunDir

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingData:
    """Frames to train on and to judge by, and the alignments they carry."""

    corpus: Corpus
    train_utterances: list[int]
    cv: FrameSet
    alignments: Alignments


def run_training(recipe: Recipe, run_dir: Path, device: str = "auto") -> None:
    """Trains as the recipe says and leaves everything in `run_dir`.

    Raises:
        UserError: anything the user must mend: recipe, data, device, disk.
    """
    on = choose_device(device, threads=recipe.parallel.threads)
    run = RunDir(run_dir)
    log_file = run.open_log()
    root = logging.getLogger("ddnn")
    root.addHandler(log_file)
    root.setLevel(logging.INFO)
    try:
        log.info("ddnn %s, torch %s, %s, python %s", __version__, torch.__version__, on, platform.python_version())
        if recipe.init == "rbm" and recipe.pretrain.from_ is None:
            claim(recipe, run_dir / PRETRAIN)  # before anything of an earlier run is written over
        run.write_recipe(dump_recipe(recipe))
        data = load_training_data(recipe, on)
        _check_size("minibatch", recipe.minibatch, sum(int(data.corpus.num_frames[u]) for u in data.train_utterances))
        model = initial_model(recipe, data, run_dir / PRETRAIN).to(on)
        run.write_counts(pdf_counts(data.alignments, data.corpus.utterances))
        setup = Setup(
            model=model,
            optimizer=make_optimizer(recipe.optimizer, model.network),
            schedule=make_schedule(recipe.schedule),
            train=frame_set(data.corpus, data.train_utterances),
            cv=data.cv,
            minibatch=recipe.minibatch,
            seed=recipe.seed,
        )
        log.info(
            "%d parameters, %d frames to train on, %d to judge by; rates multiply the gradient summed over %d frames",
            model.network.parameters.numel(),
            len(setup.train),
            len(setup.cv),
            recipe.minibatch,
        )
        trained = train(setup, run)
        run.finish(trained.to(torch.device("cpu")))
        log.info("finished: %s", run_dir / "final.safetensors")
    except (UserError, KeyboardInterrupt) as error:
        # The command line tells the person; whoever reads the log later is told here.
        said = {"msg": f"stopped: {str(error) or 'interrupted'}", "levelno": logging.ERROR, "levelname": "ERROR"}
        log_file.handle(logging.makeLogRecord(said))
        raise
    finally:
        root.removeHandler(log_file)
        log_file.close()


def describe(recipe: Recipe) -> str:
    """One paragraph of what a recipe would train, without reading any data."""
    hidden = f"{recipe.model.hidden_layers} x {recipe.model.hidden_units} {recipe.model.activation}"
    return (
        f"{hidden}, init {recipe.init}, {recipe.optimizer.name}, minibatch {recipe.minibatch}, {recipe.schedule.name} "
        f"from {recipe.schedule.initial:g} (times the gradient summed over a minibatch, "
        f"{recipe.schedule.initial * recipe.minibatch:g} on its mean), {recipe.parallel.workers} worker(s)"
    )


def load_training_data(recipe: Recipe, device: torch.device) -> TrainingData:
    """Reads alignments and features and holds out the cross-validation set; everything ends up on `device`."""
    alignments = read_alignments(recipe.data.alignments, num_pdfs=recipe.data.pdfs)
    corpus = _load(recipe, recipe.data.train, alignments).to(device)
    held_out = recipe.data.cv
    if held_out.data is not None and held_out.alignments is not None:
        cv_alignments = read_alignments(held_out.alignments, num_pdfs=recipe.data.pdfs)
        if cv_alignments.num_pdfs > alignments.num_pdfs:
            raise DataError(
                f"{cv_alignments.num_pdfs} pdfs for cross-validation, {alignments.num_pdfs} for training",
                where=held_out.alignments,
                mend="use alignments made with the same final.mdl",
            )
        cv_corpus = _load(recipe, held_out.data, cv_alignments).to(device)
        if cv_corpus.dim != corpus.dim:
            raise DataError(
                f"{cv_corpus.dim} dims found, {corpus.dim} expected as in {recipe.data.train}", where=held_out.data
            )
        everything = list(range(len(corpus.utterances)))
        return TrainingData(
            corpus, everything, frame_set(cv_corpus, list(range(len(cv_corpus.utterances)))), alignments
        )
    if held_out.speakers_file is not None:
        train_utterances, cv = split_by_speakers_file(corpus, held_out.speakers_file)
    else:
        train_utterances, cv = split_by_fraction(corpus, held_out.fraction or DEFAULT_FRACTION, recipe.seed)
    return TrainingData(corpus, train_utterances, frame_set(corpus, cv), alignments)


def _load(recipe: Recipe, data: Path, alignments: Alignments) -> Corpus:
    corpus = load_corpus(
        data,
        alignments,
        context=recipe.data.splice,
        pipeline=FeaturePipeline(recipe.data.cmvn, recipe.data.deltas),
        store_dtype=getattr(torch, recipe.data.store),
        allow_pipes=recipe.data.allow_pipes,
        max_missing=recipe.data.max_missing,
        progress=progress_bar("loading"),
    )
    log.info(
        "%s: %d utterances, %d frames of %d dims", data, len(corpus.utterances), corpus.num_frames.sum(), corpus.dim
    )
    return corpus


def initial_model(recipe: Recipe, data: TrainingData, pretrain_dir: Path) -> AcousticModel:
    """The model that training starts from, on the CPU: random, or on a stack of RBMs, trained where there is none."""
    stack = None
    if recipe.init == "random":
        transform = input_transform(recipe, data.corpus, data.train_utterances)
    else:
        if recipe.pretrain.from_ is not None:
            stack = load_stack(recipe, recipe.pretrain.from_)
            stack.check_features(data.corpus.dim, recipe.pretrain.from_)
        else:
            stack = pretrain_on(recipe, data.corpus, pretrain_dir)
        transform = stack.transform.to(torch.device("cpu"))
    model = recipe.model
    layers = hidden_stack(
        transform.output_dim, model.hidden_layers, model.hidden_units, data.alignments.num_pdfs, model.activation
    )
    if stack is not None:  # nnet1 makes the output layer on a stack without the output bias's rate of 0.1
        layers = (*layers[:-1], replace(layers[-1], bias_rate=1.0))
    network = Network(layers)
    initialise_randomly(network, recipe.seed)
    if stack is not None:
        network.parameters[: stack.network.parameters.numel()] = stack.network.parameters.cpu()
    return AcousticModel(FeaturePipeline(recipe.data.cmvn, recipe.data.deltas), transform, network)


def input_transform(recipe: Recipe, corpus: Corpus, utterances: list[int]) -> InputTransform:
    """Splice, and the normalisation that the recipe asks for with the statistics of these utterances."""
    transform = plain_splice(corpus.dim, recipe.data.splice)
    return normalising(transform, corpus, utterances) if recipe.data.normalise else transform


def pretrain_on(recipe: Recipe, corpus: Corpus, directory: Path) -> AcousticModel:
    """A stack of RBMs on all utterances of the corpus, those held out too: pretraining reads no labels."""
    everything = list(range(len(corpus.utterances)))
    transform = input_transform(recipe, corpus, everything).to(corpus.store.device)
    frames = frame_set(corpus, everything)
    _check_size("pretrain.minibatch", recipe.pretrain.minibatch, len(frames))
    return pretrain(recipe, frames, transform, directory)


def run_pretraining(recipe: Recipe, run_dir: Path, device: str = "auto") -> None:
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
    on = choose_device(device, threads=recipe.parallel.threads)
    logging.getLogger("ddnn").setLevel(logging.INFO)
    alignments = read_alignments(recipe.data.alignments, num_pdfs=recipe.data.pdfs)
    pretrain_on(recipe, _load(recipe, recipe.data.train, alignments).to(on), run_dir)
    log.info("finished: %s", run_dir / STACK)


def _check_size(key: str, minibatch: int, frames: int) -> None:
    if frames < minibatch:
        raise RecipeError(
            f"{frames} frames do not fill one minibatch of {minibatch}",
            where=key,
            mend="take a smaller minibatch or more data",
        )
