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

from ddnn.data.needs import count_parameters, frames_needs, layer_widths, training_needs
from ddnn.data.plan import CorpusPlan, plan_corpus
from ddnn.data.shards import shards
from ddnn.data.split import DEFAULT_FRACTION, split_by_fraction
from ddnn.errors import UserError
from ddnn.kaldi.alignments import read_alignments
from ddnn.kaldi.datadir import read_data_dir
from ddnn.kaldi.features import FRAMES_PER_HOUR
from ddnn.recipe.load import load_recipe
from ddnn.recipe.schema import Recipe
from ddnn.reproduce.corpus import CorpusPlan as TablesPlan
from ddnn.reproduce.corpus import load_corpus_plan
from ddnn.reproduce.table import sizes_of
from ddnn.reproduce.tables import TABLES
from ddnn.synth.corpus import SynthOptions, synthesise
from ddnn.train.averaging import scales_rate

RECIPES = Path(__file__).resolve().parents[1] / "recipes" / "swbd"
NO_CELLS = ("base.yaml", "rbm.yaml")
"""Recipes that are included, or for `ddnn pretrain`."""
WIDTHS = (440, *(2048,) * 6, 8806)
DATA, ALIGNMENTS, TEST = "data-fmllr-tri4/train_nodup", "exp/tri4_ali_nodup", "data-fmllr-tri4/eval2000"
SHAPE = SynthOptions(hours=0.3, speakers=60, dim=40, pdfs=8806)
HOURS, FRAMES_OF_AN_UTTERANCE = 286, 433
"""Of train_nodup; of the 260,000 utterances of 313 hours that it is made of (both from Kaldi's run.sh)."""


@dataclass(frozen=True)
class Shape:
    """A corpus of Switchboard's shape, small, in the working directory: as planned from headers, and its pdfs."""

    plan: CorpusPlan
    pdfs: int


def cells(plan: TablesPlan) -> list[tuple[str, int]]:
    """Setting and workers of all that the tables ask of this corpus, and of what the paper has beside."""
    asked = {
        (setting.name, workers)
        for table in TABLES.values()
        for setting in table.settings
        for workers in sizes_of(setting, table, plan.workers, plan.many)
    }
    paper = {key for table in TABLES.values() for key in table.paper}
    return sorted({(plan.same.get(setting, setting), workers) for setting, workers in asked | paper})


@contextlib.contextmanager
def corpus(folder: Path) -> Iterator[Shape]:
    """Writes the corpus under Kaldi's names and makes `folder` the working directory meanwhile."""
    synthesise(folder / "synth", SHAPE)
    for made, name in (("train", DATA), ("ali", ALIGNMENTS), ("test", TEST)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "synth" / made).rename(folder / name)
    before = Path.cwd()
    os.chdir(folder)
    try:
        alignments = read_alignments(Path(ALIGNMENTS))
        yield Shape(plan_corpus(Path(DATA), alignments), alignments.num_pdfs)
    finally:
        os.chdir(before)


def check_recipe(path: Path, shape: Shape) -> str:
    """Loads a recipe and works out what it would do; a line about it.

    Raises:
        UserError: it is not what its name says, or cannot be run on such a corpus.
    """
    recipe = load_recipe(path)
    _expect(path, "network", tuple(layer_widths(recipe, shape.plan.dim, shape.pdfs)), WIDTHS)
    _expect(path, "data.train", recipe.data.train, Path(DATA).resolve())
    _expect(path, "data.alignments", recipe.data.alignments, Path(ALIGNMENTS).resolve())
    name = re.fullmatch(r"[a-z0-9-]+-([0-9]+)", path.stem)
    if path.name not in NO_CELLS:
        _expect(path, "parallel.workers", recipe.parallel.workers, int(name[1]) if name else "SETTING-WORKERS.yaml")
    _check_shards(path, recipe, shape)
    return f"{path.name}: {describe(recipe, shape)}"


def _check_shards(path: Path, recipe: Recipe, shape: Shape) -> None:
    """Every worker has minibatches to train on and frames to judge by."""
    plan, workers = shape.plan, recipe.parallel.workers
    for what, chosen in zip(
        ("training", "cross-validation"),
        split_by_fraction(plan, recipe.data.cv.fraction or DEFAULT_FRACTION, recipe.seed),
        strict=True,
    ):
        shares = shards(plan.num_frames, chosen, workers)
        _expect(path, f"utterances for {what}", sorted(u for share in shares for u in share), chosen)
        frames = [int(plan.num_frames[share].sum()) for share in shares]
        least = recipe.minibatch if what == "training" else 1
        if min(frames) < least:
            raise UserError(f"{what}: a worker has {min(frames)} frames, expected {least} or more", where=path)


def describe(recipe: Recipe, shape: Shape) -> str:
    """What it trains, and what a worker on a CPU needs for 286 hours of it."""
    options, workers = recipe.parallel, recipe.parallel.workers
    widths = layer_widths(recipe, shape.plan.dim, shape.pdfs)
    fraction = recipe.data.cv.fraction or DEFAULT_FRACTION
    frames = HOURS * FRAMES_PER_HOUR // workers
    rate = recipe.schedule.initial * (workers if scales_rate(options) else 1)
    rows = frames + 2 * recipe.data.splice * frames // FRAMES_OF_AN_UTTERANCE
    needs = {
        **training_needs(recipe, shape.plan.dim, shape.pdfs, workers),
        **frames_needs(recipe.data.store, frames, rows, shape.plan.dim),
    }
    minibatches = int(frames * (1 - fraction)) // recipe.minibatch
    every = 1 if options.reduce == "gradient" else options.every
    extras = [
        f"after {options.start_minibatches} minibatches of {options.start}" if options.start != "none" else "",
        "overlap" if options.overlap else "",
        f"{options.wire} on the wire" if options.wire != "float32" else "",
    ]
    averaging = f"{options.reduce} every {every}: {minibatches // every} an epoch" if workers > 1 else "no averaging"
    return ", ".join(
        [
            f"{widths[0]}-{len(widths) - 2}x{widths[1]}-{widths[-1]} ({count_parameters(widths):,} parameters)",
            f"{recipe.init}, {recipe.optimizer.name}, minibatch {recipe.minibatch}",
            f"{recipe.schedule.name} from {rate:g}",
            f"{workers} workers, {averaging}" if workers > 1 else "1 worker",
            *filter(None, extras if workers > 1 else []),
            f"{sum(needs.values()) / 2**30:.1f} GiB a worker",
        ]
    )


def _expect(path: Path, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise UserError(f"{what}: {found} found, expected {expected}", where=path)


def _by_workers(path: Path) -> tuple[str, int]:
    setting, _, workers = path.stem.rpartition("-")
    return (setting, int(workers)) if workers.isdigit() else (path.stem, 0)


def problems(folder: Path, shape: Shape) -> list[str]:
    """Checks all recipes of a folder and that none is missing, printing a line for each; what is wrong."""
    found = []
    paths = sorted((path for path in folder.glob("*.yaml") if path.name != "reproduce.yaml"), key=_by_workers)
    for path in paths:
        try:
            print(check_recipe(path, shape))
        except UserError as error:
            found.append(str(error))
    try:
        plan = load_corpus_plan(folder)
        wanted = [plan.recipes.format(setting=setting, workers=workers) for setting, workers in cells(plan)]
        for name in [*wanted, plan.stack]:
            if not (folder / name).is_file():
                found.append(f"the tables ask for it and it is not there\n  where: {folder / name}")
        for path in paths:
            if path.name not in (*wanted, *NO_CELLS):
                found.append(f"no table asks for it\n  where: {path}")
        for test in plan.tests:
            if read_data_dir(test.data).speakers is None:
                found.append(f"no utt2spk\n  where: {test.data}")
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
