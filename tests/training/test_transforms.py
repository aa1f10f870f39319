"""Raw features through Kaldi's transforms, from the recipe to the word error rate: the same as with features that were
written with the transforms applied."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corpora import (
    PDFS,
    labelled_utterances,
    load_all,
    write_ali_dir,
    write_data_dir,
    write_graph_dir,
    write_recipe,
    write_trans,
    write_transforms,
)
from distributed.threads import run_workers
from jobs import assert_refused, files_in

import ddnn
from ddnn.data.feature_reader import FeatureConfig
from ddnn.data.loading import Corpus, DataConfig
from ddnn.data.pipeline import training_data
from ddnn.data.source import open_source
from ddnn.distributed.communicator import SingleProcess
from ddnn.distributed.groups import Groups
from ddnn.kaldi.archive import iterate_matrices
from ddnn.kaldi.transforms import read_transform_config
from ddnn.recipe.load import load_recipe
from ddnn.runs.run_dir import load_run
from ddnn.training.data_identity import DataIdentity, data_identity
from ddnn.training.job import run_training
from ddnn.training.options import data_config
from ddnn.util.errors import DataError

RunCli = Callable[..., Any]
TEST_SPEAKERS = [f"test{n}" for n in range(4)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Raw features of 4 dims in `train`, `cv` and `test`, their alignments, and a system `tri4` with what Kaldi leaves:
    `tri4_ali`, which has the transforms of train and cv, and `tri4/decode_test`."""
    for name, speaker, seed in (("train", "spk", 0), ("cv", "cv", 0), ("test", "test", 0)):
        features, labels = labelled_utterances(8 if name == "cv" else 16, 30, seed, speaker)
        data = write_data_dir(tmp_path / name, features)
        (data / "text").write_text("".join(f"{utterance} a b c\n" for utterance in sorted(features)))
        write_ali_dir(tmp_path / f"ali_{name}", labels)
    speakers = [f"{kind}{n}" for kind in ("spk", "cv") for n in range(4)]
    write_transforms(tmp_path / "tri4_ali", speakers, jobs=3)
    write_transforms(tmp_path / "tri4", speakers)
    for name in ("tri4", "tri4_ali"):
        (tmp_path / name / "cmvn_opts").write_text("--norm-means=true --norm-vars=false\n")
    write_trans(tmp_path / "tri4/decode_test", TEST_SPEAKERS, 5, jobs=2)
    write_graph_dir(tmp_path / "graph")
    recipe = write_recipe(tmp_path / "raw.yaml", tmp_path / "train", tmp_path / "ali_train")
    own_cv = f"cv: {{data: {tmp_path / 'cv'}, alignments: {tmp_path / 'ali_cv'}}}"
    text = recipe.read_text().replace("cv: {fraction: 0.25}", own_cv)
    recipe.write_text(
        text.replace("splice: 1\n", f"splice: 1\n  cmvn: mean\n  transforms: '{tmp_path / 'tri4_ali'}'\n")
    )
    return tmp_path


def write_transformed(folder: Path, name: str, transforms: Path) -> Path:
    """A data dir with the features as Kaldi's programs would have written them."""
    config = FeatureConfig("mean", transforms=read_transform_config(transforms))
    found = load_all(folder / name, None, 0, config, transforms=transforms)
    rows = found.features.numpy()
    spans = zip(found.utterances, found.offsets, found.offsets + found.num_frames, strict=True)
    data = write_data_dir(folder / "written" / name, {utterance: rows[start:end] for utterance, start, end in spans})
    shutil.copy(folder / name / "text", data / "text")
    return data


def test_from_recipe_to_words_as_with_written_features(folder: Path, run_cli: RunCli) -> None:
    written = folder / "written.yaml"
    text = (folder / "raw.yaml").read_text().replace("  cmvn: mean\n", "")
    text = text.replace(f"  transforms: '{folder / 'tri4_ali'}'\n", "")
    for name in ("train", "cv"):
        data = write_transformed(folder, name, folder / "tri4_ali")
        text = text.replace(f"'{folder / name}'", f"'{data}'").replace(f"data: {folder / name},", f"data: {data},")
    written.write_text(text)
    given = ["--transforms", folder / "tri4/decode_test"]
    data = {"raw": folder / "test", "written": write_transformed(folder, "test", folder / "tri4/decode_test")}
    results = []
    for name, options, jobs in (("raw", given, 2), ("written", [], 1)):
        run, decode = folder / f"run {name}", folder / f"decode {name}"
        assert run_cli("train", folder / f"{name}.yaml", "--run-dir", run, "--device", "cpu").exit_code == 0
        judged = run_cli("evaluate", run, "--data", data[name], "--alignments", folder / "ali_test", "--json", *options)
        assert judged.exit_code == 0, judged.stderr
        words = ["--data", data[name], "--out", decode, "--device", "cpu", "--jobs", jobs, *options]
        result = run_cli("decode-prep", run, *words)
        assert result.exit_code == 0, result.stderr
        figures = json.loads(judged.stdout)
        for name in ("model", "data", "alignments"):  # the model's digest names the transforms; the data dirs differ
            figures.pop(name)
        results.append([figures, (decode / "loglikes.ark").read_bytes()])
    assert results[0] == results[1]
    assert results[0][0]["frames"] == 480 and results[0][0]["frame_accuracy"] > 0.6
    assert load_run(folder / "run raw").network.parameters.equal(load_run(folder / "run written").network.parameters)
    assert "LDA+MLLT over 1+1+2 frames, fMLLR" in run_cli("info", folder / "run raw").stdout
    assert "WARNING" not in (folder / "run raw/train.log").read_text()
    applied = f"LDA+MLLT over 1+1+2 frames, fMLLR of {folder / 'tri4_ali'} applied to features of 4 dims"
    assert applied in (folder / "run raw/train.log").read_text()
    pytest.importorskip("kaldi_decoder")
    words = ["--model", folder / "ali_train/final.mdl", "--text", folder / "test/text", "--acoustic-scale", "0.1"]
    scored = [
        run_cli("score", folder / f"decode {name}", "--graph", folder / "graph", *words, "--json").stdout
        for name in data
    ]
    wers = [[one["wer"] for one in json.loads(text)["scales"]] for text in scored]
    assert wers[0] == wers[1] and wers[0][0] >= 0


def trained(folder: Path) -> Path:
    recipe = load_recipe(folder / "raw.yaml", ["schedule.max_epochs=1"])
    run_training(recipe, folder / "run", "cpu")
    return folder / "run"


def test_a_model_with_transforms_needs_those_of_the_data(folder: Path, run_cli: RunCli) -> None:
    run, out = trained(folder), folder / "out"
    evaluate = ["evaluate", run, "--data", folder / "test", "--alignments", folder / "ali_test"]
    decode = ["decode-prep", run, "--data", folder / "test", "--out", out]
    for words in (evaluate, decode):
        refused = run_cli(*words)
        assert_refused(refused, "trained with Kaldi's transforms (LDA+MLLT over 1+1+2 frames, fMLLR)", "--transforms")
        refused = run_cli(*words, "--transforms", folder / "tri4_ali")
        assert_refused(refused, "none of the speakers and utterances of", "test0", "tri4_ali")
        refused = run_cli(*words, "--transforms", folder / "test")
        assert_refused(refused, "there is no final.mat, final.mdl or trans.* in it")
    (folder / "tri4/splice_opts").write_text("--left-context=2 --right-context=1\n")
    refused = run_cli(*decode, "--transforms", folder / "tri4/decode_test")
    assert_refused(refused, "other transforms than those of the training data: LDA+MLLT over 2+1+1 frames, fMLLR found")
    assert files_in(out) == set()


def test_the_api_applies_transforms_to_a_data_dir_and_to_no_single_utterance(folder: Path, run_cli: RunCli) -> None:
    run, system = trained(folder), folder / "tri4/decode_test"
    words = ["--data", folder / "test", "--out", folder / "out", "--transforms", system]
    assert run_cli("decode-prep", run, *words).exit_code == 0
    model, expected = ddnn.load(run), dict(iterate_matrices(folder / "out/loglikes.ark"))
    found = dict(model.compute(folder / "test", transforms=system))
    assert list(found) == list(expected)
    assert all(np.array_equal(found[key], expected[key]) for key in expected)
    with pytest.raises(ddnn.UserError, match="trained with Kaldi's transforms"):
        next(model.compute(folder / "test"))
    utterance, features = next(ddnn.read_features(folder / "test"))
    stats = ddnn.read_cmvn_stats(folder / "test")[utterance]
    for compute in (model.log_likelihoods, model.posteriors, model.log_posteriors):
        with pytest.raises(ddnn.UserError, match="applies Kaldi's transforms") as caught:
            compute(features, cmvn_stats=stats)
        assert caught.value.hint == "compute a whole data dir: model.compute(data_dir, transforms=...)"


def test_a_model_without_transforms_refuses_them(folder: Path, run_cli: RunCli) -> None:
    recipe = load_recipe(folder / "raw.yaml", ["schedule.max_epochs=1", "data.transforms=null"])
    run_training(recipe, folder / "run", "cpu")
    words = ["--data", folder / "test", "--transforms", folder / "tri4/decode_test"]
    assert_refused(
        run_cli("decode-prep", folder / "run", *words, "--out", folder / "out"), "trained with no transforms"
    )
    assert files_in(folder / "out") == set()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["data.deltas=1"], "1 found beside data.transforms"),
        (["data.transforms={}/train"], "there is no final.mat, final.mdl or trans.* in it"),
        (["data.transforms={}/tri4/decode_test"], "none of the speakers and utterances of"),
        (["data.cv.transforms={}/tri4/decode_test"], "none of the speakers and utterances of"),
        (["data.cv.transforms={}/ali_cv"], "other transforms than those of the training data"),
        (["data.transforms={}/ali_train", "data.cv.transforms={}/ali_train"], "do not fit the GMMs of 4 dims"),
    ],
)
def test_a_training_with_other_transforms_is_refused(
    settings: list[str], said: str, folder: Path, run_cli: RunCli
) -> None:
    words = [word for one in settings for word in ("--set", one.format(folder))]
    refused = run_cli("train", folder / "raw.yaml", "--run-dir", folder / "run", "--device", "cpu", *words)
    assert_refused(refused, said)
    assert "metrics.jsonl" not in files_in(folder / "run")


def test_other_transforms_are_noticed_on_resume(folder: Path) -> None:
    """Also by other workers, which have the same features where the transforms are."""

    def identity(*settings: str) -> DataIdentity:
        config = data_config(load_recipe(folder / "raw.yaml", settings))
        return data_identity(
            training_data(config, torch.device("cpu"), Groups.data_parallel(SingleProcess())), SingleProcess()
        )

    before, config = identity(), data_config(load_recipe(folder / "raw.yaml"))
    for found in run_workers(
        2, lambda comm: data_identity(training_data(config, torch.device("cpu"), Groups.data_parallel(comm)), comm)
    ):
        assert found.differences(before) == {}
    shutil.copytree(folder / "tri4_ali", folder / "elsewhere")
    assert identity(f"data.transforms={folder / 'elsewhere'}").differences(before) == {}
    speakers = ["spk1", "spk0", "spk2", "spk3"]
    text = {key: np.column_stack([np.eye(5), np.zeros(5)]) for key in speakers}
    (folder / "elsewhere/trans.1").write_text(
        "".join(f"{k} [\n" + "\n".join(" ".join(map(str, row)) for row in m) + " ]\n" for k, m in text.items())
    )
    (folder / "elsewhere/num_jobs").unlink()
    for job in (2, 3):
        (folder / f"elsewhere/trans.{job}").unlink()
    own = f"data.cv.transforms={folder / 'tri4_ali'}"
    changed = identity(f"data.transforms={folder / 'elsewhere'}", own).differences(before)
    assert list(changed) == ["data.train"] and "other features: dimension" in changed["data.train"]


def test_each_corpus_has_its_transforms(folder: Path) -> None:
    """Also from cache files."""
    write_transforms(folder / "tri4_cv", [f"cv{n}" for n in range(4)])
    names = ("train", "cv")
    corpora = [Corpus(folder / name, folder / f"ali_{name}", transforms=folder / "tri4_ali") for name in names]
    own = [corpora[0], replace(corpora[1], transforms=folder / "tri4_cv")]
    features = FeatureConfig("mean", splice=1, transforms=read_transform_config(folder / "tri4_ali"))

    def rows(chosen: list[Corpus], cache_dir: Path | None = None) -> torch.Tensor:
        source = open_source(chosen, DataConfig(features, cache_dir=cache_dir), SingleProcess())
        return source.load(range(len(source.index.entries)), SingleProcess()).features

    expected = torch.cat([rows(corpora[:1]), rows(corpora[1:])])
    assert rows(corpora).equal(expected) and rows(own).equal(expected)
    assert rows(own, folder / "cache").equal(expected) and rows(own, folder / "cache").equal(expected)
    with pytest.raises(DataError, match=r"none of the speakers and utterances of .*train has a transform"):
        rows([replace(corpora[0], transforms=folder / "tri4_cv"), corpora[1]])


def test_the_memory_and_the_network_are_of_the_transformed_dims(folder: Path) -> None:
    run = trained(folder)
    model = load_run(run)
    assert model.transform.dim == 5 and model.network.layers[0].input_dim == 15
    assert model.network.output_dim == PDFS and model.features.transforms == read_transform_config(folder / "tri4_ali")
