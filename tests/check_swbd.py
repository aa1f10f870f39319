"""`make check-swbd`: recipes/swbd against a synthetic corpus of Switchboard's shape. Trains nothing.

    python tests/check_swbd.py

Each recipe is loaded with all its checks, its corpus is planned from the headers, held-out speakers and shards are
drawn, and what it would need at 286 hours is said, one line a recipe. Exit code 1 where one is not what its name says.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ddnn.data.index import DEFAULT_FRACTION, UtteranceIndex, assign_shards, build_index, hold_out_fraction
from ddnn.kaldi.alignments import read_alignments
from ddnn.kaldi.data_dir import FRAMES_PER_HOUR, read_data_dir
from ddnn.nn.layers import num_parameters
from ddnn.recipe.load import load_recipe
from ddnn.recipe.schema import Recipe
from ddnn.reproduce.tables import ReproduceConfig, load_config, paper
from ddnn.synth.corpus import SynthOptions, synthesize
from ddnn.training.network_layers import network_layers
from ddnn.training.options import averaging_options, estimate_memory
from ddnn.util.errors import UserError

RECIPES = Path(__file__).resolve().parents[1] / "recipes" / "swbd"
NO_CELLS = ("base.yaml", "rbm.yaml")
"""Recipes that are included, or for `ddnn pretrain`."""
AFTERWARDS = ("reproduce.yaml", "smbr.yaml")
"""What needs the results of others."""
WIDTHS = (440, *(2048,) * 6, 8806)
DATA, ALIGNMENTS, TEST = "data-fmllr-tri4/train_nodup", "exp/tri4_ali_nodup", "data-fmllr-tri4/eval2000"
SHAPE = SynthOptions(hours=0.3, speakers=60, dim=40, pdfs=8806)
HOURS, FRAMES_OF_AN_UTTERANCE = 286, 433
"""Of train_nodup; of the 260,000 utterances of 313 hours that it is made of (both from Kaldi's run.sh)."""


@dataclass(frozen=True)
class Shape:
    """A corpus of Switchboard's shape, small, in the working directory: as planned from headers, and its pdfs."""

    plan: UtteranceIndex
    pdfs: int


def cells(config: ReproduceConfig) -> list[tuple[str, int]]:
    """Condition and workers of all that the tables ask of this corpus, and of what the paper has beside. `schemes` is for
    recipes/spoken: a corpus needs no recipe for its extensions."""
    tables = [table for table in paper().tables if table.name != "schemes"]
    asked = {(condition.name, workers) for table in tables for condition, workers in table.settings(config)}
    published = {(name, gpus) for table in tables for name, sizes in table.published.items() for gpus in sizes}
    return sorted({(config.recipe_name(condition), workers) for condition, workers in asked | published})


@contextlib.contextmanager
def corpus(folder: Path) -> Iterator[Shape]:
    """Writes the corpus under Kaldi's names and makes `folder` the working directory meanwhile."""
    synthesize(folder / "synth", SHAPE)
    for made, name in (("train", DATA), ("ali", ALIGNMENTS), ("test", TEST)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "synth" / made).rename(folder / name)
    before = Path.cwd()
    os.chdir(folder)
    try:
        alignments = read_alignments(Path(ALIGNMENTS))
        yield Shape(build_index(read_data_dir(Path(DATA)), alignments), alignments.num_pdfs)
    finally:
        os.chdir(before)


def check_recipe(path: Path, shape: Shape) -> str:
    """Loads a recipe and works out what it would do; a line about it.

    Raises:
        UserError: it is not what its name says, or cannot be run on such a corpus.
    """
    recipe = load_recipe(path)
    _expect(path, "network", tuple(widths_of(recipe, shape)), WIDTHS)
    _expect(path, "data.train", recipe.data.train, Path(DATA).resolve())
    _expect(path, "data.alignments", recipe.data.alignments, Path(ALIGNMENTS).resolve())
    name = re.fullmatch(r"[a-z0-9-]+-([0-9]+)", path.stem)
    if path.name not in NO_CELLS:
        _expect(path, "parallel.workers", recipe.parallel.workers, int(name[1]) if name else "SETTING-WORKERS.yaml")
    _check_shards(path, recipe, shape)
    return f"{path.name}: {describe(recipe, shape)}"


def widths_of(recipe: Recipe, shape: Shape) -> list[int]:
    """Inputs of the network, units of each hidden layer, outputs."""
    inputs = shape.plan.dim * (2 * recipe.data.splice + 1)
    return [inputs, *[recipe.model.hidden_units] * recipe.model.hidden_layers, shape.pdfs]


def _check_shards(path: Path, recipe: Recipe, shape: Shape) -> None:
    """Every worker has minibatches to train on and frames to judge by."""
    plan, workers = shape.plan, recipe.parallel.workers
    for message, chosen in zip(
        ("training", "cross-validation"),
        hold_out_fraction(plan, recipe.data.cv.fraction or DEFAULT_FRACTION, recipe.seed),
        strict=True,
    ):
        shares = assign_shards(plan.num_frames, chosen, workers)
        _expect(path, f"utterances for {message}", sorted(u for share in shares for u in share), chosen)
        frames = [int(plan.num_frames[share].sum()) for share in shares]
        least = recipe.minibatch_size if message == "training" else 1
        if min(frames) < least:
            raise UserError(f"{message}: a worker has {min(frames)} frames, expected {least} or more", location=path)


def describe(recipe: Recipe, shape: Shape) -> str:
    """What it trains, and what a worker on a CPU needs for 286 hours of it."""
    options, workers = recipe.parallel, recipe.parallel.workers
    widths = widths_of(recipe, shape)
    fraction = recipe.data.cv.fraction or DEFAULT_FRACTION
    frames = HOURS * FRAMES_PER_HOUR // workers
    rate = recipe.schedule.initial_learning_rate * (workers if averaging_options(options).scale_learning_rate else 1)
    rows = frames + 2 * recipe.data.splice * frames // FRAMES_OF_AN_UTTERANCE
    value_bytes = 2 if recipe.data.feature_dtype == "float16" else 4
    frames_bytes = rows * (shape.plan.dim * value_bytes + 4) + 24 * frames
    needs = {**estimate_memory(recipe, widths[0], shape.pdfs, workers).cpu, "frames": frames_bytes}
    parameters = num_parameters(network_layers(recipe, widths[0], shape.pdfs))
    minibatches = int(frames * (1 - fraction)) // recipe.minibatch_size
    every = 1 if options.strategy == "gradient-all-reduce" else options.averaging_period
    extras = [
        f"after {options.warmup_minibatches} minibatches of {options.warmup}" if options.warmup != "none" else "",
        "overlap" if options.overlap else "",
        f"{options.comm_dtype} on the wire" if options.comm_dtype != "float32" else "",
    ]
    averaging = f"{options.strategy} every {every}: {minibatches // every} an epoch" if workers > 1 else "no averaging"
    return ", ".join(
        [
            f"{widths[0]}-{len(widths) - 2}x{widths[1]}-{widths[-1]} ({parameters:,} parameters)",
            f"{recipe.init}, {recipe.optimizer.name}, minibatch {recipe.minibatch_size}",
            f"{recipe.schedule.name} from {rate:g}",
            f"{workers} workers, {averaging}" if workers > 1 else "1 worker",
            *filter(None, extras if workers > 1 else []),
            f"{sum(needs.values()) / 2**30:.1f} GiB a worker",
        ]
    )


def _expect(path: Path, message: str, found: object, expected: object) -> None:
    if found != expected:
        raise UserError(f"{message}: {found} found, expected {expected}", location=path)


def _by_workers(path: Path) -> tuple[str, int]:
    setting, _, workers = path.stem.rpartition("-")
    return (setting, int(workers)) if workers.isdigit() else (path.stem, 0)


def problems(folder: Path, shape: Shape) -> list[str]:
    """Checks all recipes of a folder and that none is missing, printing a line for each; what is wrong."""
    found = []
    paths = sorted((path for path in folder.glob("*.yaml") if path.name not in AFTERWARDS), key=_by_workers)
    for path in paths:
        try:
            print(check_recipe(path, shape))
        except UserError as error:
            found.append(str(error))
    try:
        config = load_config(folder)
        wanted = [config.recipes.format(condition=name, workers=workers) for name, workers in cells(config)]
        for name in [*wanted, config.dbn_recipe]:
            if not (folder / name).is_file():
                found.append(f"the tables ask for it and it is not there\n  location: {folder / name}")
        for path in paths:
            if path.name not in (*wanted, *NO_CELLS):
                found.append(f"no table asks for it\n  location: {path}")
        for test in config.tests.values():
            if read_data_dir(test.data).speakers is None:
                found.append(f"no utt2spk\n  location: {test.data}")
    except UserError as error:
        found.append(str(error))
    print(f"{len(paths)} recipes, {len(found)} problems; memory on a CPU at {HOURS} hours")
    return found


def main() -> int:
    """The whole check in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder, corpus(Path(folder).resolve()) as shape:
        found = problems(RECIPES, shape)
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
