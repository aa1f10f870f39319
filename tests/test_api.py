"""`import ddnn`: the cells of docs/tutorials/python.ipynb, run in order; models on single utterances; what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import make_notebook
import numpy as np
import pytest
import torch
from corpora import write_data_dir, write_pdfs
from distributed.mpi_worlds import need_mpi
from forked_python import forked_python
from jobs import Job, make_job
from kaldi_files import read_matrix

import ddnn
from ddnn.data.feature_reader import FeatureConfig
from ddnn.decoding.prepare import prepare_decoding
from ddnn.kaldi.archive import read_scp, write_matrices
from ddnn.kaldi.data_dir import accumulate_cmvn_stats
from ddnn.kaldi.transforms import TransformConfig
from ddnn.nn.acoustic_model import save_model
from ddnn.nn.elementwise import Activation, Dropout, LengthNorm
from ddnn.nn.layers import Affine, num_parameters
from ddnn.nn.network import Network
from ddnn.runs.run_dir import load_run
from ddnn.training import start
from ddnn.training.model_evaluation import evaluate_run
from ddnn.util.errors import DataError


def test_the_notebook_is_the_page() -> None:
    """docs/tutorials/python.ipynb, in nbformat 4.5."""
    assert make_notebook.NOTEBOOK.read_text() == make_notebook.notebook(make_notebook.PAGE.read_text()), "make docs"
    content = json.loads(make_notebook.NOTEBOOK.read_text())
    assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])
    for cell in content["cells"]:
        more = {"execution_count", "outputs"} if cell["cell_type"] == "code" else set()
        assert set(cell) == {"cell_type", "id", "metadata", "source", *more}
    code = sum(cell["cell_type"] == "code" for cell in content["cells"])
    assert code == make_notebook.PAGE.read_text().count("```python")


def test_the_cells_of_the_notebook_run_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On less data. They give what the commands give, with outputs as on the page; plain PyTorch gives the same posteriors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    names: dict[str, Any] = {}
    *first, last = [
        cell for cell in json.loads(make_notebook.NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"
    ]
    capfd.readouterr()
    for cell in first:
        exec(compile("".join(cell["source"]).replace('"0.3"', '"0.03"'), str(make_notebook.NOTEBOOK), "exec"), names)
        expected = "".join(line for output in cell["outputs"] for line in output["text"])
        printed = capfd.readouterr().out
        assert not expected or re.sub(r"[\d.]+", "N", printed) == re.sub(r"[\d.]+", "N", expected)
        if "ddnn.evaluate" in "".join(cell["source"]):
            results = printed
    assert [row["epoch"] for row in names["rows"]] == [0, 1, 2]
    found = evaluate_run(Path("exp/python"), Path("demo/corpus/test"), Path("demo/corpus/ali_test"), device="cpu")
    accuracy = found.figures["frame_accuracy"]
    assert f"loss {found.loss:.4f}, frame accuracy {accuracy:.2%}" in results
    assert names["correct"] / names["frames"] == pytest.approx(accuracy, abs=1e-3) and accuracy > 0.05
    np.testing.assert_allclose(names["logits"].detach().softmax(1), names["posteriors"], atol=2e-6)
    prepare_decoding(Path("exp/python"), Path("demo/corpus/test"), Path("decode"), "cpu")
    *_, entry = read_scp(Path("decode/loglikes.scp"))
    assert names["utterance"] == entry.key
    np.testing.assert_allclose(names["loglikes"], read_matrix(entry), atol=1e-5)
    features, stats = names["features"], names["cmvn_stats"][entry.key]
    exec(compile("".join(last["source"]), str(make_notebook.NOTEBOOK), "exec"), names)
    posteriors = names["model"].posteriors(features, cmvn_stats=stats)
    np.testing.assert_allclose(names["posteriors"].numpy(), posteriors, atol=2e-6)


def test_importing_it_takes_no_time() -> None:
    """Neither torch nor numpy is imported before it is needed; torch not even to read features."""
    code = "import sys, ddnn; print({'torch', 'numpy', 'ddnn.api'} & set(sys.modules)); "
    code += "ddnn.read_features; print({'torch', 'mpi4py', 'pydantic'} & set(sys.modules)); "
    code += "assert set(dir(ddnn)) == {*ddnn.__all__, '__doc__', '__version__'}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\nset()\n"
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        _ = ddnn.lode


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """With a finished run, by `ddnn.train` of the recipe's path."""
    job = make_job(tmp_path_factory.mktemp("api") / "job")
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    ddnn.train(job.recipe, job.run, device="cpu")
    assert torch.get_num_threads() == 2
    torch.set_num_threads(threads)
    return job


FRONT_ENDS = (FeatureConfig(), FeatureConfig("mean"), FeatureConfig("mean-variance", 1), FeatureConfig(deltas=3))


@pytest.mark.parametrize("config", FRONT_ENDS, ids=lambda config: f"{config.cmvn} {config.deltas}")
@pytest.mark.parametrize("has_cmvn_scp", [False, True])
def test_single_utterances_are_as_decode_prep_computes_them(
    job: Job, tmp_path: Path, config: FeatureConfig, has_cmvn_scp: bool
) -> None:
    """With statistics that read_cmvn_stats reads or computes."""
    features = {name: matrix[:, :1].repeat(4 // (config.deltas + 1), 1) for name, matrix in job.features.items()}
    data = write_data_dir(tmp_path / "data", features)
    if has_cmvn_scp:
        stats = {f"spk{n}": accumulate_cmvn_stats(np.arange(n + 12.0).reshape(-1, 1).repeat(5, 1)) for n in range(4)}
        dims = 4 // (config.deltas + 1) + 1
        write_matrices(data / "cmvn.ark", data / "cmvn.scp", ((name, sums[:, -dims:]) for name, sums in stats.items()))
    run = tmp_path / "run"
    run.mkdir()
    (run / "ali_train_pdf.counts").write_bytes((job.run / "ali_train_pdf.counts").read_bytes())
    save_model(run / "final.safetensors", replace(load_run(job.run), features=config))
    prepare_decoding(run, data, tmp_path / "out", "cpu")
    model = ddnn.load(run)
    assert model.dim == 4 // (config.deltas + 1)
    assert repr(model).endswith(f"run: 12-8-3, cmvn {config.cmvn}, deltas {config.deltas}>")
    of_speaker = ddnn.read_cmvn_stats(data) if config.cmvn != "none" else {}
    read = dict(ddnn.read_features(data))
    for entry in read_scp(tmp_path / "out/loglikes.scp"):
        matrix = read[entry.key]
        found = model.log_likelihoods(matrix, cmvn_stats=of_speaker.get(entry.key))
        assert found.shape == (len(matrix), 3) and found.dtype == np.float32
        np.testing.assert_allclose(found, read_matrix(entry), atol=1e-5)
    posteriors = model.posteriors(matrix.tolist(), cmvn_stats=of_speaker.get(entry.key))
    np.testing.assert_allclose(posteriors.sum(axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(
        np.log(posteriors), model.log_posteriors(matrix, cmvn_stats=of_speaker.get(entry.key)), atol=1e-5
    )
    prepared = torch.from_numpy(model.prepare(matrix, cmvn_stats=of_speaker.get(entry.key)))
    np.testing.assert_allclose(model.torch_module()(prepared).softmax(1).detach(), posteriors, atol=1e-6)
    plain = model.log_likelihoods(matrix, cmvn_stats=of_speaker.get(entry.key), prior_scale=0)
    np.testing.assert_allclose(torch.from_numpy(plain).softmax(1), posteriors, atol=1e-6)
    computed = dict(model.compute(data, "posteriors"))
    assert list(computed) == list(read) and np.array_equal(computed[entry.key], posteriors)


def test_layers_in_torch_are_a_copy_to_train_and_those_without_a_module_are_refused(job: Job) -> None:
    model = ddnn.load(job.run)
    layers = (
        Affine(12, 4, "linear"), Dropout(4, 0.5), Activation(4, "tanh"), Affine(4, 4, "relu"), Affine(4, 3, "softmax")
    )  # fmt: skip
    network = Network(layers, torch.randn(num_parameters(layers), generator=torch.Generator().manual_seed(1)))
    model = ddnn.Model(replace(model.acoustic_model, network=network), job.run)
    features, state = np.ones((7, 4), np.float32), torch.get_rng_state()
    module = model.torch_module().eval()
    assert torch.equal(torch.get_rng_state(), state), "a user's random numbers are left as they are"
    logits = module(torch.from_numpy(features))
    np.testing.assert_allclose(logits.softmax(1).detach(), model.posteriors(features), atol=1e-6)
    logits.sum().backward()
    before = network.parameters.clone()
    torch.optim.SGD(module.parameters(), 1.0).step()
    assert sum(values.numel() for values in module.parameters()) == network.num_parameters
    assert torch.equal(network.parameters, before)
    network = Network((LengthNorm(12), *layers), network.parameters)
    with pytest.raises(ddnn.UserError, match="a length-norm layer cannot be a module of PyTorch"):
        ddnn.Model(replace(model.acoustic_model, network=network), job.run).torch_module()


def test_the_dimension_of_features_is_that_of_a_data_dir(job: Job) -> None:
    model = ddnn.load(job.run).acoustic_model
    for transforms, dim in (
        (TransformConfig(delta_order=1), 2),
        (TransformConfig(final_mat="0" * 64, output_dim=4, left_context=3, right_context=3), None),
    ):
        found = ddnn.Model(replace(model, features=FeatureConfig(transforms=transforms)), job.run)
        assert found.dim == dim and found.layer_sizes == (12, 8, 3)


def test_commands_are_functions(job: Job, tmp_path: Path, run_cli: Any) -> None:
    """They give what the commands print as JSON and write."""
    data = ["--data", job.data, "--alignments", job.ali, "--device", "cpu"]
    expected = json.loads(run_cli("evaluate", job.run, *data, "--by", "speaker", "--json").stdout)
    assert ddnn.evaluate(str(job.run), job.data, job.ali, by="speaker", device="cpu") == expected
    rows = ddnn.read_metrics(job.run)
    assert [row["type"] for row in rows] == ["start", "epoch", "worker", "epoch", "epoch", "end"]
    assert [json.loads(line) for line in (job.run / "metrics.jsonl").read_text().splitlines()] == rows
    with pytest.raises(ddnn.UserError, match="the file does not exist"):
        ddnn.read_metrics(tmp_path)
    assert ddnn.decode_prep(job.run, job.data, tmp_path / "out", device="cpu") is None
    of_decoder = {"graph": job.root / "graph", "model": job.ali / "final.mdl", "text": job.data / "text"}
    options = [word for name, path in of_decoder.items() for word in (f"--{name}", path)]
    expected = json.loads(run_cli("score", tmp_path / "out", *options, "--acoustic-scale", "1,2", "--json").stdout)
    dev = ddnn.score(tmp_path / "out", **of_decoder, acoustic_scale=[1, 2], out=tmp_path / "dev")
    assert json.dumps({**dev, "notes": []}) == json.dumps({**expected, "notes": []}) and len(dev["scales"]) == 2
    assert f"for the test set: acoustic_scale_from {tmp_path}/dev/score.json" in dev["notes"][-1]
    again = ddnn.score(tmp_path / "out", **of_decoder, acoustic_scale_from=tmp_path / "dev")
    assert (again["best"], again["wer"], len(again["scales"])) == (dev["best"], dev["wer"], 1)
    with pytest.raises(
        ddnn.UserError, match="what it replaces\n  location: acoustic_scale_from\n  hint: remove acoustic_s"
    ):
        ddnn.score(tmp_path / "out", **of_decoder, acoustic_scale_from=tmp_path / "dev", acoustic_scale=[1])


def test_errors_speak_of_arguments(job: Job, tmp_path: Path) -> None:
    """And not of the options of a command, where they are those of the functions."""
    (tmp_path / "a run").mkdir()
    (tmp_path / "a run/recipe.yaml").write_bytes((job.run / "recipe.yaml").read_bytes())
    (tmp_path / "pipes.scp").write_text("a-1 cat nothing |\n")
    cases: tuple[tuple[Any, str], ...] = (
        (lambda: ddnn.train(job.recipe, job.run), "resume it with resume=True; else name another directory"),
        (lambda: ddnn.train(job.run / "x", job.run, resume=True), "nothing to resume"),
        (lambda: ddnn.load(tmp_path / "a run"), f"ddnn.train({str(tmp_path / 'a run')!r}, resume=True)"),
        (lambda: ddnn.load(tmp_path / "none"), "name the run_dir of a training"),
        (lambda: next(ddnn.load(job.run).compute(job.data, transforms=job.ali)), "location: transforms\n"),
        (lambda: ddnn.evaluate(job.run, job.ali, job.data), "alignments"),
        (
            lambda: ddnn.decode_prep(job.run, job.data, tmp_path, kind="activations"),
            "give both kind activations and layer",
        ),
        (lambda: next(ddnn.read_features(tmp_path / "pipes.scp")), "add allow_pipes=True (in a recipe"),
        (lambda: ddnn.train(job.recipe, tmp_path / "x", settings=["sed=1"]), "[settings sed=1]"),
    )
    for call, said in cases:
        with pytest.raises(ddnn.UserError) as caught:
            call()
        assert said in str(caught.value) and "--" not in str(caught.value), caught.value


def test_a_function_is_called_after_each_epoch(job: Job, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []
    settings = {"schedule.max_epochs": 2}
    ddnn.train(job.recipe, tmp_path / "run", settings=settings, device="cpu", on_epoch=rows.append)
    assert [(row["epoch"], row["split"]) for row in rows] == [
        (0, "cv"),
        (1, "train"),
        (1, "cv"),
        (2, "train"),
        (2, "cv"),
    ]
    assert rows == [row for row in ddnn.read_metrics(tmp_path / "run") if row["type"] == "epoch"]

    def ends(row: dict[str, Any]) -> None:
        if row["epoch"] == 2:
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        ddnn.train(job.recipe, tmp_path / "ended", settings=settings, device="cpu", on_epoch=ends)
    model = ddnn.train(job.recipe, tmp_path / "ended", settings=settings, device="cpu", resume=True)
    expected = ddnn.load(tmp_path / "run").acoustic_model.network.parameters
    assert torch.equal(model.acoustic_model.network.parameters, expected)
    with pytest.raises(ddnn.UserError, match="on_epoch is called in this process, but 2 workers"):
        ddnn.train(job.recipe, tmp_path / "two", workers=2, on_epoch=ends)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_log_is_shown_where_logging_is_configured(job: Job, tmp_path: Path, workers: int) -> None:
    """Whether the workers are other processes or not."""
    need_mpi()
    train = (
        f"import ddnn; ddnn.train({str(job.recipe)!r}, {str(tmp_path)!r} + '/run%s', workers={workers}, device='cpu')"
    )
    code = f"{train % 1}; import logging, sys; sys.stderr.write('configured\\n'); logging.basicConfig(); {train % 2}"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMIX_", "DDNN_"))}
    done = subprocess.run([forked_python(), "-c", code], env=environment, capture_output=True, text=True, check=True)
    before, _, second = done.stderr.partition("configured\n")
    assert done.stdout == "" and before == "", done.stderr
    assert second.count("epoch  1 cv") == 1 and f"finished: {tmp_path}/run2" in second


def test_what_is_no_utterance_is_refused(job: Job, tmp_path: Path) -> None:
    model, good = ddnn.load(job.run), np.ones((3, 4))
    for bad, said in (
        (np.ones((3, 5)), r"shape \(3, 5\) found, expected \(frames, 4\)"),
        (np.ones(4), r"shape \(4,\) found"),
        (np.ones((0, 4)), r"shape \(0, 4\) found"),
        (np.ones((3, 4), complex), "dtype complex128 found, expected real numbers"),
        (np.full((3, 4), np.nan), "nan in row 0, column 0"),
        (np.full((3, 4), 1e300), "inf in row 0, column 0"),
    ):
        with pytest.raises(ddnn.UserError, match=said):
            model.posteriors(bad)
    with pytest.raises(ddnn.UserError, match="cmvn_stats given, the model's cmvn is none"):
        model.posteriors(good, cmvn_stats=np.ones((2, 5)))
    with pytest.raises(ddnn.UserError, match="'scores' found, expected one of log-likelihoods"):
        next(model.compute(job.data, "scores"))  # type: ignore[arg-type]
    model.acoustic_model = replace(model.acoustic_model, features=FeatureConfig("mean"))
    with pytest.raises(ddnn.UserError, match="cmvn_stats not given, the model's cmvn is mean"):
        ddnn.Model(model.acoustic_model, job.run).posteriors(good)
    for stats in (np.ones((2, 4)), np.zeros((2, 5)), np.full((2, 5), np.nan)):
        with pytest.raises(ddnn.UserError, match=r"expected \(2, 5\), finite, of a frame or more"):
            ddnn.Model(model.acoustic_model, job.run).posteriors(good, cmvn_stats=stats)


def test_features_and_alignments_are_those_of_the_files(job: Job, tmp_path: Path) -> None:
    for source in (job.data, job.scp, str(job.ark)):
        read = dict(ddnn.read_features(source))
        assert list(read) == job.names
        assert all(np.array_equal(read[name], matrix) and read[name].dtype == np.float32
                   for name, matrix in job.features.items())  # fmt: skip
    for source in (job.ali, write_pdfs(tmp_path / "pdfs.txt", job.labels)):
        found = ddnn.read_alignments(source)
        assert {name: pdfs.tolist() for name, pdfs in found.items()} == {n: p.tolist() for n, p in job.labels.items()}
        assert all(pdfs.dtype == np.int32 for pdfs in found.values())
    (tmp_path / "pipes.scp").write_text("a-1 cat nothing |\n")
    with pytest.raises(DataError, match="is a shell command, which is not run"):
        next(ddnn.read_features(tmp_path / "pipes.scp"))
    matrix = np.ones((2, 2), np.float32)
    matrix[1, 1] = np.inf
    write_matrices(tmp_path / "bad.ark", tmp_path / "bad.scp", [("a-1", matrix)])
    for name in ("bad.ark", "bad.scp"):
        with pytest.raises(DataError, match="utterance a-1: inf in row 1, column 1"):
            next(ddnn.read_features(tmp_path / name))


def test_a_mapping_is_a_recipe(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its relative paths are of the working directory, and the parameters are those of the same recipe in a file."""
    monkeypatch.chdir(job.root)
    recipe = {
        "data": {"train": Path("data"), "alignments": "ali", "cv": {"fraction": np.float64(0.3)}, "splice": 1},
        "model": {"hidden_layers": 1, "hidden_units": 8},
        "minibatch_size": 16,
    }
    with pytest.raises(ddnn.UserError, match="needs a run_dir"):
        ddnn.train(recipe)
    with pytest.raises(ddnn.UserError, match="a recipe cannot hold <object"):
        ddnn.train({"seed": object()}, tmp_path / "x")
    with pytest.raises(ddnn.UserError, match="unknown key; did you mean minibatch_size"):
        ddnn.train({**recipe, "minibatch_sizes": 1}, tmp_path / "x")
    for wrong, said in (
        ({**recipe, "minibatch_size": 0, "seeds": 1}, "[the recipe (a mapping)]\n  location: the recipe (a mapping)"),
        ({**recipe, "seeds": 1}, "\n  location: the recipe (a mapping)"),
        (
            {**recipe, "data": {"train": "x", "alignments": "ali"}},
            f"'x' does not exist: there is no {Path.cwd() / 'x'}",
        ),
    ):
        with pytest.raises(ddnn.UserError) as caught:
            ddnn.train(wrong, tmp_path / "x")
        assert said in str(caught.value) and "recipe.yaml" not in str(caught.value), caught.value
        assert "ddnn-" not in str(caught.value)
    settings = {"schedule.max_epochs": 1, "seed": 3}
    one = ddnn.train(recipe, tmp_path / "one", settings=settings, device="cpu")
    two = ddnn.train(tmp_path / "one/recipe.yaml", tmp_path / "two", settings=["seed=3"], device="cpu")
    assert torch.equal(one.acoustic_model.network.parameters, two.acoustic_model.network.parameters)
    assert one.run_dir == tmp_path / "one"
    with pytest.raises(ddnn.UserError, match="the run dir exists already"):
        ddnn.train(recipe, tmp_path / "one", settings=settings, device="cpu")
    again = ddnn.train(recipe, tmp_path / "one", settings=settings, device="cpu", resume=True)
    assert torch.equal(one.acoustic_model.network.parameters, again.acoustic_model.network.parameters)


def test_failures_are_exceptions(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of several workers too, by which a command would exit. But signals end the program."""
    with pytest.raises(ddnn.DivergedError):
        ddnn.train(job.recipe, tmp_path / "one", settings={"schedule.initial_learning_rate": 1e6}, device="cpu")

    original = start.start_training

    def ends(code: int) -> Any:
        def ended(*arguments: object) -> None:
            raise SystemExit(code)

        return ended

    for code, expected in ((3, ddnn.DivergedError), (2, ddnn.UserError), (137, ddnn.UserError), (75, SystemExit)):
        monkeypatch.setattr("ddnn.training.start.start_training", ends(code))
        with pytest.raises(expected) as caught:
            ddnn.train(job.recipe, tmp_path / "none", device="cpu", workers=2)
        assert caught.type is expected and (code == 75 or f"exit code {code}" in str(caught.value))
    with pytest.raises(ddnn.DivergedError, match="exit code 3"):  # status.json is of the training before
        monkeypatch.setattr("ddnn.training.start.start_training", ends(3))
        ddnn.train(job.recipe, tmp_path / "one", device="cpu", workers=2)

    def diverges(*arguments: Any) -> None:
        with pytest.raises(ddnn.DivergedError):
            original(*arguments)
        ends(3)()

    monkeypatch.setattr("ddnn.training.start.start_training", diverges)
    with pytest.raises(ddnn.DivergedError, match="the training learned nothing"):  # status.json says so
        ddnn.train(job.recipe, tmp_path / "two", settings={"schedule.initial_learning_rate": 1e6}, device="cpu")
    with pytest.raises(ddnn.UserError, match="there is no such run dir"):
        ddnn.load(tmp_path / "nothing")


def test_a_training_may_run_in_a_thread(job: Job, tmp_path: Path) -> None:
    """As in a notebook's or a server's: signals are then left alone."""
    handler = signal.getsignal(signal.SIGTERM)
    found: list[ddnn.Model] = []
    thread = threading.Thread(target=lambda: found.append(ddnn.train(job.recipe, tmp_path / "run", device="cpu")))
    thread.start()
    thread.join(300)
    assert len(found) == 1 and found[0].num_pdfs == 3 and signal.getsignal(signal.SIGTERM) is handler


def test_several_workers_train_a_mapping(job: Job, tmp_path: Path, forked_children: None) -> None:
    need_mpi()
    data = {"train": job.data, "alignments": job.ali, "cv": {"fraction": 0.25}}
    recipe = {"data": data, "model": {"hidden_layers": 1, "hidden_units": 8}, "minibatch_size": 16}
    model = ddnn.train(recipe, tmp_path / "run", settings={"schedule.max_epochs": 1}, device="cpu", workers=2)
    assert model.num_pdfs == 3 and "world_size" in (tmp_path / "run/metrics.jsonl").read_text()
