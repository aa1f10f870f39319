"""Trainings by a criterion over utterances and their lattices, from data dirs to run dirs."""

from __future__ import annotations

import gzip
import json
import logging
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpora import PDFS, labelled_utterances, write_ali_dir, write_data_dir, write_model, write_pdfs, write_recipe
from distributed.threads import run_workers
from jobs import RunCli, assert_refused
from kaldi_files import lattice_bytes, read_matrix

from ddnn.data.index import assign_shards
from ddnn.distributed.signals import TrainingInterrupted
from ddnn.kaldi.alignments import read_pdf_counts, read_transition_ids
from ddnn.kaldi.archive import read_scp
from ddnn.kaldi.lattice import Lattice, write_lattices
from ddnn.lattices.criteria import SequenceCriterion
from ddnn.nn.acoustic_model import load_model
from ddnn.nn.figures import FIGURES
from ddnn.recipe.load import load_recipe
from ddnn.runs.run_status import MODEL_DIGEST, model_digest
from ddnn.training.job import run_training
from ddnn.util.errors import DataError, RecipeError, UserError

SEGMENT = 5  # frames for which a pdf is held
UTTERANCES = 12


def choices(pdfs: np.ndarray, rng: np.random.Generator) -> Lattice:
    """A lattice of two arcs for each segment of a reference: its pdf, and another one, each cheaper half of the time."""
    segments = len(pdfs) // SEGMENT
    states = np.arange(segments + 1)
    source = np.repeat(states[:-1], 2)
    right = pdfs[::SEGMENT][:segments]
    wrong = (right + rng.integers(1, PDFS, segments)) % PDFS
    tids = np.repeat(2 * np.stack([right, wrong], axis=1).reshape(-1) + 1, SEGMENT).astype(np.int32)
    graph = rng.normal(0.0, 0.3, 2 * segments).astype(np.float32)
    offsets = SEGMENT * np.arange(2 * segments + 1)
    word, acoustic = np.ones(2 * segments, np.int32), np.zeros(2 * segments, np.float32)
    levels = np.arange(segments + 2)
    return Lattice(levels, SEGMENT * states, source, source + 1, word, graph, acoustic, tids, offsets)


def write_lattice_dir(path: Path, lattices: dict[str, Lattice]) -> Path:
    """As Kaldi's make_denlats.sh: `lat.*.gz`, here of two jobs."""
    path.mkdir()
    names = sorted(lattices)
    for job in (1, 2):
        write_lattices(path / "lat", path / "scp", [(name, lattices[name]) for name in names[job - 1 :: 2]])
        (path / f"lat.{job}.gz").write_bytes(gzip.compress((path / "lat").read_bytes()))
    for name in ("lat", "scp"):
        (path / name).unlink()
    (path / "num_jobs").write_text("2\n")
    return path


class Corpus:
    """Noisy features, their alignment and lattices, and a network trained on a few of them by cross-entropy."""

    def __init__(self, root: Path) -> None:
        self.root, rng = root, np.random.default_rng(3)
        features, labels = labelled_utterances(UTTERANCES)
        ends = {name: len(pdfs) - SEGMENT * (n % 4) for n, (name, pdfs) in enumerate(sorted(labels.items()))}
        features, self.labels = (
            {name: rows[: ends[name]] for name, rows in each.items()} for each in (features, labels)
        )
        features = {
            name: (rows + rng.normal(0.0, 2.0, rows.shape)).astype(np.float32) for name, rows in features.items()
        }
        self.names = sorted(features)
        self.data, self.ali = write_data_dir(root / "data", features), write_ali_dir(root / "ali", self.labels)
        self.lattices = {name: choices(pdfs, rng) for name, pdfs in self.labels.items()}
        self.lats = write_lattice_dir(root / "lats", self.lattices)
        (root / "silence.csl").write_text("3\n")
        run_training(load_recipe(write_recipe(root / "ce.yaml", self.data, self.ali)), root / "ce", "cpu")

    def recipe(self, folder: Path, *settings: str, criterion: str = "smbr") -> Any:
        text = f"data: {{train: {self.data}, alignments: {self.ali}, cv: {{fraction: 0.25}}}}\n"
        text += f"init: {{model: {self.root / 'ce'}}}\nschedule: {{name: passes, initial_learning_rate: 0.003, epochs: 3}}\n"
        text += (
            f"criterion: {{name: {criterion}, lattices: {self.lats}, silence_phones: {self.root / 'silence.csl'}}}\n"
        )
        folder.mkdir(exist_ok=True)
        (folder / "sequence.yaml").write_text(text)
        return load_recipe(folder / "sequence.yaml", ["parallel.averaging_frames=100", *settings])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return Corpus(tmp_path_factory.mktemp("corpus"))


def rows_of(run: Path, split: str = "cv") -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row.get("split") == split]


def parameters(run: Path) -> torch.Tensor:
    return load_model(run / "final.safetensors").network.parameters


def figures_of(criterion: str) -> tuple[str, str]:
    """The keys of its figures in metrics.jsonl: only MMI has a loss in nats."""
    return "loss" if criterion == "mmi" else "expected_error", "expected_accuracy"


@pytest.mark.parametrize("criterion", ["smbr", "mpfe", "mmi"])
def test_a_training_raises_its_criterion(corpus: Corpus, tmp_path: Path, criterion: str) -> None:
    run_training(corpus.recipe(tmp_path, criterion=criterion), tmp_path / "run", "cpu")
    figure, _ = figures_of(criterion)
    losses = [row[figure] for row in rows_of(tmp_path / "run")]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    first, *_, last = rows_of(tmp_path / "run", "train")
    assert last[figure] < first[figure]
    for row in first, last:
        assert {*figures_of(criterion)} == FIGURES.keys() & row.keys()
        if criterion != "mmi":
            assert row["expected_error"] == pytest.approx(1.0 - row["expected_accuracy"], abs=1e-12)


def test_the_priors_are_those_of_cross_entropy(corpus: Corpus, tmp_path: Path) -> None:
    run_training(corpus.recipe(tmp_path, "schedule.epochs=1"), tmp_path / "run", "cpu")
    counts = "ali_train_pdf.counts"
    assert (tmp_path / "run" / counts).read_text() == (corpus.root / "ce" / counts).read_text()


def test_what_is_skipped_is_counted(corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without a lattice; with one of another utterance, which is shorter; an alignment that is a frame longer."""
    caplog.set_level(logging.INFO, logger="ddnn")
    names, lattices = corpus.names, dict(corpus.lattices)
    del lattices[names[0]]
    lattices[names[1]] = choices(corpus.labels[names[1]][:-SEGMENT], np.random.default_rng(1))
    labels = {**corpus.labels, names[2]: np.append(corpus.labels[names[2]], 0).astype(np.int32)}
    held_out = tmp_path / "held_out"
    held_out.write_text("\n".join(names[-3:]) + "\n")
    recipe = corpus.recipe(
        tmp_path,
        f"criterion.lattices={write_lattice_dir(tmp_path / 'lats', lattices)}",
        f"data.alignments={write_ali_dir(tmp_path / 'ali', labels)}",
        *("data.cv.fraction=null", f"data.cv.utterances={held_out}", "data.max_skipped_fraction=0.5"),
    )
    run_training(recipe, tmp_path / "run", "cpu")
    skipped = "training: 6 utterances with lattices; skipped: 1 whose lattice has another length, 1 without a lattice"
    assert skipped in caplog.text
    assert "cross-validation: 3 utterances with lattices; skipped: none" in caplog.text
    length = len(corpus.labels[names[2]])
    assert f"utterance {names[2]} skipped: {length} frames of features, {length + 1} of alignment" in caplog.text
    assert rows_of(tmp_path / "run", "train")[0]["frames"] == sum(len(corpus.labels[name]) for name in names[3:-3])


def test_long_utterances_are_skipped(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no utterance of all .*'of more than 24 frames': "):
        run_training(corpus.recipe(tmp_path, "criterion.max_frames=24"), tmp_path / "run", "cpu")


@pytest.mark.parametrize("reason", ["without a lattice", "of more than 35 frames"])
def test_workers_share_what_can_be_used(
    corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    """Also where nothing of what one of them would have of all utterances can be."""
    caplog.set_level(logging.INFO, logger="ddnn")
    held_out, trained = corpus.names[-2:], corpus.names[:-2]
    (tmp_path / "held_out").write_text("\n".join(held_out) + "\n")
    lengths = np.array([len(corpus.labels[name]) for name in trained])
    lattices, settings = corpus.lattices, ["criterion.max_frames=35"]
    left = {name for name in trained if len(corpus.labels[name]) <= 35}
    if reason == "without a lattice":
        of_one = {trained[u] for u in assign_shards(lengths, range(len(trained)), 2)[1]}
        left = {*trained} - of_one
        lattices = {name: lattice for name, lattice in lattices.items() if name not in of_one}
        settings = [f"criterion.lattices={write_lattice_dir(tmp_path / 'lats', lattices)}"]
    settings += ["data.cv.fraction=null", f"data.cv.utterances={tmp_path / 'held_out'}", "schedule.epochs=1"]
    recipe = corpus.recipe(tmp_path, *settings)  # by one process: workers that all write it read it half written
    run_workers(2, lambda comm: run_training(recipe, tmp_path / "run", "cpu", comm))
    frames = sum(len(corpus.labels[name]) for name in left)
    assert rows_of(tmp_path / "run", "train")[0]["frames"] == frames
    workers = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    lengths *= [name in left for name in trained]
    expected = [int(lengths[shard].sum()) for shard in assign_shards(lengths, range(len(trained)), 2)]
    assert [row["frames"] for row in workers if row["type"] == "worker"] == expected
    assert (
        f"training: {len(left)} utterances with lattices; skipped: {len(trained) - len(left)} {reason}" in caplog.text
    )


def test_several_utterances_make_one_update(corpus: Corpus, tmp_path: Path) -> None:
    """The sum of their gradients, so that all utterances in one update are gradient descent on the whole set."""
    lr, changes = 1e-6, []
    before = parameters(corpus.root / "ce")
    for number in (1, 9):
        settings = (
            f"criterion.utterances_per_update={number}",
            "schedule.epochs=1",
            f"schedule.initial_learning_rate={lr}",
        )
        run_training(corpus.recipe(tmp_path, *settings, "parallel.averaging_frames=400"), tmp_path / str(number), "cpu")
        changes.append(parameters(tmp_path / str(number)) - before)
    assert float(changes[0].norm()) > 1e-6
    assert (
        float((changes[1] - changes[0]).norm() / changes[0].norm()) < 0.05
    )  # the network hardly moves within the pass


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("strategy", ["all-reduce", "butterfly", "gradient-all-reduce", "bmuf"])
def test_several_workers(corpus: Corpus, tmp_path: Path, workers: int, strategy: str) -> None:
    settings = [f"parallel.strategy={strategy}"]
    if strategy == "gradient-all-reduce":
        settings.append("parallel.averaging_frames=null")
    if strategy == "butterfly" and workers == 3:
        settings = ["parallel.strategy=ring"]
    recipe = corpus.recipe(tmp_path, *settings)
    run_workers(workers, lambda comm: run_training(recipe, tmp_path / "run", "cpu", comm))
    losses = [row["expected_error"] for row in rows_of(tmp_path / "run")]
    assert losses[-1] < losses[0]
    trained = rows_of(tmp_path / "run", "train")[0]["frames"]
    held_out = (tmp_path / "run/cv_utterances").read_text().split()
    total = sum(len(pdfs) for name, pdfs in corpus.labels.items() if name not in held_out)
    assert trained == total if strategy != "gradient-all-reduce" else trained <= total


def test_a_training_resumes_to_the_same_bits(
    corpus: Corpus, tmp_path: Path, stop_at: Callable[[int, signal.Signals], None]
) -> None:
    settings = ("optimizer.momentum=0.5", "schedule.halving_factor=0.5", "parallel.averaging_frames=null")
    recipe = corpus.recipe(tmp_path, *settings)
    run_training(recipe, tmp_path / "whole", "cpu")
    stop_at(13, signal.SIGTERM)  # in the second pass
    with pytest.raises(TrainingInterrupted):
        run_training(recipe, tmp_path / "stopped", "cpu")
    stop_at(0, signal.SIGTERM)
    shutil.copytree(corpus.lats, tmp_path / "lats")
    shutil.copy(corpus.root / "silence.csl", tmp_path)
    paths = [f"criterion.lattices={tmp_path / 'lats'}", f"criterion.silence_phones={tmp_path / 'silence.csl'}"]
    resumed = corpus.recipe(tmp_path, *settings, *paths)
    moved = shutil.move(corpus.root / "ce", corpus.root / "elsewhere")  # nothing of it is needed any more
    try:
        run_training(resumed, tmp_path / "stopped", "cpu", resume=True)
    finally:
        shutil.move(moved, corpus.root / "ce")
    assert torch.equal(parameters(tmp_path / "whole"), parameters(tmp_path / "stopped"))
    rates = [row["learning_rate"] for row in rows_of(tmp_path / "stopped", "train")]
    assert rates == pytest.approx([0.003, 0.0015, 0.00075])


def test_nothing_moves_where_the_derivative_is_not_finite(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    call = SequenceCriterion.__call__

    def broken(self: SequenceCriterion, *arguments: Any) -> Any:
        value = call(self, *arguments)
        value.derivative[3, 1] = np.nan
        return value

    monkeypatch.setattr(SequenceCriterion, "__call__", broken)
    run_training(corpus.recipe(tmp_path), tmp_path / "run", "cpu")
    assert torch.equal(parameters(tmp_path / "run"), parameters(corpus.root / "ce"))
    assert f"utterance {corpus.names[0]}: its derivative is not finite" in caplog.text


class Broken:
    """Trainings in one order, with nothing or with an utterance whose derivative is not finite, or has no lattice."""

    def __init__(self, corpus: Corpus, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("ddnn.training.criterion.shuffled", lambda utterances, *_: list(utterances))
        self.corpus, self.folder, self.monkeypatch = corpus, folder, monkeypatch
        self.name = corpus.names[4]
        (folder / "held_out").write_text("\n".join(corpus.names[-3:]) + "\n")
        lattices = {name: lattice for name, lattice in corpus.lattices.items() if name != self.name}
        self.without = f"criterion.lattices={write_lattice_dir(folder / 'lats', lattices)}"

    def train(self, out: str, *settings: str, workers: int = 1) -> torch.Tensor:
        held_out = "data.cv.fraction=null", f"data.cv.utterances={self.folder / 'held_out'}"
        recipe = self.corpus.recipe(self.folder, "schedule.epochs=1", *held_out, *settings)
        run_workers(workers, lambda comm: run_training(recipe, self.folder / out, "cpu", comm))
        return parameters(self.folder / out)

    def begin(self) -> None:
        """From now on its derivative is not finite."""
        call, reference = SequenceCriterion.__call__, read_transition_ids(self.corpus.ali, {self.name})[self.name]

        def infinite(criterion: SequenceCriterion, *arguments: Any) -> Any:
            value = call(criterion, *arguments)
            if np.array_equal(arguments[-1], reference):
                value.derivative[3, 1] = np.inf
            return value

        self.monkeypatch.setattr(SequenceCriterion, "__call__", infinite)


@pytest.fixture
def broken(corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Broken:
    return Broken(corpus, tmp_path, monkeypatch)


@pytest.mark.parametrize("optimizer", ["sgd", "ng-sgd"])
def test_no_update_where_the_derivative_is_not_finite(broken: Broken, optimizer: str) -> None:
    """Momentum, weight decay and the Fisher matrices included: as if the utterance had no lattice."""
    settings = f"optimizer={{name: {optimizer}, momentum: 0.9, l2: 0.01}}"
    expected = broken.train("without", settings, broken.without)
    broken.begin()
    assert torch.equal(broken.train("infinite", settings), expected)


def test_an_update_by_the_utterances_whose_derivative_is_finite(broken: Broken) -> None:
    settings = "criterion.utterances_per_update=9", "parallel.averaging_frames=400"
    expected, before = broken.train("without", *settings, broken.without), parameters(broken.corpus.root / "ce")
    broken.begin()
    change = broken.train("infinite", *settings) - expected
    assert float(change.norm() / (expected - before).norm()) < 1e-4


def test_workers_that_average_gradients_wait_for_each_other(broken: Broken, caplog: pytest.LogCaptureFixture) -> None:
    broken.begin()
    settings = "parallel.strategy=gradient-all-reduce", "parallel.averaging_frames=null", "optimizer.momentum=0.9"
    assert broken.train("infinite", *settings, workers=2).isfinite().all()
    assert f"utterance {broken.name}: its derivative is not finite: ignored" in caplog.text


def test_passes_end_early_where_cross_validation_gets_worse_twice(corpus: Corpus, tmp_path: Path) -> None:
    recipe = corpus.recipe(tmp_path, "schedule.initial_learning_rate=0.5", "schedule.epochs=9", "schedule.keep=best")
    run_training(recipe, tmp_path / "run", "cpu")
    losses = [row["expected_error"] for row in rows_of(tmp_path / "run")]
    assert losses[-1] > losses[-2] > losses[-3]
    assert len(losses) < 10
    end = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert end["detail"] == "cross-validation got worse in two passes, one after the other"


REFUSED = {
    "init=random": "init: with criterion.name: smbr training starts from a whole network",
    "parallel.columns=2": "parallel.columns: 2 found, expected 1 with criterion.name: smbr: a worker has whole utterances",
    "precision=bf16": "precision: bf16 found, expected float32",
    "minibatch_size=64": "minibatch_size: never read, as criterion.utterances_per_update says what an update is",
    "criterion.boost=0.1": "criterion.boost: never read, as criterion.name is smbr",
    "criterion.lattices=nowhere": "criterion.lattices",
    "criterion.acoustic_scale=0": "criterion.acoustic_scale: 0 found",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_recipes_that_cannot_be(corpus: Corpus, tmp_path: Path, setting: str) -> None:
    with pytest.raises(RecipeError) as refused:
        corpus.recipe(tmp_path, setting, *(("parallel.workers=2",) if "columns" in setting else ()))
    assert REFUSED[setting] in str(refused.value)


def test_an_interval_holds_the_longest_utterance(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="30 found, expected at least 40: the longest minibatch has as many frames"):
        run_training(corpus.recipe(tmp_path, "parallel.averaging_frames=30"), tmp_path / "run", "cpu")


def test_lattices_of_a_start_that_failed_are_not_those_of_the_next(
    corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the same run dir, where their copy is."""
    caplog.set_level(logging.INFO, logger="ddnn")
    with pytest.raises(RecipeError):
        run_training(corpus.recipe(tmp_path, "parallel.averaging_frames=30"), tmp_path / "run", "cpu")
    lattices = {name: lattice for name, lattice in corpus.lattices.items() if name[:4] != corpus.names[0][:4]}
    lats = write_lattice_dir(tmp_path / "lats", lattices)
    recipe = corpus.recipe(tmp_path, f"criterion.lattices={lats}", "schedule.epochs=1", "data.cv.fraction=0.5")
    run_training(recipe, tmp_path / "run", "cpu", resume=True)
    assert "skipped: 3 without a lattice" in caplog.text


def test_pdf_ids_are_no_reference(corpus: Corpus, tmp_path: Path) -> None:
    pdfs = write_pdfs(tmp_path / "pdfs.txt", corpus.labels)
    with pytest.raises(UserError, match="an alignment dir with transition-ids expected"):
        run_training(corpus.recipe(tmp_path, f"data.alignments={pdfs}"), tmp_path / "run", "cpu")


def test_lattices_of_another_model(corpus: Corpus, tmp_path: Path) -> None:
    name = corpus.names[4]
    lattices = {**corpus.lattices, name: choices(corpus.labels[name] + 1, np.random.default_rng(1))}
    for lattice in lattices.values():
        assert lattice.tids.max() <= 8
    lattices[name].tids[7] = 9
    recipe = corpus.recipe(tmp_path, f"criterion.lattices={write_lattice_dir(tmp_path / 'lats', lattices)}")
    with pytest.raises(DataError, match=rf"utterance {name}: its lattice has transition-id 9, expected at most 6"):
        run_training(recipe, tmp_path / "run", "cpu")


TWO = (1, 0.0, 0.0, [1], 1)
DAMAGED: dict[str, tuple[bytes, str]] = {
    "cyclic": (lattice_bytes([(None, [TWO]), ((0.0, 0.0, []), [(1, 0.0, 0.0, [1], 0)])]), "the lattice has a cycle"),
    "without an end": (lattice_bytes([(None, [TWO]), (None, [])]), "no final state can be reached"),
    "of no number": (lattice_bytes([(None, [TWO]), ((np.nan, 0.0, []), [])]), "an arc of state 1 has costs [nan  0.]"),
    "cut short": (lattice_bytes([(None, [TWO]), ((0.0, 0.0, []), [])])[:-3], "cut short"),
}


@pytest.mark.parametrize("form", ["lat.1.gz", "lat.scp"])
@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_lattice_is_refused_by_file_and_utterance(
    corpus: Corpus, tmp_path: Path, run_cli: RunCli, damage: str, form: str
) -> None:
    """Before anything is trained, and nothing that was copied remains."""
    record, message = DAMAGED[damage]
    lats, name = tmp_path / "lats", corpus.names[1]
    lats.mkdir()
    ark = lats / "lat.ark"
    write_lattices(ark, lats / "lat.scp", corpus.lattices.items())
    with (lats / "lat.scp").open() as scp:
        lines = [line for line in scp if not line.startswith(f"{name} ")]
    sound = ark.read_bytes()
    ark.write_bytes(sound + f"{name} ".encode() + record)
    offset = len(sound) + len(name) + 1
    (lats / "lat.scp").write_text("".join([*lines, f"{name} {ark}:{offset}\n"]))
    location = f"{ark}:{offset}"
    if form == "lat.1.gz":
        (lats / "lat.scp").unlink()
        location = str(lats / "lat.1.gz")
        head = sound[: sound.index(f"{corpus.names[1]} ".encode())]
        Path(location).write_bytes(gzip.compress(head + f"{name} ".encode() + record))
    corpus.recipe(tmp_path, f"criterion.lattices={lats}")
    command = (
        "train",
        tmp_path / "sequence.yaml",
        "--set",
        f"criterion.lattices={lats}",
        "--run-dir",
        tmp_path / "run",
    )
    assert_refused(run_cli(*command, "--device", "cpu"), location, f"utterance {name}: ", message)
    assert not {"lattices.ark", "lattices.scp", "final.safetensors", "best.safetensors"} & {
        path.name for path in (tmp_path / "run").iterdir()
    }


def test_a_dir_without_lattices(corpus: Corpus, tmp_path: Path) -> None:
    """As ddnn denlats leaves it when it is interrupted."""
    (tmp_path / "lats").mkdir()
    (tmp_path / "lats/lat.1.ark").touch()
    with pytest.raises(DataError, match=r"there is no lat\.\*\.gz") as refused:
        run_training(corpus.recipe(tmp_path, f"criterion.lattices={tmp_path / 'lats'}"), tmp_path / "run", "cpu")
    assert "alignment dir" not in str(refused.value) and "has written to its end" in str(refused.value.hint)


def test_the_final_mdl_of_lattices_is_that_of_the_alignment(corpus: Corpus, tmp_path: Path) -> None:
    """Where they have one."""
    lats = shutil.copytree(corpus.lats, tmp_path / "lats")
    settings = f"criterion.lattices={lats}", "schedule.epochs=1"
    shutil.copy(corpus.ali / "final.mdl", lats)
    run_training(corpus.recipe(tmp_path, *settings), tmp_path / "run", "cpu")
    write_model(lats / "final.mdl", range(PDFS)[::-1])
    with pytest.raises(DataError, match=rf"its final.mdl is of another tree than that of {corpus.ali}: ") as refused:
        run_training(corpus.recipe(tmp_path, *settings), tmp_path / "other", "cpu")
    assert refused.value.location == str(lats / "final.mdl")
    assert "of one system" in str(refused.value.hint)


@pytest.mark.parametrize("place", ["lattices", "alignments"])
def test_a_warning_where_another_network_made_the_lattices_or_the_alignment(
    corpus: Corpus, tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    folder = shutil.copytree(corpus.lats if place == "lattices" else corpus.ali, tmp_path / "folder")
    key = "criterion.lattices" if place == "lattices" else "data.alignments"
    recipe = corpus.recipe(tmp_path, f"{key}={folder}", "schedule.epochs=1")
    warning = f"{folder} was made with another network than {corpus.root / 'ce'}"
    for digest, warned in (("", False), (model_digest(corpus.root / "ce"), False), ("0123456789abcdef", True)):
        (folder / MODEL_DIGEST).write_text(f"{digest} ../ce\n")
        run_workers(2, lambda comm, out=tmp_path / f"run{digest}": run_training(recipe, out, "cpu", comm))
        assert caplog.text.count(warning) == warned


def test_an_utterance_has_one_lattice(corpus: Corpus, tmp_path: Path) -> None:
    other = write_lattice_dir(
        tmp_path / "lats", {corpus.names[0]: corpus.lattices[corpus.names[0]]} | {"x": corpus.lattices[corpus.names[1]]}
    )
    with pytest.raises(DataError, match="occurs twice"):
        run_training(corpus.recipe(tmp_path, f"criterion.lattices=[{corpus.lats}, {other}]"), tmp_path / "run", "cpu")


def test_dry_run(corpus: Corpus, tmp_path: Path, run_cli: RunCli) -> None:
    corpus.recipe(tmp_path)
    result = run_cli("train", tmp_path / "sequence.yaml", "--dry-run", "--run-dir", tmp_path / "run")
    assert result.exit_code == 0, result.stderr
    assert "sgd, smbr, 1 utterance in an update, passes from 0.003" in result.stdout
    assert "about 9 minibatches an epoch for each worker" in result.stdout
    assert not (tmp_path / "run").exists()


def test_priors_of_the_posteriors(corpus: Corpus, tmp_path: Path, run_cli: RunCli) -> None:
    """Their sum over the data that the run was trained on, held-out utterances included."""
    run_training(corpus.recipe(tmp_path, "schedule.epochs=1"), tmp_path / "run", "cpu")
    for kind, out in (("posteriors", "post"), ("log-likelihoods", "loglikes")):
        priors = ("--priors", "posterior-mean") if out == "loglikes" else ()
        command = ("decode-prep", tmp_path / "run", "--data", corpus.data, "--out", tmp_path / out, "--as", kind)
        assert run_cli(*command, *priors, "--device", "cpu").exit_code == 0
    posteriors = [read_matrix(entry).astype(np.float64) for entry in read_scp(tmp_path / "post/posteriors.scp")]
    counts = read_pdf_counts(tmp_path / "loglikes/ali_train_pdf.counts")
    np.testing.assert_allclose(counts, np.concatenate(posteriors).sum(axis=0), rtol=1e-5)
    loglikes = [read_matrix(entry) for entry in read_scp(tmp_path / "loglikes/loglikes.scp")]
    ratio = loglikes[0] - np.log(posteriors[0]) + np.log(counts / counts.sum())
    np.testing.assert_allclose(ratio - ratio[:, :1], 0.0, atol=1e-4)
    refused = run_cli(*command[:-1], "posteriors", "--priors", "posterior-mean")
    assert_refused(refused, "nothing is subtracted from posteriors", "--priors")
