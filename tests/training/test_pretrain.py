"""Pretraining: the DBN, the same bits after an interruption, a worker whose RBM is not finite, and what is refused."""

from __future__ import annotations

import json
import logging
import re
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpora import labelled_utterances, write_data_dir, write_pdfs, write_recipe, write_transforms
from distributed.mpi_worlds import launch
from distributed.threads import run_workers
from jobs import RunCli, assert_refused
from training.toy import DIM, NoCheckpoints, toy_shard

import ddnn
from ddnn.data.batches import Batch
from ddnn.data.dataset import splice_only
from ddnn.data.feature_reader import FeatureConfig
from ddnn.decoding.prepare import export_nnet1
from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.distributed.groups import Groups
from ddnn.distributed.signals import TrainingInterrupted
from ddnn.inspection.status import read_status
from ddnn.nn.acoustic_model import AcousticModel, load_model
from ddnn.nn.layers import Affine
from ddnn.nn.network import Network
from ddnn.nn.rbm import Cd1Options, Rbm
from ddnn.recipe.load import load_recipe
from ddnn.recipe.schema import PretrainConfig
from ddnn.runs.checkpoint import CheckpointStore
from ddnn.runs.run_dir import NullRunDir, load_run
from ddnn.runs.run_status import CHECKPOINTS, DBN
from ddnn.training import pretraining
from ddnn.training.evaluation import EvalResult
from ddnn.training.job import run_pretraining, run_training
from ddnn.training.state import TrainingProgress, capture, restore_state
from ddnn.training.trainer import Trainer
from ddnn.util.errors import DataError, DivergedError, UserError

RBM = "init: rbm\npretrain: {epochs: [3, 2], minibatch_size: 20}\n"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    features, labels = labelled_utterances()
    data = write_data_dir(tmp_path / "data", features)
    path = write_recipe(tmp_path / "recipe.yaml", data, write_pdfs(tmp_path / "pdfs.txt", labels), RBM)
    path.write_text(path.read_text().replace("hidden_layers: 1", "hidden_layers: 3"))
    return path


def test_a_dbn_and_its_reconstruction_errors(recipe: Path, tmp_path: Path) -> None:
    run_pretraining(load_recipe(recipe), tmp_path / "rbm", "cpu")
    lines = [json.loads(line) for line in (tmp_path / "rbm/metrics.jsonl").read_text().splitlines()]
    assert [(m["rbm"], m["epoch"]) for m in lines] == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1), (3, 2)]
    assert lines[2]["reconstruction_error"] < lines[0]["reconstruction_error"]
    average = sum(m["reconstruction_error"] for m in lines[:3]) / 3
    assert lines[2]["mean_reconstruction_error"] == pytest.approx(average)
    yardsticks = {m["rbm"]: m["data_mean_error"] for m in lines}
    assert yardsticks[1] == pytest.approx(12 / 2, rel=1e-3), "half the variance of normalized features"
    assert f"; data mean {yardsticks[1]:.6g})" in (tmp_path / "rbm/train.log").read_text()
    assert all(m["frames"] == 480 for m in lines), "all utterances, those held out for cross-validation too"
    dbn = load_model(tmp_path / "rbm" / DBN)
    assert [(layer.input_dim, layer.output_dim) for layer in dbn.network.layers] == [(12, 8), (8, 8), (8, 8)]


def test_each_epoch_has_an_order_of_its_own_and_the_options_arrive(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, seen = pretraining.cd1_step, list[tuple[torch.Tensor, Cd1Options]]()

    def recorded(rbm: Rbm, visible: torch.Tensor, options: Cd1Options, generator: torch.Generator) -> torch.Tensor:
        seen.append((visible.clone(), options))
        return step(rbm, visible, options, generator)

    monkeypatch.setattr(pretraining, "cd1_step", recorded)
    keys = "learning_rate: 0.3, gaussian_learning_rate: 0.02, l2: 0.001, kaldi_momentum: false"
    taking = [f"pretrain={{epochs: [3, 2], minibatch_size: 20, {keys}}}"]
    run_pretraining(load_recipe(recipe, taking), tmp_path / "rbm", "cpu")
    gauss, bernoulli = ([options for _, options in part] for part in (seen[:72], seen[72:]))
    assert gauss == [Cd1Options(0.02, l2=0.001, kaldi_momentum=False)] * 72
    assert bernoulli == [Cd1Options(0.3, l2=0.001, kaldi_momentum=False)] * 96
    epochs = [torch.cat([visible for visible, _ in seen[start : start + 24]]) for start in (0, 24, 48)]
    firsts = {tuple(epoch[:20].flatten().tolist()) for epoch in epochs}
    assert len(firsts) == 3, "another order in each epoch"
    assert len({tuple(sorted(map(tuple, epoch.tolist()))) for epoch in epochs}) == 1, "of the same frames"


def rbm_trainer(recipe: Path, comm: Communicator, frames: int, period: int = 1000) -> pretraining.RbmTrainer:
    """A Gaussian RBM on a toy shard, whose averaging comes at the end of an epoch alone if `period` is long."""
    below = AcousticModel(FeatureConfig(), splice_only(DIM, 0), Network((), torch.zeros(0)))
    settings = load_recipe(recipe, [f"parallel.averaging_period={period}"])
    checkpoints = NoCheckpoints()
    checkpoints.run = NullRunDir(Path("nowhere"))
    return pretraining.RbmTrainer(
        settings, 0, toy_shard(comm.rank, frames), below, checkpoints, Groups.data_parallel(comm)
    )


def test_workers_draw_hidden_states_of_their_own(recipe: Path) -> None:
    """From the same RBM, of the same frames."""

    def work(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        trainer = rbm_trainer(recipe, comm, 40)
        start = trainer.rbm.parameters.clone()
        trainer.train_minibatch(Batch(torch.linspace(-1.0, 1.0, 20 * DIM).view(20, DIM), torch.zeros(20)))
        return start, trainer.rbm.parameters

    starts, ends = zip(*run_workers(3, work), strict=True)
    assert all(torch.equal(start, starts[0]) for start in starts)
    assert not any(torch.equal(ends[a], ends[b]) for a, b in ((0, 1), (0, 2), (1, 2)))


def test_the_mean_of_an_rbm_weighs_unequal_shards_by_their_frames(recipe: Path) -> None:
    """1, 2 and 5 minibatches in an epoch: RBMs of 8, 16 and 24 have the mean (8 + 2 * 16 + 5 * 24) / 8."""

    def work(comm: Communicator) -> torch.Tensor:
        trainer = rbm_trainer(recipe, comm, (20, 40, 100)[comm.rank])
        trainer.begin_epoch()
        for batch in trainer.epoch_batches():
            trainer.train_minibatch(batch)
            trainer.averager.after_minibatch(batch.num_frames)
        trainer.rbm.parameters.fill_(8.0 * (comm.rank + 1))
        trainer.averager.end_epoch()
        return trainer.rbm.parameters

    for parameters in run_workers(3, work):
        torch.testing.assert_close(parameters, torch.full_like(parameters, 20.0))


def test_workers_of_unlike_shards_resume_an_rbm_within_an_epoch_to_the_same_bits(recipe: Path, tmp_path: Path) -> None:
    """Rank 0 has the fewest minibatches. What all workers share in a checkpoint is equal on all of them."""
    shards = (60, 100, 80)

    def work(comm: Communicator) -> tuple[list[str], list[int], list[torch.Tensor]]:
        whole, stopped, resumed = (rbm_trainer(recipe, comm, shards[comm.rank], period=2) for _ in range(3))
        store = CheckpointStore(tmp_path / "checkpoints", 2, comm)
        stopped.begin_epoch()
        batches = stopped.epoch_batches()
        for _ in range(2):
            batch = next(batches)
            stopped.losses.add(stopped.train_minibatch(batch), batch.num_frames, 1)
            stopped.progress.minibatch += 1
            if stopped.averager.after_minibatch(batch.num_frames):
                stopped.losses.commit()
        metadata, shared, own = capture(stopped)
        assert store.save(metadata, shared, own)
        handle = store.latest()
        assert handle is not None
        restore_state(resumed.parts, handle.rank_state(comm.rank), handle.path)
        for trainer in (whole, resumed):
            pretraining.train_rbm(trainer)
        same = json.dumps(metadata, sort_keys=True), json.dumps(sorted(shared))
        frames = [trainer.total_frames for trainer in (whole, resumed)]
        return list(same), frames, [trainer.rbm.parameters for trainer in (whole, resumed)]

    results = run_workers(3, work)
    for same, frames, (whole, resumed) in results:
        assert same == results[0][0]
        assert frames == [3 * sum(shards)] * 2
        assert torch.equal(whole, resumed)


def test_all_workers_decide_alike_whether_an_rbm_has_learned_anything(recipe: Path) -> None:
    """Of 99 and 101 minibatches, at the limit of 100 a worker: each by itself would decide otherwise."""

    def work(comm: Communicator) -> str:
        trainer = rbm_trainer(recipe, comm, 60)
        trainer.progress.epoch, trainer.total_frames = trainer.num_epochs, 200 * 20
        trainer.rbm.frames = (99 + 2 * comm.rank) * 20
        try:
            trainer.check_error(EvalResult({"reconstruction_error": trainer.mean_error}, 20))
        except DivergedError as error:
            return error.message
        return "a warning"

    first, second = run_workers(2, work)
    assert first == second and "an RBM has learned nothing: the reconstruction error of RBM 1 is " in first


def test_an_interrupted_run_ends_in_the_same_bits(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_pretraining(load_recipe(recipe), tmp_path / "whole", "cpu")
    step, calls = pretraining.cd1_step, 0

    def interrupt(*arguments: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 100:  # in the second epoch of the second RBM
            raise KeyboardInterrupt
        return step(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(pretraining, "cd1_step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_pretraining(load_recipe(recipe), tmp_path / "interrupted", "cpu")
    monkeypatch.setattr(pretraining, "cd1_step", step)
    with (tmp_path / "interrupted/metrics.jsonl").open("a") as metrics:
        metrics.write('{"rbm": 2, "ep')  # as a power failure may leave it
    assert sorted(p.name for p in (tmp_path / "interrupted").glob("*.safetensors")) == ["rbm1.safetensors"]
    first = (tmp_path / "interrupted/rbm1.safetensors").stat().st_mtime_ns
    run_pretraining(load_recipe(recipe), tmp_path / "interrupted", "cpu")
    assert (tmp_path / "interrupted/rbm1.safetensors").stat().st_mtime_ns == first, (
        "a finished RBM is not trained again"
    )
    for name in ("rbm1.safetensors", "rbm2.safetensors", "rbm3.safetensors", DBN):
        assert (tmp_path / "interrupted" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    lines = [json.loads(line) for line in (tmp_path / "interrupted/metrics.jsonl").read_text().splitlines()]
    assert [(m["rbm"], m["epoch"]) for m in lines] == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1), (3, 2)]


def test_a_signal_in_the_middle_of_an_rbm_leaves_a_checkpoint_that_resumes_to_the_same_bits(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_pretraining(load_recipe(recipe), tmp_path / "whole", "cpu")
    step, calls, handler = pretraining.cd1_step, 0, signal.getsignal(signal.SIGUSR1)

    def counting(*arguments: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 110:  # of 168: minibatch 14 of the second epoch of the second RBM
            signal.raise_signal(signal.SIGUSR1)
        return step(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(pretraining, "cd1_step", counting)
    run = tmp_path / "stopped"
    try:
        with pytest.raises(TrainingInterrupted) as stopped:
            run_pretraining(load_recipe(recipe), run, "cpu")
    finally:
        signal.signal(signal.SIGUSR1, handler)
    assert (stopped.value.code, stopped.value.signal_name, calls) == (75, "SIGUSR1", 110)
    found = CheckpointStore(run / CHECKPOINTS, 2, SingleProcess()).latest()
    assert found is not None
    assert [found.metadata[key] for key in ("rbm", "epoch", "minibatch")] == [2, 1, 14]
    assert not (run / "rbm2.safetensors").exists()
    features, labels = labelled_utterances()
    write_data_dir(tmp_path / "data", {name: 2 * matrix + 1 for name, matrix in features.items()})
    with pytest.raises(DataError, match=r"the data has changed since checkpoint \d+ .*data\.train: other features"):
        run_pretraining(load_recipe(recipe), run, "cpu")
    write_data_dir(tmp_path / "data", features)
    write_pdfs(tmp_path / "pdfs.txt", {name: pdfs[::-1] for name, pdfs in labels.items()})  # RBMs read no labels
    run_pretraining(load_recipe(recipe), run, "cpu")
    assert calls == 168, "only the minibatches after the checkpoint are trained on"
    for name in ("rbm1.safetensors", "rbm2.safetensors", "rbm3.safetensors", DBN):
        assert (run / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    expected, rows = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (tmp_path / "whole", run)
    )
    keys = ("rbm", "epoch", "frames", "reconstruction_error", "mean_reconstruction_error", "guard_count")
    assert [[row[key] for key in keys] for row in rows] == [[row[key] for key in keys] for row in expected]


def test_a_worker_whose_rbm_is_not_finite_is_excluded(recipe: Path, tmp_path: Path) -> None:
    """One of three, once in a Gaussian RBM, which notices, and once in a Bernoulli RBM, which does not."""
    process = launch(3, str(Path(__file__).with_name("mpi_pretrain.py")), recipe, tmp_path / "run")
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    for averaging in ("averaging 2 of", "averaging 1 of"):
        assert f"its model is not finite and was excluded from {averaging} the epoch" in errors
    assert errors.count("was excluded from averaging") == 2
    assert errors.count("worker 1 on ") == 2
    dbn = load_model(tmp_path / "run" / DBN)
    assert bool(dbn.network.parameters.isfinite().all())
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [(row["rbm"], row["epoch"]) for row in rows] == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (3, 1), (3, 2)]
    assert rows[2]["reconstruction_error"] < rows[0]["reconstruction_error"]
    frames = [row["frames"] for row in rows]
    assert frames[1] == frames[2] == frames[4] == frames[5] == frames[6]
    interval = 3 * 20  # three minibatches of the worker whose RBM was not finite after them
    assert frames[0] == frames[3] == frames[1] - interval


def test_training_makes_its_dbn_or_takes_one(recipe: Path, tmp_path: Path) -> None:
    run_training(load_recipe(recipe), tmp_path / "made", "cpu")
    run_pretraining(load_recipe(recipe), tmp_path / "rbm", "cpu")
    taking = [f"pretrain={{dbn: '{tmp_path / 'rbm'}', epochs: null, minibatch_size: null}}"]
    run_training(load_recipe(recipe, taking), tmp_path / "taken", "cpu")
    made, taken = load_run(tmp_path / "made"), load_run(tmp_path / "taken")
    assert torch.equal(made.network.parameters, taken.network.parameters)
    assert torch.equal(made.transform.shift, taken.transform.shift)  # type: ignore[arg-type]


def test_training_starts_from_the_dbn(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "improved", True)  # a training that changes nothing would have diverged
    monkeypatch.setattr(Trainer, "learned_nothing", False)
    run_training(load_recipe(recipe, ["schedule.initial_learning_rate=1e-30"]), tmp_path / "run", "cpu")
    dbn = load_model(tmp_path / "run/pretrain" / DBN)
    found = load_run(tmp_path / "run").network
    assert torch.equal(found.parameters[: dbn.network.parameters.numel()], dbn.network.parameters)
    assert not found.views[-1]["bias"].any()
    assert found.layers[-1].parameters["bias"].learn_rate_coef == 1.0, "as in Kaldi's network of AN4 from RBMs"


def test_a_kaldi_dbn_is_taken(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What nnet1's pretrain_dbn.sh leaves: affine and sigmoid components, and a feature transform beside them."""
    monkeypatch.setattr(Trainer, "improved", True)  # a training that changes nothing would have diverged
    monkeypatch.setattr(Trainer, "learned_nothing", False)
    run_pretraining(load_recipe(recipe), tmp_path / "rbm", "cpu")
    (tmp_path / "run").mkdir()
    (tmp_path / "rbm" / DBN).rename(tmp_path / "run/final.safetensors")
    export_nnet1(tmp_path / "run", tmp_path / "kaldi")
    pair = f"dbn: '{tmp_path / 'kaldi/final.nnet'}', feature_transform: '{tmp_path / 'kaldi/feature_transform.nnet'}'"
    taking = [f"pretrain={{{pair}, epochs: null, minibatch_size: null}}", "schedule.initial_learning_rate=1e-30"]
    run_training(load_recipe(recipe, taking), tmp_path / "taken", "cpu")
    dbn = load_model(tmp_path / "run/final.safetensors")
    found = load_run(tmp_path / "taken")
    assert torch.equal(found.network.parameters[: dbn.network.parameters.numel()], dbn.network.parameters)
    assert torch.equal(found.transform.scale, dbn.transform.scale)  # type: ignore[arg-type]


def test_a_dbn_of_another_shape_is_refused(recipe: Path, tmp_path: Path, run_cli: RunCli) -> None:
    run_pretraining(load_recipe(recipe), tmp_path / "rbm", "cpu")
    taking = [f"pretrain={{dbn: '{tmp_path / 'rbm'}', epochs: null, minibatch_size: null}}", "model.hidden_units=9"]
    with pytest.raises(DataError, match="the DBN was trained with 8 sigmoid, 8 sigmoid, 8 sigmoid, the recipe has 9"):
        run_training(load_recipe(recipe, taking), tmp_path / "run", "cpu")
    options = [word for one in taking for word in ("--set", one)]
    for more in ((), ("--slurm",)):
        result = run_cli("train", recipe, "--dry-run", *options, *more)
        assert_refused(result, "the DBN was trained with 8 sigmoid, 8 sigmoid, 8 sigmoid, the recipe has 9")
    assert run_cli("train", recipe, "--dry-run", *options, "--no-data").exit_code == 0
    wide = {name: np.tile(matrix, 2) for name, matrix in labelled_utterances()[0].items()}
    settings = (*options[:2], "--set", f"data.train={write_data_dir(tmp_path / 'wide', wide)}")
    assert_refused(
        run_cli("train", recipe, "--dry-run", *settings), "the features have 8 dims, the model was trained on 4"
    )
    (tmp_path / "rbm" / DBN).unlink()
    with pytest.raises(DataError, match="no pretraining has finished here"):
        run_training(load_recipe(recipe, taking), tmp_path / "run", "cpu")


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_no_training(run_cli: RunCli, recipe: Path, run: Path, message: str, hint: str) -> None:
    """Each command that takes the run dir of a training refuses that of a pretraining, and changes nothing in it."""
    before = files_of(run)
    taking = ("--data", run.parent / "data", "--alignments", run.parent / "pdfs.txt")
    random = ("--set", "init=random", "--set", "pretrain={epochs: null, minibatch_size: null}")
    for words in (
        ("train", run), ("train", run, "--resume"), ("train", run, "--resume=auto"),
        ("train", recipe, "--run-dir", run), ("train", recipe, "--run-dir", run, "--resume"),
        ("train", recipe, "--run-dir", run, "--resume=auto"), ("train", recipe, "--run-dir", run, "--resume", "--workers", 2),
        ("train", recipe, "--run-dir", run.parent / "new", *random[2:], "--set", f"init={{model: '{run}'}}"),
        ("evaluate", run, *taking), ("decode-prep", run, *taking[:2], "--out", run.parent / "new"),
        ("export", run, "--out", run.parent / "new"),
    ):  # fmt: skip
        assert_refused(run_cli(*words), f"{message}, not a training", f"location: {run}", hint)
    with pytest.raises(DataError, match=message):
        ddnn.load(run)
    assert files_of(run) == before and not (run.parent / "new").exists()


def test_a_pretrained_dbn_is_no_training(recipe: Path, tmp_path: Path, run_cli: RunCli) -> None:
    run = tmp_path / "dbn"
    assert run_cli("pretrain", recipe, "--run-dir", run, "--device", "cpu").exit_code == 0
    settings = ("--set", f"pretrain.dbn={run}", "--set", "pretrain.epochs=null")
    hint = "train on it in another run dir, with " + " ".join(settings)
    assert_no_training(run_cli, recipe, run, "this is a pretrained DBN", hint)
    more = ("--set", "pretrain.minibatch_size=null", "--device", "cpu")
    assert run_cli("train", recipe, "--run-dir", tmp_path / "on-dbn", *settings, *more).exit_code == 0, "as hinted"


def test_an_interrupted_pretraining_is_no_training(
    recipe: Path, tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, step, calls = tmp_path / "rbm", pretraining.cd1_step, 0

    def stopping(*arguments: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 40:
            signal.raise_signal(signal.SIGTERM)
        return step(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(pretraining, "cd1_step", stopping)
    with pytest.raises(TrainingInterrupted):
        run_pretraining(load_recipe(recipe), run, "cpu")
    hint = f"resume it: ddnn pretrain {run}/recipe.yaml --run-dir {run}"
    assert_no_training(run_cli, recipe, run, "this is a pretraining that has not finished", hint)
    assert run_cli("pretrain", run / "recipe.yaml", "--run-dir", run, "--device", "cpu").exit_code == 0, "as hinted"


def test_the_rbms_of_a_training_are_found_beside_its_network(recipe: Path, tmp_path: Path, run_cli: RunCli) -> None:
    run_training(load_recipe(recipe), tmp_path / "run", "cpu")
    words = ("train", recipe, "--run-dir", tmp_path / "new", "--device", "cpu")
    taking = ("--set", f"pretrain={{dbn: '{tmp_path / 'run'}', epochs: null, minibatch_size: null}}")
    beside = f"the RBMs of this training are in {tmp_path / 'run/pretrain'}: set pretrain.dbn to that"
    assert_refused(run_cli(*words, *taking), "no pretraining has finished here", beside)
    taking = ("--set", taking[1].replace("run'", "run/pretrain'"))
    assert run_cli(*words, *taking).exit_code == 0


def test_a_directory_of_another_recipe_is_not_touched(recipe: Path, tmp_path: Path) -> None:
    run_pretraining(load_recipe(recipe), tmp_path / "rbm", "cpu")
    with pytest.raises(UserError, match="holds no pretraining with the same data, model, pretrain and seed"):
        run_pretraining(load_recipe(recipe, ["seed=9"]), tmp_path / "rbm", "cpu")


def test_nothing_to_pretrain(recipe: Path, tmp_path: Path) -> None:
    random = ["init=random", "pretrain={epochs: null, minibatch_size: null}"]
    with pytest.raises(UserError, match="nothing to pretrain"):
        run_pretraining(load_recipe(recipe, random), tmp_path / "rbm", "cpu")


def test_hours_become_epochs() -> None:
    def epochs(frames: int, count: int = 3, gauss: bool = True, **config: Any) -> list[int]:
        of = pretraining.epochs_for_rbm
        return [of(PretrainConfig(**config), k, frames, gauss=gauss and k == 0) for k in range(count)]

    for hours in (300, 100):
        assert epochs(300 * pretraining.FRAMES_PER_HOUR, hours=hours) == [2, 1, 1], "the Gauss RBM twice as many"
    assert epochs(100 * pretraining.FRAMES_PER_HOUR, hours=300, gauss=False) == [3, 3, 3], "on a convolution"
    an4 = 253_682
    assert epochs(an4) == [20, 20, 20], "100 hours would be 284 and 142"
    assert epochs(an4, max_epochs=1000) == [284, 142, 142]
    assert epochs(10 * pretraining.FRAMES_PER_HOUR, 2, max_epochs=15) == [15, 10]
    assert epochs(1, 4, epochs=[100, 50]) == [100, 50, 50, 50], "not limited"


def test_the_limit_of_epochs_is_not_read_where_they_are_given(recipe: Path) -> None:
    with pytest.raises(UserError, match=r"pretrain\.max_epochs: never read, as pretrain\.epochs is given"):
        load_recipe(recipe, ["pretrain.max_epochs=5"])


def test_rows_and_status_say_how_many_epochs_there_are_and_the_time_left(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """While `ddnn train` trains its RBMs: each epoch takes ten seconds by the clock that the trainer sees."""
    seen, step = list[str](), pretraining.cd1_step
    monkeypatch.setattr(TrainingProgress, "elapsed", lambda progress: 10.0)

    def stop_in_the_third_epoch(*arguments: object) -> torch.Tensor:
        seen.append(read_status(tmp_path / "run").as_text())
        if len(seen) == 60:
            raise KeyboardInterrupt
        return step(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(pretraining, "cd1_step", stop_in_the_third_epoch)
    settings = ["pretrain={epochs: null, max_epochs: 5, minibatch_size: 20}"]
    with caplog.at_level(logging.INFO), pytest.raises(KeyboardInterrupt):
        run_training(load_recipe(recipe, settings), tmp_path / "run", "cpu")
    rows = [json.loads(line) for line in (tmp_path / "run/pretrain/metrics.jsonl").read_text().splitlines()]
    assert [(row["epoch"], row["num_epochs"], row["seconds_left"]) for row in rows] == [(1, 5, 40.0), (2, 5, 30.0)]
    assert "rbm 1 epoch  2 of 5 reconstruction error" in caplog.text and "frames/s  30 s left" in caplog.text
    assert "running, pretraining, RBM 1 of 3" in seen[30]
    assert "1 of 3 in training" in seen[30] and "rbm 1 epoch  1 of 5 reconstruction error" in seen[30]
    assert re.search(r"RBM ends +\d.* in (40|3\d) s, if epochs take as long as the last", seen[30])
    assert "epochs  " not in seen[30], "of the network, in which no epoch has begun"


def test_the_bar_of_an_epoch_says_which_it_is(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, names = rbm_trainer(recipe, SingleProcess(), 40), list[str]()
    monkeypatch.setattr(TrainingProgress, "remaining", lambda *arguments: names.append(arguments[3] + arguments[5]))
    trainer.epoch_batches()
    trainer.progress.epoch, trainer.epoch_seconds = 1, 90.0
    trainer.epoch_batches()
    assert names == ["rbm 1 epoch 1 of 3", "rbm 1 epoch 2 of 3, 3 min 0 s left"]


def test_kaldis_own_dbn_of_an4_is_taken(an4: Path, kaldi_nnet1: Path) -> None:
    dbn, transform = kaldi_nnet1 / "rbm_4.dbn", kaldi_nnet1 / "feature_transform.nnet"
    taking = [
        "init=rbm", f"pretrain={{dbn: '{dbn}', feature_transform: '{transform}'}}",
        "model={hidden_layers: 4, hidden_units: 512}",
        f"data={{train: '{an4 / 'train'}', alignments: '{an4 / 'ali'}'}}",
    ]  # fmt: skip
    recipe = load_recipe(Path(__file__).parents[2] / "configs/schedule/newbob.yaml", taking)
    dbn = pretraining.load_dbn(recipe, kaldi_nnet1 / "rbm_4.dbn")
    assert [(layer.input_dim, layer.output_dim) for layer in dbn.network.layers] == [(440, 512)] + [(512, 512)] * 3
    assert dbn.transform.offsets == tuple(range(-5, 6))
    with pytest.raises(DataError, match="features have 39 dims, the model was trained on 40"):
        dbn.check_features(39, kaldi_nnet1)


def test_rbms_of_other_features_are_refused(recipe: Path, tmp_path: Path) -> None:
    """The data dir was made again with other dims after pretraining had been interrupted."""
    run_pretraining(load_recipe(recipe), tmp_path / "rbm", "cpu")
    features, _ = labelled_utterances()
    write_data_dir(tmp_path / "data", {name: np.tile(matrix, 2) for name, matrix in features.items()})
    with pytest.raises(DataError, match="features have 8 dims, the model was trained on 4"):
        run_pretraining(load_recipe(recipe), tmp_path / "rbm", "cpu")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("data.splice=0", "set data.splice"),
        ("data.cmvn=mean", "set data.cmvn, data.deltas and data.transforms to what"),
        (
            "data.transforms=tri4",
            "with cmvn none, deltas 0, the recipe has cmvn none, LDA+MLLT over 1+1+2 frames, fMLLR (",
        ),
        ("data.normalize=false", "set data.normalize"),
    ],
)
def test_a_dbn_behind_another_front_end_is_refused(recipe: Path, tmp_path: Path, setting: str, said: str) -> None:
    run_pretraining(load_recipe(recipe), tmp_path / "rbm", "cpu")
    write_transforms(tmp_path / "tri4", rows=4)
    taking = [f"pretrain={{dbn: '{tmp_path / 'rbm'}', epochs: null, minibatch_size: null}}", setting]
    with pytest.raises(DataError, match="the DBN was trained with") as caught:
        run_training(load_recipe(recipe, taking), tmp_path / "run", "cpu")
    assert said in str(caught.value)


def test_a_bernoulli_rbm_that_diverges_is_reported_and_not_saved(recipe: Path, tmp_path: Path) -> None:
    exploding = ["pretrain={epochs: [1, 40], minibatch_size: 5, learning_rate: 1e38}"]
    with pytest.raises(DivergedError, match="reconstruction error of RBM 2 is nan") as caught:
        run_pretraining(load_recipe(recipe, exploding), tmp_path / "rbm", "cpu")
    assert "lower pretrain.learning_rate" in str(caught.value)
    assert not (tmp_path / "rbm/rbm2.safetensors").exists()


def assert_diverged(result: Any, run: Path, directory: Path, *said: str) -> None:
    """Exit code 3, and nothing of the RBM that diverged is left in the `directory` of the RBMs."""
    assert result.exit_code == 3 and "Traceback" not in result.stderr, result.stderr
    for part in said:
        assert part in result.stderr
    assert not [path for path in (directory / DBN, run / "final.safetensors") if path.exists()]
    status = read_status(run)
    assert status.state == "diverged" and status.error is not None and said[0] in status.error


@pytest.mark.parametrize("command", ["pretrain", "train"])
def test_a_gaussian_rbm_that_diverges_with_finite_numbers(
    recipe: Path, tmp_path: Path, run_cli: RunCli, command: str
) -> None:
    run = tmp_path / "run"
    setting = "pretrain={epochs: [2], minibatch_size: 20, gaussian_learning_rate: 1000}"
    result = run_cli(command, recipe, "--run-dir", run, "--device", "cpu", "--set", setting)
    directory = run if command == "pretrain" else run / "pretrain"
    assert_diverged(
        result, run, directory, "the reconstruction error of RBM 1 is", "in epoch 1", "data alone gives 6\n"
    )
    assert "lower pretrain.gaussian_learning_rate" in result.stderr and "from 1000 to 0.01" in result.stderr
    assert not (directory / "rbm1.safetensors").exists()
    (row,) = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    assert row["reconstruction_error"] > 100, "the row of the epoch is kept"


def test_a_bernoulli_rbm_that_learns_nothing_has_diverged(recipe: Path, tmp_path: Path, run_cli: RunCli) -> None:
    """Its error cannot be large: saturated units are wrong by 1 at most."""
    run = tmp_path / "run"
    setting = "pretrain={epochs: [5], minibatch_size: 20, learning_rate: 400}"
    result = run_cli("pretrain", recipe, "--run-dir", run, "--device", "cpu", "--set", setting)
    assert_diverged(result, run, run, "an RBM has learned nothing: the reconstruction error of RBM 2 is", "in epoch 5")
    assert "lower pretrain.learning_rate" in result.stderr and "from 400 to 0.4" in result.stderr
    assert [path.name for path in run.glob("*.safetensors")] == ["rbm1.safetensors"]


def test_a_pretraining_that_is_too_short_to_learn_is_a_warning(
    recipe: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ["model.hidden_layers=1", "pretrain={epochs: [2], minibatch_size: 100, gaussian_learning_rate: 1e-6}"]
    run_pretraining(load_recipe(recipe, settings), tmp_path / "short", "cpu")
    assert "an RBM has learned nothing yet" in caplog.text
    assert "train it on more than 800 frames (pretrain.epochs), or take less than 8 hidden units" in caplog.text
    caplog.clear()
    run_pretraining(load_recipe(recipe, ["pretrain.epochs=[3]"]), tmp_path / "sound", "cpu")
    assert not [record for record in caplog.records if record.levelno > logging.INFO], "sound RBMs of few frames"


def test_the_error_of_the_mean_is_half_the_variance_of_the_frames_of_all_workers(recipe: Path) -> None:
    """Also behind a hidden layer, whose outputs are the visible units."""
    layer = Network((Affine(DIM, 3, "sigmoid"),), torch.linspace(-1.0, 1.0, 3 * DIM + 3))
    for network, dim in ((Network((), torch.zeros(0)), DIM), (layer, 3)):
        below = AcousticModel(FeatureConfig(), splice_only(DIM, 0), network)

        def work(comm: Communicator, below: AcousticModel = below) -> tuple[torch.Tensor, float]:
            return pretraining.visible_statistics(below, toy_shard(comm.rank, (20, 70)[comm.rank]), comm)

        frames = torch.cat([toy_shard(rank, frames).dataset.features for rank, frames in ((0, 20), (1, 70))]).double()
        visible = (
            frames
            if dim == DIM
            else torch.sigmoid(frames @ layer.views[0]["weight"].T.double() + layer.views[0]["bias"])
        )
        for mean, variance in run_workers(2, work):
            torch.testing.assert_close(mean, visible.mean(dim=0), rtol=1e-5, atol=1e-6)
            assert variance == pytest.approx(float(visible.var(dim=0, correction=0).sum()), rel=1e-5)


def test_pretraining_resumes_under_another_schedule(recipe: Path, tmp_path: Path) -> None:
    """Only what pretraining reads must be the same."""
    run_pretraining(load_recipe(recipe), tmp_path / "rbm", "cpu")
    (tmp_path / "rbm" / DBN).unlink()
    run_pretraining(
        load_recipe(recipe, ["schedule.initial_learning_rate=0.1", "minibatch_size=8"]), tmp_path / "rbm", "cpu"
    )
    assert (tmp_path / "rbm" / DBN).exists()


def test_a_minibatch_of_pretraining_larger_than_the_data(recipe: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="480 frames do not fill one minibatch of 1000") as caught:
        run_pretraining(load_recipe(recipe, ["pretrain.minibatch_size=1000"]), tmp_path / "rbm", "cpu")
    assert caught.value.location == "pretrain.minibatch_size"


CNN = "model: {layers: [{conv: {filters: 5, patch: 2}}, {affine: 9, dropout: 0.2}, {affine: 7}]}\n"


@pytest.fixture
def convolution(recipe: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A recipe of RBMs on a convolution, and the run dir of the network that it is from."""
    text = re.sub("model: .*\n", CNN, recipe.read_text())
    recipe.write_text(text.replace(RBM, ""))
    run_training(load_recipe(recipe), tmp_path / "cnn", "cpu")
    recipe.write_text(text.replace("pretrain: {", f"pretrain: {{below: {tmp_path / 'cnn'}, "))
    return recipe, tmp_path / "cnn"


def test_rbms_on_a_convolution(convolution: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kaldi's run_cnn.sh: Bernoulli RBMs on the network's lower layers, with its feature transform; then all is trained."""
    recipe, cnn = convolution
    made: list[dict[str, Any]] = []

    class Untrained(Rbm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append({"gauss": self.gauss, **{k: v.clone() for k, v in self.state_dict().items()}, **vars(self)})
            made[-1]["visible_bias"] = self.visible_bias.clone()
            made[-1]["deviation"] = float(self.weight.std())

    monkeypatch.setattr(pretraining, "Rbm", Untrained)
    run_pretraining(load_recipe(recipe), tmp_path / "rbm", "cpu")
    trained, dbn = load_run(cnn), load_model(tmp_path / "rbm" / DBN)
    assert [layer.label for layer in dbn.network.layers] == [
        *(layer.label for layer in trained.network.layers[:4]),
        *("sigmoid", "sigmoid"),
    ]
    lower = sum(layer.num_parameters for layer in trained.network.layers[:4])
    assert torch.equal(dbn.network.parameters[:lower], trained.network.parameters[:lower])
    assert dbn.transform.shift is not None and trained.transform.shift is not None
    assert torch.equal(dbn.transform.shift, trained.transform.shift)
    first, second = made
    assert not first["gauss"] and not first["visible_bias"].any() and second["visible_bias"].any()
    assert 0.03 < first["deviation"] < 0.07 and 0.03 < second["deviation"] < 0.07
    lines = [json.loads(line) for line in (tmp_path / "rbm/metrics.jsonl").read_text().splitlines()]
    assert [(m["rbm"], m["epoch"]) for m in lines] == [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2)]

    settings = [f"pretrain.dbn={tmp_path / 'rbm'}", "pretrain.below=null", "pretrain.epochs=null"]
    settings += ["pretrain.minibatch_size=null"]
    run_training(load_recipe(recipe, settings), tmp_path / "on-dbn", "cpu")
    run_training(load_recipe(recipe), tmp_path / "alone", "cpu")
    networks = [load_run(tmp_path / name).network for name in ("on-dbn", "alone")]
    assert torch.equal(networks[0].parameters, networks[1].parameters), "pretrained here or before"
    assert networks[0].layers[-1].config()["bias_learn_rate_coef"] == 1.0
    assert not torch.equal(networks[0].parameters[:lower], trained.network.parameters[:lower]), "all of it is trained"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "filters: 5",
            "filters: 6",
            "the network was trained with 15 conv, 15 scale, 15 shift, 15 sigmoid, the recipe",
        ),
        ("patch: 2}", "patch: 2, step: 2}", "the network was trained with"),
        ("splice: 1", "splice: 0", "data.splice"),
        (
            "affine: 7",
            "{affine: 7, activation: relu}",
            "layer 2 (affine): relu found, expected sigmoid: RBMs have binary",
        ),
        (
            "",
            "pretrain.below=null",
            "pretrain.below: not given, but there are other layers below those of the RBMs: train the network with init:",
        ),
        (
            "minibatch_size: 20}",
            "minibatch_size: 20, gaussian_learning_rate: 0.01}",
            "the visible units of the lowest RBM",
        ),
        (", {affine: 9, dropout: 0.2}, {affine: 7}", "", "no affine layer at the end: there is nothing to pretrain"),
    ],
)
def test_rbms_on_another_network_are_refused(
    convolution: tuple[Path, Path], tmp_path: Path, old: str, new: str, said: str
) -> None:
    path, _ = convolution
    text = path.read_text()
    assert old in text
    if old:
        path.write_text(text.replace(f"{{{old}}}" if new.startswith("{") else old, new))
    with pytest.raises(UserError) as refused:
        run_pretraining(load_recipe(path, [] if old else [new]), tmp_path / "rbm", "cpu")
    assert said in f"{refused.value} {refused.value.hint}"
