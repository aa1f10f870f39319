"""Criteria on lattices: against Kaldi's numbers, and against the formulas arc by arc."""

from __future__ import annotations

import gzip
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpora import write_model
from hypothesis import given, settings
from hypothesis import strategies as st
from kaldi_files import State, lattice_bytes

from ddnn.data.feature_reader import FeatureConfig
from ddnn.kaldi.archive import iterate_int_vectors
from ddnn.kaldi.lattice import Lattice, iterate_lattices, write_lattices
from ddnn.kaldi.transition_model import TransitionModel, read_transition_model
from ddnn.lattices.criteria import SequenceCriterion
from ddnn.nn.acoustic_model import AcousticModel, load_model, read_nnet1_dir
from ddnn.recipe.load import load_recipe
from ddnn.training import criterion as training_criterion
from ddnn.training.job import run_training

SILENCE = range(1, 11)


def kaldi_posteriors(path: Path, model: TransitionModel) -> Iterator[tuple[str, np.ndarray]]:
    """float64 (frames, pdfs) of each utterance: posteriors of transition-ids, added up."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as lines:
        for line in lines:
            name, *frames = line.replace("]", "").split("[")
            total = np.zeros((len(frames), model.num_pdfs))
            for row, frame in zip(total, frames, strict=True):
                numbers = np.array(frame.split(), np.float64).reshape(-1, 2)
                np.add.at(row, model.transition_to_pdf[numbers[:, 0].astype(int)], numbers[:, 1])
            yield name.strip(), total


@pytest.fixture(scope="module")
def given_lattices(golden: Path) -> tuple[TransitionModel, dict[str, Lattice], dict[str, np.ndarray]]:
    folder = golden / "smbr/lattices"
    model = read_transition_model(folder / "final.mdl")
    return (
        model,
        dict(iterate_lattices(folder / "golden_lat.txt")),
        dict(iterate_int_vectors(folder / "golden_ali.txt")),
    )


@pytest.mark.parametrize("one_silence_class", [True, False])
def test_smbr_of_given_lattices(given_lattices: Any, golden: Path, one_silence_class: bool) -> None:
    model, lattices, references = given_lattices
    criterion = SequenceCriterion("smbr", model, SILENCE, old_acoustic_scale=1.0, one_silence_class=one_silence_class)
    file = golden / f"smbr/lattices/golden_smbr_post_onesil_{str(one_silence_class).lower()}.txt"
    utterances = 0
    for name, expected in kaldi_posteriors(file, model):
        value = criterion(lattices[name], np.zeros(expected.shape, np.float32), references[name])
        np.testing.assert_allclose(-value.derivative, expected, rtol=0, atol=2e-6)
        np.testing.assert_allclose(value.derivative.sum(axis=1), 0.0, atol=1e-5)
        utterances += 1
    assert utterances == 5


def test_mmi_of_given_lattices(given_lattices: Any, golden: Path) -> None:
    model, lattices, references = given_lattices
    criterion = SequenceCriterion("mmi", model, SILENCE, old_acoustic_scale=1.0, drop_frames=False)
    for name, expected in kaldi_posteriors(golden / "smbr/lattices/golden_post.txt", model):
        frames, right = np.arange(len(expected)), model.transition_to_pdf[references[name]]
        value = criterion(lattices[name], np.zeros(expected.shape, np.float32), references[name])
        assert value.reference == pytest.approx(expected[frames, right].sum(), abs=1e-4)
        expected[frames, right] -= 1.0
        np.testing.assert_allclose(value.derivative, expected, rtol=0, atol=2e-6)


RUNS = {
    "smbr_true": ["name=smbr"],
    "smbr_false": ["name=smbr", "one_silence_class=false"],
    "mpfe_true": ["name=mpfe"],
    "mpfe_false": ["name=mpfe", "one_silence_class=false"],
    "smbr_raw": ["name=smbr"],
    "smbr_momentum": ["name=smbr", "lm_scale=0.5", "old_acoustic_scale=0.3"],
    "mmi_drop": ["name=mmi"],
    "mmi_nodrop": ["name=mmi", "drop_frames=false"],
    "mmi_boost": ["name=mmi", "boost=0.1"],
}


@pytest.fixture(scope="module")
def small(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden set as a recipe reads it: data dir, alignment dirs, lattice dirs, network; one utterance held out."""
    root, source = tmp_path_factory.mktemp("small"), shared / "golden/smbr/small"
    names = write_data(root / "data", source / "train.scp", lambda name: True)
    other = "fash-an255-fash-b"
    assert other not in names
    write_data(root / "cv", shared / "an4/train/feats.scp", lambda name: name == other)
    for folder, file in (("ali", source / "ali.txt"), ("cv_ali", shared / "golden/smbr/an4_ali.1.gz")):
        (root / folder).mkdir()
        packed = file.read_bytes() if file.suffix == ".gz" else gzip.compress(file.read_bytes())
        (root / folder / "ali.1.gz").write_bytes(packed)
        (root / folder / "num_jobs").write_text("1\n")
        shutil.copy(shared / "an4/ali/final.mdl", root / folder)
    for folder, file in (("lats", "lat.1.gz"), ("raw", "raw_lat.1.gz")):
        (root / folder).mkdir()
        shutil.copy(source / file, root / folder / "lat.1.gz")
    (root / "cv_lats").mkdir()
    held_out = [
        (name, lattice) for name, lattice in iterate_lattices(shared / "golden/smbr/an4_denlat.1.gz") if name == other
    ]
    write_lattices(root / "cv_lats/lat.ark", root / "cv_lats/lat.scp", held_out)
    (root / "silence.csl").write_text(":".join(map(str, SILENCE)) + "\n")
    network(root / "nnet", source / "init.nnet", shared)
    return root


def network(path: Path, file: Path, shared: Path) -> Path:
    path.mkdir()
    shutil.copy(file, path / "final.nnet")
    for name in ("feature_transform.nnet", "ali_train_pdf.counts"):
        shutil.copy(shared / "an4/kaldi_nnet1" / name, path / name)
    return path


def write_data(path: Path, scp: Path, chosen: Callable[[str], bool]) -> list[str]:
    path.mkdir()
    names = []
    with (path / "feats.scp").open("w") as feats, (path / "utt2spk").open("w") as speakers:
        for line in scp.read_text().splitlines():
            name, _, place = line.partition(" ")
            if chosen(name):
                names.append(name)
                feats.write(f"{name} {(scp.parent / place).resolve()}\n")
                speakers.write(f"{name} {name}\n")
    return names


def tensors(model: AcousticModel) -> list[torch.Tensor]:
    return [view.double() for views in model.network.views for view in views.values()]


@pytest.mark.parametrize("run", RUNS)
def test_a_pass_is_that_of_kaldi(
    small: Path,
    shared: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    run: str,
) -> None:
    """Eight updates from a small network, through a recipe, in Kaldi's order."""
    caplog.set_level("INFO", logger="ddnn")
    monkeypatch.setattr(training_criterion, "shuffled", lambda utterances, *_: list(utterances))
    lats = small / ("raw" if run == "smbr_raw" else "lats")
    (tmp_path / "recipe.yaml").write_text(
        f"data: {{train: {small / 'data'}, alignments: {small / 'ali'}, max_skipped_fraction: 0.5,\n"
        f"  cv: {{data: {small / 'cv'}, alignments: {small / 'cv_ali'}}}}}\n"
        f"init: {{model: {small / 'nnet'}}}\nschedule: {{name: passes, initial_learning_rate: 0.001, epochs: 1}}\n"
        f"criterion: {{lattices: [{lats}, {small / 'cv_lats'}], silence_phones: {small / 'silence.csl'}, name: smbr}}\n"
    )
    more = ["optimizer.momentum=0.5", "optimizer.l2=0.0001"] if run == "smbr_momentum" else []
    recipe = load_recipe(tmp_path / "recipe.yaml", [*(f"criterion.{setting}" for setting in RUNS[run]), *more])
    run_training(recipe, tmp_path / "run", "cpu")
    assert (
        "training: 8 utterances with lattices; skipped: 1 whose lattice has another length, 1 without a lattice"
        in caplog.text
    )
    start = read_nnet1_dir(small / "nnet", FeatureConfig())
    kaldi = read_nnet1_dir(
        network(tmp_path / "kaldi", shared / f"golden/smbr/small/{run}.nnet", shared), FeatureConfig()
    )
    allowed = 3e-4 if "mmi" in run else 1e-4
    for before, expected, after in zip(
        tensors(start), tensors(kaldi), tensors(load_model(tmp_path / "run/final.safetensors")), strict=True
    ):
        change = torch.linalg.vector_norm(expected - before)
        assert float(torch.linalg.vector_norm(after - expected) / change) < allowed
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    (trained,) = [row for row in rows if row.get("split") == "train"]
    block = (shared / "golden/smbr/small/objectives.txt").read_text().partition(f"# {run}:")[2].partition("\n\n")[0]
    frames, value = next(line for line in block.splitlines() if line.startswith("all ")).split()[1:3]
    assert trained["frames"] == int(frames)
    objective = -trained["loss"] if "mmi" in run else 1.0 - trained["expected_error"]
    assert objective == pytest.approx(float(value), abs=2e-6)


@st.composite
def layered(draw: st.DrawFn) -> list[State]:
    """A compact lattice: states at frames 0, 1, ..., arcs between them of as many transition-ids, one final state at the end."""
    frames = draw(st.integers(1, 5))
    times = [0, *sorted(draw(st.lists(st.integers(0, frames), max_size=4))), frames]
    cost = st.floats(-3.0, 3.0, width=32)
    states: list[State] = [(None, []) for _ in times]
    for source, time in enumerate(times[:-1]):
        targets = draw(st.lists(st.integers(source + 1, len(times) - 1), min_size=1, max_size=3))
        for target in {*targets, source + 1}:
            for _ in range(draw(st.integers(1, 2))):
                string = draw(st.lists(st.integers(1, 6), min_size=times[target] - time, max_size=times[target] - time))
                states[source][1].append((1, draw(cost), draw(cost), string, target))
    states[-1] = ((draw(cost), draw(cost), []), [])
    return states


def paths(states: list[State], state: int = 0) -> Iterator[tuple[float, float, list[int]]]:
    """Graph cost, acoustic cost and transition-ids of all paths."""
    final, arcs = states[state]
    if final is not None:
        yield final
    for _, graph, acoustic, string, target in arcs:
        for rest in paths(states, target):
            yield graph + rest[0], acoustic + rest[1], [*string, *rest[2]]


@settings(max_examples=150, deadline=None)
@given(
    layered(),
    st.integers(0, 2**32),
    st.sampled_from(["smbr", "mpfe", "mmi"]),
    st.booleans(),
    st.sampled_from([0.0, 0.3]),
)
def test_all_paths_by_themselves(
    toy_model: TransitionModel, states: list[State], seed: int, name: Any, flag: bool, more: float
) -> None:
    """The sums over paths by which the criteria are defined."""
    (_, lattice), rng = read_one(states), np.random.default_rng(seed)
    frames, pdfs = lattice.num_frames, toy_model.num_pdfs
    loglikes, reference = (
        rng.normal(0.0, 3.0, (frames, pdfs)).astype(np.float32),
        rng.integers(1, 7, frames).astype(np.int32),
    )
    criterion = SequenceCriterion(
        name, toy_model, [2], 0.4, 0.7, old_acoustic_scale=more, one_silence_class=flag, drop_frames=flag, boost=more
    )
    value = criterion(lattice, loglikes, reference)
    pdf, phone = toy_model.transition_to_pdf, (np.arange(7) + 1) // 2
    weights, rights, found = [], [], list(paths(states))
    for graph, acoustic, string in found:
        wrong = sum(phone[tid] not in (phone[right], 2) for tid, right in zip(string, reference, strict=True))
        cost = 0.7 * (graph - (more * wrong if name == "mmi" else 0.0))
        cost += 0.4 * (more * acoustic - sum(float(loglikes[t, pdf[tid]]) for t, tid in enumerate(string)))
        weights.append(math.exp(-cost))
        same = pdf if name == "smbr" else phone
        right = 0
        for tid, expected in zip(string, reference, strict=True):
            both = phone[tid] == phone[expected] == 2
            right += (
                (same[tid] == same[expected] or both) if flag else (same[tid] == same[expected] and phone[tid] != 2)
            )
        rights.append(right)
    total = sum(weights)
    mean = sum(weight * right for weight, right in zip(weights, rights, strict=True)) / total
    derivative = np.zeros((frames, pdfs))
    for weight, right, (_, _, string) in zip(weights, rights, found, strict=True):
        for t, tid in enumerate(string):
            derivative[t, pdf[tid]] += weight / total * (1.0 if name == "mmi" else mean - right)
    if name == "mmi":
        each = np.arange(frames)
        mean = 0.4 * float(loglikes[each, pdf[reference]].sum(dtype=np.float64)) - math.log(total)
        missing = derivative[each, pdf[reference]] < 1e-20
        derivative[each, pdf[reference]] -= 1.0
        derivative[missing & flag] = 0.0
        assert value.dropped == (missing.sum() if flag else 0)
    assert value.objective == pytest.approx(mean, rel=1e-5, abs=1e-5)
    np.testing.assert_allclose(value.derivative, derivative, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["smbr", "mmi"])
def test_costs_too_large_for_float64_give_no_derivative(toy_model: TransitionModel, name: Any) -> None:
    """As where no path avoids a pdf without prior (DISABLED_LOG_PRIOR), whose costs leave nothing of the others."""
    states: list[State] = [(None, [(1, 0.0, 0.0, [1, 3], 1), (1, 1.0, 0.0, [3, 1], 1)]), ((0.0, 0.0, []), [])]
    loglikes = np.full((2, 3), -1.8e19, np.float32)
    value = SequenceCriterion(name, toy_model, [2])(read_one(states)[1], loglikes, np.array([1, 3], np.int32))
    assert not np.isfinite(value.derivative).all()


@pytest.fixture(scope="module")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> TransitionModel:
    """Phones 1, 2, 3 of one state each; transition-ids 2p - 1 and 2p, pdf p - 1."""
    return read_transition_model(write_model(tmp_path_factory.mktemp("model") / "final.mdl"))


def read_one(states: list[State]) -> tuple[str, Lattice]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lat"
        path.write_bytes(b"utt " + lattice_bytes(states))
        (record,) = iterate_lattices(path)
    return record
