"""Several corpora as one: the bits of the whole that they are parts of, and what does not fit together is refused."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from corpora import (
    labelled_utterances,
    write_ali_dir,
    write_data_dir,
    write_model,
    write_pdfs,
    write_recipe,
    write_transforms,
)
from distributed.threads import run_workers
from jobs import RunCli, assert_refused, make_job

from ddnn.averaging.averager import Averager
from ddnn.data import feature_reader, loading, pipeline
from ddnn.data.feature_reader import FeatureConfig
from ddnn.data.loading import Corpus, DataConfig
from ddnn.data.source import DataSource, open_source
from ddnn.distributed.communicator import Communicator, SingleProcess
from ddnn.distributed.groups import Groups
from ddnn.distributed.signals import TrainingInterrupted
from ddnn.recipe.load import load_recipe
from ddnn.training.data_identity import data_identity
from ddnn.training.job import run_training
from ddnn.training.memory import frames_memory
from ddnn.training.normalization import input_transform
from ddnn.training.options import data_config
from ddnn.util.errors import DataError, RecipeError

pytestmark = pytest.mark.usefixtures("forked_children")

Utterances = dict[str, np.ndarray]


def write_parts(folder: Path, features: Utterances, labels: Utterances, cut: int) -> list[Corpus]:
    """The first `cut` utterances as corpus 0, the others as corpus 1, in the order of the data dir."""
    names, corpora = sorted(features), []
    for n, part in enumerate((names[:cut], names[cut:])):
        data = write_data_dir(folder / f"data{n}", {name: features[name] for name in part})
        ali = write_ali_dir(folder / f"ali{n}", {name: labels[name] for name in part})
        corpora.append(Corpus(data, ali, (f"data.train[{n}]", f"data.alignments[{n}]")))
    return corpora


def lists(corpora: list[Corpus]) -> list[str]:
    """Settings of a recipe."""
    pairs = [(corpus.data, corpus.alignments) for corpus in corpora]
    data, alignments = ([str(path) for path in paths] for paths in zip(*pairs, strict=True))
    return [f"data.train={data}", f"data.alignments={alignments}"]


def opened(corpora: list[Corpus], comm: Communicator | None = None, **config: Any) -> DataSource:
    features = FeatureConfig(config.pop("cmvn", "none"), splice=1, dtype=config.pop("dtype", "float32"))
    return open_source(corpora, DataConfig(features, **config), comm or SingleProcess())


@pytest.fixture
def whole(tmp_path: Path) -> tuple[Path, list[str]]:
    """A recipe of one corpus, and what makes it one of two: 5 utterances of spk0 and spk1, and 11 of spk1 to spk3."""
    features, labels = labelled_utterances(count=16)
    data, ali = write_data_dir(tmp_path / "data", features), write_ali_dir(tmp_path / "ali", labels)
    recipe = write_recipe(tmp_path / "recipe.yaml", data, ali)
    return recipe, lists(write_parts(tmp_path, features, labels, 5))


@pytest.mark.parametrize("settings", [[], ["init=rbm", "pretrain.epochs=[1]"]], ids=["random", "rbm"])
def test_two_halves_train_to_the_bits_of_the_whole(
    whole: tuple[Path, list[str]], tmp_path: Path, settings: list[str]
) -> None:
    recipe, halves = whole
    run_training(load_recipe(recipe, settings), tmp_path / "whole", "cpu")
    run_training(load_recipe(recipe, [*settings, *halves]), tmp_path / "halves", "cpu")
    for name in ("final.safetensors", "ali_train_pdf.counts", "cv_utterances"):
        assert (tmp_path / "halves" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    starts = [
        next(row for row in map(yaml.safe_load, (tmp_path / run / "metrics.jsonl").open()) if row["type"] == "start")
        for run in ("whole", "halves")
    ]
    for key in ("train_digest", "cv_digest", "train_frames", "cv_frames", "baseline_loss"):
        assert starts[0][key] == starts[1][key]
    resolved = yaml.safe_load((tmp_path / "halves/recipe.yaml").read_text())
    assert resolved["data"]["train"] == [str(tmp_path / "data0"), str(tmp_path / "data1")]
    assert load_recipe(tmp_path / "halves/recipe.yaml") == load_recipe(
        recipe, [*settings, *halves, "precision=float32"]
    )


@pytest.mark.parametrize("way", ["archives", "processes", "caches", "a cache and processes"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_shard_of_several_corpora_is_one_dataset(
    tmp_path: Path, way: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features, labels and the order of the utterances, on any number of workers, each with its own CMVN."""
    features, labels = labelled_utterances(count=16)
    corpora = write_parts(tmp_path, features, labels, 4)  # spk0 alone, spk1 to spk3
    one = [Corpus(write_data_dir(tmp_path / "data", features), write_ali_dir(tmp_path / "ali", labels))]
    config: dict[str, Any] = {"cmvn": "mean", "dtype": dtype}
    if "processes" in way:
        monkeypatch.setattr(loading, "BYTES_PER_PROCESS", 1)
        monkeypatch.setattr(feature_reader, "CHUNK_BYTES", 1000)
    config |= {
        "loader_processes": 2 if "processes" in way else 1,
        "cache_dir": tmp_path / "c" if "cache" in way else None,
    }
    if way == "a cache and processes":  # an archive that no cache file can stand for
        scp = corpora[1].data / "feats.scp"
        name, _, place = scp.read_text().splitlines()[0].partition(" ")
        copied = write_data_dir(tmp_path / "copied", {name: features[name]}) / "feats.ark"
        scp.write_text(scp.read_text().replace(f"{name} {place}", f"{name} tail -c +{len(name) + 2} {copied} |"))
        config["allow_pipes"] = True

    def load(given: list[Corpus], config: dict[str, Any], shards: list[list[int]], comm: Communicator) -> Any:
        found = opened(given, comm, **config).load(shards[comm.rank], comm)
        return found.features, found.labels, found.utterances, found.speakers, found.offsets.tolist()

    for shards in ([list(range(16))], [[0, 1, 5, 15], [2, 3]], [[7, 8], [1, 2]]):
        plain = {"cmvn": "mean", "dtype": dtype}
        expected = run_workers(len(shards), partial(load, one, plain, shards))
        found = run_workers(len(shards), partial(load, corpora, config, shards))
        for (rows, ids, *rest), (expected_rows, expected_ids, *expected_rest) in zip(found, expected, strict=True):
            assert rows.dtype == expected_rows.dtype and torch.equal(rows, expected_rows)
            assert torch.equal(ids, expected_ids) and rest == expected_rest
    if way == "caches":
        source = opened(corpora, **config)
        assert all(part.cache is not None for part in source.parts) and len(list((tmp_path / "c").iterdir())) == 2
        memory = frames_memory(opened(one, cmvn="mean", dtype=dtype), range(16))
        assert frames_memory(source, range(16)) == memory, "copied, not mapped"


def test_counts_of_pdfs_and_utterances_are_sums(tmp_path: Path) -> None:
    """Also of archives of pdf-ids, of which one lacks the last pdf."""
    features, labels = labelled_utterances()
    corpora = write_parts(tmp_path, features, labels, 6)
    for n, part in enumerate((sorted(features)[:6], sorted(features)[6:])):
        ids = {name: np.minimum(labels[name], 1 + n) for name in part[1:]}
        corpora[n] = Corpus(corpora[n].data, write_pdfs(tmp_path / f"{n}.txt", ids), corpora[n].keys)
    source = opened(corpora, max_skipped_fraction=0.2)
    assert source.index.num_pdfs == 3 and source.index.counts["no_alignment"] == 2
    assert (
        source.index.pdf_counts.tolist() == np.bincount(source.load(range(10), SingleProcess()).labels + 1)[1:].tolist()
    )
    assert source.transition_digest() is None
    with pytest.raises(DataError, match="1 of 6 utterances cannot be used") as caught:
        opened(corpora, max_skipped_fraction=0.1)
    assert caught.value.location == str(corpora[0].data), "each corpus by itself"
    assert caught.value.message.startswith("data.train[0] with data.alignments[0]: 1 of 6 utterances cannot be used")


def other_dims(corpora: list[Corpus], features: Utterances, labels: Utterances) -> None:
    write_data_dir(corpora[1].data, {name: features[name][:, :3] for name in sorted(features)[6:]})


def other_number_of_pdfs(corpora: list[Corpus], features: Utterances, labels: Utterances) -> None:
    write_model(corpora[1].alignments / "final.mdl", range(4))


def other_tree(corpora: list[Corpus], features: Utterances, labels: Utterances) -> None:
    write_model(corpora[1].alignments / "final.mdl", (1, 0, 2))


def more_pdfs_than_the_model(corpora: list[Corpus], features: Utterances, labels: Utterances) -> None:
    last = sorted(labels)[-1]
    corpora[1] = Corpus(
        corpora[1].data, write_pdfs(corpora[1].data.parent / "ids", {**labels, last: labels[last] * 0 + 3})
    )


def common_utterance(corpora: list[Corpus], features: Utterances, labels: Utterances) -> None:
    """The first of corpus 0 is in corpus 1 too."""
    names = [sorted(features)[0], *sorted(features)[6:]]
    write_data_dir(corpora[1].data, {name: features[name] for name in names})
    write_ali_dir(corpora[1].alignments, {name: labels[name] for name in names})


@pytest.mark.parametrize(
    ("change", "message", "location"),
    [
        (other_dims, "features of 3 dims found, 4 expected as in .*data0", "data1"),
        (other_number_of_pdfs, "another tree than that of .*ali0", "ali1"),
        (other_tree, "its final.mdl is of another tree than that of .*ali0", "ali1"),
        (more_pdfs_than_the_model, "4 pdfs found .*, 3 expected as in .*ali0", "ids"),
        (common_utterance, r"1 of 7 utterances of data.train\[1\] are also in data.train\[0\], .*data0; the first is spk0", "data1"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_corpora_that_do_not_fit_together_are_refused(
    tmp_path: Path, change: Callable[[list[Corpus], Utterances, Utterances], None], message: str, location: str
) -> None:
    features, labels = labelled_utterances()
    corpora = write_parts(tmp_path, features, labels, 6)
    opened(corpora)
    change(corpora, features, labels)
    with pytest.raises(DataError, match=message) as caught:
        opened(corpora)
    assert caught.value.location == str(tmp_path / location)


def test_speakers_of_one_name_are_one_speaker(tmp_path: Path) -> None:
    features, labels = labelled_utterances(count=16)
    corpora = write_parts(tmp_path, features, labels, 6)  # spk1 in both
    index = opened(corpora).index
    assert index.speakers is not None and index.size().startswith("4 speakers, 16 utterances, ")
    (corpora[1].data / "utt2spk").unlink()
    assert opened(corpora).index.speakers is None


def test_an_utterance_that_one_corpus_skips_may_be_in_another(tmp_path: Path) -> None:
    """Of another speaker: that of the corpus in which it is used counts."""
    features, labels = labelled_utterances()
    corpora, name = write_parts(tmp_path, features, labels, 6), min(features)
    more = {each: features[each] for each in (name, *sorted(features)[6:])}
    table = write_data_dir(corpora[1].data, more) / "utt2spk"
    table.write_text(table.read_text().replace(f"{name} spk0", f"{name} another"))
    index = opened(corpora, max_skipped_fraction=0.5).index
    assert index.speakers is not None and index.speakers[index.utterances.index(name)] == "spk0"
    assert len(index.entries) == 12


def test_each_corpus_may_have_its_own_transforms(
    whole: tuple[Path, list[str]], tmp_path: Path, run_cli: RunCli
) -> None:
    """One dir that has those of all speakers, or one for each corpus."""
    recipe, halves = whole
    every = write_transforms(tmp_path / "tri4_ali")
    own = [
        write_transforms(tmp_path / f"tri4_ali{n}", speakers)
        for n, speakers in enumerate((["spk0", "spk1"], ["spk1", "spk2", "spk3"]))
    ]
    runs = {
        "whole": f"data.transforms={every}",
        "one": f"data.transforms={every}",
        "own": f"data.transforms={list(map(str, own))}",
    }
    for name, transforms in runs.items():
        settings = [transforms, "schedule.max_epochs=1", *(halves if name != "whole" else [])]
        run_training(load_recipe(recipe, settings), tmp_path / name, "cpu")
        assert (tmp_path / name / "final.safetensors").read_bytes() == (
            tmp_path / "whole/final.safetensors"
        ).read_bytes()
    words = ["train", recipe, "--run-dir", tmp_path / "run", "--device", "cpu"]
    words += [word for setting in halves for word in ("--set", setting)]
    wrong = f"data.transforms=[{own[0]}, {own[1]}, {every}]"
    assert_refused(
        run_cli(*words, "--set", wrong), "data.transforms: 3 found, but data.train names 2; give transforms for"
    )
    (own[1] / "splice_opts").write_text("--left-context=2 --right-context=1\n")
    refused = run_cli(*words, "--set", runs["own"])
    assert_refused(refused, "other transforms than those of the training data", f"location: {own[1]}")


def test_rbms_know_all_corpora_again(whole: tuple[Path, list[str]]) -> None:
    """A pretraining is not resumed on other features of the second corpus."""
    config = data_config(load_recipe(whole[0], whole[1]))
    identity = data_identity(
        pipeline.training_data(config, torch.device("cpu"), Groups.data_parallel(SingleProcess())), SingleProcess()
    )
    assert list(identity.of("data.train").contents) == list(identity.of("data.train").features)
    assert list(identity.of("data.train").contents) == ["data.train[0]", "data.train[1]"]


def test_the_normalization_is_over_utterances_of_all_corpora(
    whole: tuple[Path, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a corpus of more utterances than the statistics take, the first, as nnet1; of several, some of each."""
    recipe, halves = whole
    monkeypatch.setattr("ddnn.training.normalization.STATISTICS_UTTERANCES", 4)
    features, shifts = labelled_utterances(count=16)[0], []
    for settings in ([], halves):
        config = data_config(load_recipe(recipe, settings), held_out=False)
        data = pipeline.training_data(config, torch.device("cpu"), Groups.data_parallel(SingleProcess()))
        shift = input_transform(data, SingleProcess()).shift
        assert shift is not None
        shifts.append(shift[4:8].numpy())
    names = sorted(features)
    for shift, chosen in zip(shifts, (names[:4], names[::4]), strict=True):
        mean = np.concatenate([features[name] for name in chosen]).mean(axis=0)
        np.testing.assert_allclose(shift, -mean, rtol=1e-4, atol=1e-5)


def test_a_resume_names_the_corpus_that_has_changed(
    whole: tuple[Path, list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, halves = whole
    settings = load_recipe(recipe, halves)
    after, minibatches = Averager.after_minibatch, count(1)

    def stop(self: Averager, frames: int) -> bool:
        averaged = after(self, frames)
        if next(minibatches) == 40:
            os.kill(os.getpid(), signal.SIGTERM)
        return averaged

    with monkeypatch.context() as patched:
        patched.setattr(Averager, "after_minibatch", stop)
        with pytest.raises(TrainingInterrupted):
            run_training(settings, tmp_path / "run", "cpu")
    labels = labelled_utterances(count=16)[1]
    write_ali_dir(tmp_path / "ali1", {name: labels[name][::-1] for name in sorted(labels)[5:]})
    with pytest.raises(DataError, match=r"written: data\.alignments\[1\]: pdf-ids of digest ") as caught:
        run_training(settings, tmp_path / "run", "cpu", resume=True)
    assert caught.value.location == str(tmp_path / "ali1")
    write_ali_dir(tmp_path / "ali1", {name: labels[name] for name in sorted(labels)[5:]})
    run_training(settings, tmp_path / "run", "cpu", resume=True)
    run_training(load_recipe(recipe), tmp_path / "whole", "cpu")
    assert (tmp_path / "run/final.safetensors").read_bytes() == (tmp_path / "whole/final.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["data.alignments=[{ali}]"], "data.alignments: 1 found, but data.train names 2; give an alignment for each"),
        (["data.train={data}", "data.alignments=[{ali},{ali}]"], "data.alignments: 2 found, but data.train names 1"),
        (["data.train=[{data},nowhere]"], "data.train: 'nowhere' does not exist"),
        (["data.train=[]"], "data.train: a list found, expected a path or a list, each a path"),
        (["data.train=[{data},5]"], "data.train: a list found, expected a path or a list"),
        (["data.cv.fraction=null", "data.cv.data=[{data},{data}]", "data.cv.alignments={ali}"], "data.cv.alignments: 1 found, but data.cv.data names 2"),
        (["data.cv.fraction=null", "data.cv.speakers={data}", "data.cv.by=utterance"], "data.cv.by: never read, as there is no data.cv.fraction"),
        (["data.cv.by=word"], "data.cv.by: the text 'word' found, expected speaker or utterance"),
        (["data.cv.fraction=0.2", "data.cv.utterances={data}"], "data.cv.fraction: given together with data.cv.utterances"),
    ],
)  # fmt: skip
def test_recipes_of_several_corpora_are_checked(tmp_path: Path, settings: list[str], said: str) -> None:
    features, labels = labelled_utterances()
    corpora = write_parts(tmp_path, features, labels, 6)
    recipe = write_recipe(tmp_path / "recipe.yaml", corpora[0].data, corpora[0].alignments)
    given = [one.format(data=corpora[0].data, ali=corpora[0].alignments) for one in settings]
    with pytest.raises(RecipeError) as caught:
        load_recipe(recipe, [*lists(corpora)[: 2 - sum("data.alignments" in one for one in settings)], *given])
    assert said in str(caught.value) and "problems in" not in str(caught.value)


def test_a_list_of_one_is_a_path(tmp_path: Path) -> None:
    features, labels = labelled_utterances()
    data, ali = write_data_dir(tmp_path / "data", features), write_ali_dir(tmp_path / "ali", labels)
    recipe = write_recipe(tmp_path / "recipe.yaml", data, ali)
    found = load_recipe(recipe, [f"data.train=[{data}]", f"data.alignments=[{ali}]"])
    assert found == load_recipe(recipe) and found.data.train == data


def test_swapped_folders_are_told(tmp_path: Path, run_cli: RunCli) -> None:
    job = make_job(tmp_path / "job")
    train = ["train", job.recipe, "--run-dir", job.run, "--device", "cpu"]
    swapped = ["--set", f"data.train={job.ali}", "--set", f"data.alignments={job.data}"]
    message = "is a data dir (it has feats.scp) and {} is an alignment dir (it has final.mdl); did you swap them?"
    assert_refused(
        run_cli(*train, *swapped), "data.alignments " + message.format("data.train"), f"location: {job.data}"
    )
    cv = [
        "--set",
        "data.cv.fraction=null",
        "--set",
        f"data.cv.data={job.ali}",
        "--set",
        f"data.cv.alignments={job.data}",
    ]
    assert_refused(run_cli(*train, "--resume=auto", *cv), "data.cv.alignments " + message.format("data.cv.data"))
    both = ["--set", f"data.train=[{job.data},{job.ali}]", "--set", f"data.alignments=[{job.ali},{job.data}]"]
    assert_refused(run_cli(*train, "--resume=auto", *both), "data.alignments[1] " + message.format("data.train[1]"))
    twice = ["--set", f"data.alignments={job.data}"]
    assert_refused(run_cli(*train, "--resume=auto", *twice), "it has feats.scp), not an alignment dir")
    twice = ["--set", f"data.train={job.ali}"]
    assert_refused(
        run_cli(*train, "--resume=auto", *twice), "data.train is an alignment dir (it has final.mdl), not a data"
    )
    ids = write_pdfs(tmp_path / "ids.txt", job.labels)
    swapped = ["--set", f"data.train={ids}", "--set", f"data.alignments={job.data}"]
    assert_refused(run_cli(*train, "--resume=auto", *swapped), "data.train is a file; did you swap them?")
    assert run_cli(*train, "--resume=auto").exit_code == 0
    evaluate = run_cli("evaluate", job.run, "--data", job.ali, "--alignments", job.data, "--device", "cpu")
    assert_refused(evaluate, "--alignments " + message.format("--data"))


@pytest.mark.parametrize("corpus", ["of one speaker", "of two parts"])
def test_from_recipe_to_word_errors(tmp_path: Path, corpus: str, run_cli: RunCli) -> None:
    """Nothing but the recipe's data section is special."""
    job, settings = make_job(tmp_path / "job"), ["seed=1"]
    if corpus == "of one speaker":
        table = job.data / "utt2spk"
        table.write_text("".join(f"{line.split()[0]} me\n" for line in table.read_text().splitlines()))
    else:
        settings += lists(write_parts(tmp_path, job.features, job.labels, 12))
    options = [word for setting in settings for word in ("--set", setting)]
    result = run_cli("train", job.recipe, "--run-dir", job.run, "--device", "cpu", *options)
    assert result.exit_code == 0, result.stderr
    log = (job.run / "train.log").read_text()
    assert ("has a single speaker. Utterances are held out instead" in log) == (corpus == "of one speaker")
    assert run_cli("decode-prep", job.run, "--data", job.data, "--out", job.root / "decode").exit_code == 0
    words = "--graph", job.root / "graph", "--model", job.ali / "final.mdl", "--text", job.data / "text"
    scored = run_cli("score", job.root / "decode", *words, "--json")
    assert scored.exit_code == 0 and len(yaml.safe_load(scored.stdout)["scales"]) > 1
    info = run_cli("info", job.run).stdout
    assert "cv utterances" in info
