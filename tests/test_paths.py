"""Paths and utterance ids with spaces and letters of every script, through everything that a user does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from corpora import write_ali_dir, write_data_dir, write_graph_dir, write_recipe
from jobs import RunCli, assert_refused, assert_trains, files_in, make_job

from ddnn.kaldi.archive import read_scp
from ddnn.recipe.load import load_recipe

ROOT = "Größe & 'Ähre' #1/日本 語: \"[0:3]\" $x"


def test_the_whole_chain(tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / ROOT
    plain = make_job(tmp_path / "plain")
    speaker = {name: name.replace("spk", "Sprécher_話者").replace("utt", "ütt:") for name in plain.names}
    features = {speaker[name]: matrix for name, matrix in plain.features.items()}
    labels = {speaker[name]: pdfs for name, pdfs in plain.labels.items()}
    data, ali = write_data_dir(root / "train dir", features), write_ali_dir(root / "ali dir", labels)
    (data / "text").write_text("".join(f"{name} a b\n" for name in sorted(features)), encoding="utf-8")
    graph = write_graph_dir(root / "graph ü")
    recipe = write_recipe(root / "Rezept é.yaml", Path("train dir"), Path("ali dir"))
    run, decode, nnet, imported = (root / f"{name} ñ ." for name in ("run", "decode", "nnet", "imported"))

    def succeeds(*arguments: object) -> str:
        result = run_cli(*arguments)
        assert result.exit_code == 0, result.stderr
        return str(result.stdout)

    succeeds("train", recipe, "--run-dir", run, "--device", "cpu")
    assert load_recipe(run / "recipe.yaml").data.train == data
    succeeds("decode-prep", run, "--data", data, "--out", decode)
    entries = read_scp(decode / "loglikes.scp")
    assert [entry.key for entry in entries] == sorted(features)
    assert {entry.path for entry in entries} == {decode / "loglikes.ark"}
    subprocess.run(["bash", "-n", decode / "decode.sh"], check=True)
    succeeds("export", run, "--out", nnet)
    transform, counts = nnet / "feature_transform.nnet", run / "ali_train_pdf.counts"
    succeeds(
        *("import-nnet1", nnet / "final.nnet", "--feature-transform", transform, "--pdf-counts", counts),
        *("--out", imported),
    )
    figures = [
        json.loads(succeeds("evaluate", place, "--data", data, "--alignments", ali, "--json"))
        for place in (run, imported)
    ]
    digests = [each.pop("model") for each in figures]  # of the files of the model, which say where it is from
    assert figures[0] == figures[1] and digests[0] != digests[1]
    assert figures[0]["frames"] == 480 and figures[0]["frame_accuracy"] > 0.7
    for place in (data, data / "feats.scp", ali, run, nnet / "final.nnet", decode / "loglikes.ark"):
        assert succeeds("info", place)
    pytest.importorskip("kaldi_decoder")
    scored = succeeds(
        *("score", decode, "--graph", graph, "--model", ali / "final.mdl", "--text", data / "text"),
        *("--acoustic-scale", "0.1", "--json", "--per-utterance"),
    )
    assert set(json.loads(scored)["alignments"]) == set(features)

    # The same from within, by relative names, and the same bits.
    monkeypatch.chdir(root)
    succeeds("train", "Rezept é.yaml", "--run-dir", "noch einer", "--device", "cpu")
    assert (root / "noch einer/final.safetensors").read_bytes() == (run / "final.safetensors").read_bytes()
    succeeds("decode-prep", "noch einer", "--data", "train dir", "--out", "noch eins")
    assert (root / "noch eins/loglikes.ark").read_bytes() == (decode / "loglikes.ark").read_bytes()
    assert files_in(root / "noch eins") == files_in(decode)


def test_names_that_are_not_utf8(tmp_path: Path, run_cli: RunCli) -> None:
    """Such a path cannot stand in an scp, which is UTF-8 here."""
    job, latin = make_job(tmp_path / "job"), Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    latin.mkdir()
    assert_trains(run_cli, job)
    arguments = ["decode-prep", job.run, "--data", job.data, "--device", "cpu", "--out"]
    assert_refused(run_cli(*arguments, latin / "decode"), "a name is not UTF-8", "caf")
    assert files_in(latin / "decode") == {
        "ali_train_pdf.counts",
        "decode.sh",
        "transition_model.sha256",
        "model.sha256",
    }
    assert run_cli(*arguments, job.root / "decode").exit_code == 0


def test_a_run_dir_whose_name_is_not_utf8(tmp_path: Path) -> None:
    """An old folder in Latin-1; under LC_ALL=C each umlaut too. metrics.jsonl has the command, escaped. In processes: a log with
    such a name cannot be sent by pytest-xdist."""
    job, run = make_job(tmp_path / "job"), os.fsencode(tmp_path) + b"/caf\xe9"
    command = [sys.executable, "-m", "ddnn.cli"]
    for words in (["train", job.recipe, "--device", "cpu", "--run-dir", run], ["status", run]):
        done = subprocess.run([*command, *words], capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode(errors="backslashreplace")
    start = json.loads(Path(os.fsdecode(run), "metrics.jsonl").read_text().splitlines()[0])
    assert r"caf\udce9" in start["command"]


def test_names_that_are_too_long(tmp_path: Path, run_cli: RunCli) -> None:
    job, long = make_job(tmp_path / "job"), "x" * 300
    assert_refused(run_cli("train", job.recipe, "--run-dir", long), "File name too long", long)
    assert_refused(run_cli("train", job.recipe, "--set", f"data.train={long}"), "data.train", "does not exist", long)
    assert_refused(run_cli("evaluate", long, "--data", job.data, "--alignments", job.ali), "File name too long", long)
