"""What a path is."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import write_ali_dir, write_matrix, write_trans, write_transforms
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddnn.inspection import path as info
from ddnn.inspection.path import describe_path
from ddnn.kaldi.alignments import write_pdf_counts
from ddnn.kaldi.archive import write_int_vectors, write_matrices
from ddnn.runs.rows import PretrainRow
from ddnn.util.errors import DataError, UserError


def facts(path: Path) -> dict[str, Any]:
    """What `--json` shows; it must be JSON."""
    found = describe_path(path)
    shown = found.as_dict()
    assert shown.pop("path") == str(path)
    assert found.as_text().startswith(f"{path}: {found.kind}")
    return json.loads(json.dumps(shown))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Two matrices in a folder with a space: a.ark and a.scp."""
    folder = tmp_path / "my dät"
    folder.mkdir()
    items = [("utt1", np.ones((7, 3), np.float32)), ("utt2", np.ones((5, 3), np.float32))]
    write_matrices(folder / "a.ark", folder / "a.scp", items)
    return folder


def test_scp_and_archive(table: Path) -> None:
    assert facts(table / "a.scp") == {
        "kind": "scp",
        "entries": 2,
        "frames": 12,
        "dims": 3,
        "first_keys": ["utt1", "utt2"],
    }
    assert facts(table / "a.ark") == {
        "kind": "archive of matrices (FM)", "records": 2, "frames": 12, "dims": 3, "first_keys": ["utt1", "utt2"],
    }  # fmt: skip
    (table / "a.ark.gz").write_bytes(gzip.compress((table / "a.ark").read_bytes()))
    assert facts(table / "a.ark.gz") == facts(table / "a.ark")


def test_text_for_people(table: Path) -> None:
    assert describe_path(table / "a.scp").as_text().splitlines() == [
        f"{table}/a.scp: scp",
        "  entries     2",
        "  frames      12",
        "  dims        3",
        "  first keys  utt1, utt2",
    ]


def test_different_dims_are_named(tmp_path: Path) -> None:
    write_matrices(tmp_path / "a.ark", tmp_path / "b.scp", [("a", np.ones((1, 3))), ("b", np.ones((1, 4)))])
    assert facts(tmp_path / "a.ark")["dims"] == "different: 3, 4"
    assert facts(tmp_path / "a.ark")["kind"] == "archive of matrices (DM)"


def test_shell_commands_are_counted_and_not_run(table: Path) -> None:
    ran = table / "ran"
    with (table / "a.scp").open("a") as scp:
        scp.write(f"utt3 touch '{ran}' |\n")
    found = facts(table / "a.scp")
    assert (found["entries"], found["shell_commands"], found["dims"]) == (3, "1, not run", 3)
    (table / "only.scp").write_text(f"utt3 touch '{ran}' |\n")
    assert facts(table / "only.scp") == {
        "kind": "scp", "entries": 1, "shell_commands": "1, not run", "first_keys": ["utt3"],
    }  # fmt: skip
    assert not ran.exists()


def test_long_scp_is_sampled(table: Path) -> None:
    line = (table / "a.scp").read_text().splitlines()[0].split(" ", 1)[1]
    (table / "long.scp").write_text("".join(f"u{n:05d} {line}\n" for n in range(2500)))
    found = facts(table / "long.scp")
    assert (found["entries"], found["frames"]) == (2500, "about 17500, from 834 entries")


def test_long_archive_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_matrices(
        tmp_path / "a.ark", tmp_path / "b.scp", ((f"u{n}", np.ones((10, 10), np.float32)) for n in range(100))
    )
    monkeypatch.setattr(info, "NUM_SAMPLES", 11)
    found = facts(tmp_path / "a.ark")
    assert (found["records"], found["frames"]) == ("at least 11", "at least 110")


def test_integer_archives(tmp_path: Path) -> None:
    items = [("utt1", np.array([3, 1])), ("utt2", np.array([5])), ("utt3", np.array([], np.int32))]
    expected = {"records": 3, "frames": 3, "largest_id": 5, "first_keys": ["utt1", "utt2", "utt3"]}
    write_int_vectors(tmp_path / "a.ark", items)
    assert facts(tmp_path / "a.ark") == {"kind": "archive of integer vectors (binary)", **expected}
    (tmp_path / "a.txt").write_text("utt1 3 1\nutt2 5\nutt3\n")
    assert facts(tmp_path / "a.txt") == {"kind": "archive of integer vectors (text)", **expected}


def test_text_matrices_and_counts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("utt1  [\n  1 2\n  3 4 ]\n")
    assert facts(tmp_path / "a.txt") == {
        "kind": "archive of matrices (text)", "records": 1, "frames": 2, "dims": 2, "first_keys": ["utt1"],
    }  # fmt: skip
    (tmp_path / "x.counts").write_text(" [ 5 9 0 ]\n")
    kind = "Kaldi vector of pdf counts"
    for counts, frames, added in (
        ("5 9 0", 14, {}),
        ("5.5 9 0", 14.5, {}),
        ("5.5 9.5 0.5", 14, {"added": "half a frame for each pdf"}),
    ):
        (tmp_path / "x.counts").write_text(f" [ {counts} ]\n")
        assert facts(tmp_path / "x.counts") == {"kind": kind, "pdfs": 3, "frames": frames, **added}
        assert ("14.0" in describe_path(tmp_path / "x.counts").as_text()) is False


def test_data_dir(table: Path) -> None:
    (table / "a.scp").rename(table / "feats.scp")
    expected = {"utterances": 2, "speakers": "no utt2spk", "cmvn": "no cmvn.scp", "frames": 12, "dims": 3}
    assert facts(table) == {"kind": "Kaldi data dir", **expected, "first_keys": ["utt1", "utt2"]}
    (table / "utt2spk").write_text("utt1 anna\nutt2 anna\n")
    assert facts(table)["speakers"] == 1


def epoch_row(epoch: int, loss: float | None, accuracy: float | None, accepted: bool = True) -> str:
    row = {"type": "epoch", "split": "cv", "epoch": epoch, "loss": loss, "frame_accuracy": accuracy}
    return json.dumps({**row, "accepted": accepted}) + "\n"


def test_run_dir(tmp_path: Path) -> None:
    rows = [(0, 5.5, 0.1, True), (1, 2.5, 0.5, True), (2, 2.25, 0.6, True), (3, 2.75, 0.4, False)]
    (tmp_path / "recipe.yaml").write_text("seed: 1\n")
    found = facts(tmp_path)
    assert (found["kind"], found["state"]) == ("ddnn run dir", "unknown")
    assert re.search(r"^ *epochs +0$", found["status"], re.MULTILINE)
    (tmp_path / "metrics.jsonl").write_text("".join(epoch_row(*row) for row in rows))
    shown = facts(tmp_path)["status"]
    assert re.search(r"^ *epochs +3$", shown, re.MULTILINE)
    assert "epoch 3: cross-validation loss 2.7500, frame accuracy 40.00 %, rejected" in shown
    assert re.search("model so far +epoch 2: cross-validation loss 2.2500, frame accuracy 60.00 %", shown)
    assert "resume  " not in shown  # it has no checkpoint, and would lose its epochs
    (tmp_path / "metrics.jsonl").write_text('{"type": "epoch", "epoch": 1')
    assert "line 1 is not a metrics row" in facts(tmp_path)["status"]
    with pytest.raises(DataError, match="line 1 is not a metrics row"):
        describe_path(tmp_path / "metrics.jsonl")


def test_what_a_training_starts_from_and_which_layers_are_frozen(tmp_path: Path) -> None:
    data = "data: {train: /gone, alignments: /gone}\n"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(data)
    assert {"started_from", "frozen_layers"}.isdisjoint(facts(tmp_path) | facts(recipe))
    recipe.write_text(f"{data}init: {{model: /exp/one}}\nmodel: {{freeze: [0, 1], hidden_layers: 2}}\n")
    for found in (facts(tmp_path), facts(recipe)):
        assert (found["started_from"], found["frozen_layers"]) == ("/exp/one", ["0", "1"])
    recipe.write_text(f"{data}init: rbm\npretrain: {{dbn: /exp/dbn}}\n")
    assert facts(tmp_path)["started_from"] == "/exp/dbn"


def test_metrics_of_a_training_that_went_wrong(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(epoch_row(1, None, None, accepted=False))
    found = facts(tmp_path / "metrics.jsonl")
    assert found["last"] == "epoch 1: cross-validation loss not finite, rejected" and "last_accepted" not in found


def test_model(tmp_path: Path) -> None:
    import torch

    from ddnn.data.dataset import InputTransform, splice_only
    from ddnn.data.feature_reader import FeatureConfig
    from ddnn.nn.acoustic_model import AcousticModel, save_model
    from ddnn.nn.layers import mlp_layers
    from ddnn.nn.network import Network

    model = AcousticModel(FeatureConfig("mean", 2), splice_only(4, 1), Network(mlp_layers(12, 2, 8, 5, "tanh")))
    save_model(tmp_path / "final.safetensors", model)
    expected = {"network": "12-8-8-5", "layers": "tanh 8, tanh 8, softmax 5", "pdfs": 5, "cmvn": "mean", "deltas": 2}
    expected |= {"parameters": 12 * 8 + 8 + 8 * 8 + 8 + 8 * 5 + 5, "splice": "1+1+1", "normalized": "no"}
    assert facts(tmp_path / "final.safetensors") == {"kind": "ddnn model", **expected}
    found = facts(tmp_path)
    assert (found["kind"], found["state"]) == ("ddnn run dir", "finished")
    assert {key: found[key] for key in expected} == expected
    assert found["pdf_counts"] == "no: ddnn decode-prep needs them"
    write_pdf_counts(tmp_path / "ali_train_pdf.counts", np.ones(5))
    assert facts(tmp_path)["pdf_counts"] == "yes"
    transform = InputTransform((-3, 0, 2), 4, shift=torch.zeros(12), scale=torch.ones(12))
    layers = mlp_layers(12, 2, 8, 5, "sigmoid")[:-1]
    for name in ("dbn", "rbm1", "final"):
        save_model(tmp_path / f"{name}.safetensors", AcousticModel(FeatureConfig(), transform, Network(layers)))
        found = facts(tmp_path / f"{name}.safetensors")
        assert (found["normalized"], found["splice"]) == ("yes", "frames -3, 0, 2")
        assert ("pdfs" in found) == (name == "final"), "an imported network may lack its softmax, a DBN has no pdfs"
    (tmp_path / "dbn.safetensors").unlink()
    (tmp_path / "rbm1.safetensors").unlink()
    (tmp_path / "final.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(DataError, match="not a ddnn model"):
        describe_path(tmp_path)


def test_recipe(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("data: {train: /gone/train, alignments: /gone/ali}\nmodel: {hidden_layers: 2}\n")
    found = facts(tmp_path / "r.yaml")
    assert (found["kind"], found["train"], found["model"]) == ("recipe", "/gone/train", "2 x 2048 sigmoid")


@pytest.mark.parametrize(
    ("name", "kind", "some"),
    [
        (
            "recipes/an4/corpus/train",
            "Kaldi data dir",
            {"utterances": 948, "speakers": 74, "frames": 253682, "dims": 40},
        ),
        (
            "recipes/an4/corpus/ali",
            "Kaldi alignment dir",
            {"jobs": 2, "pdfs": 616, "utterances": 948, "frames": 253682},
        ),
        (
            "recipes/an4/corpus/ali/final.mdl",
            "Kaldi acoustic model (its transition model)",
            {"pdfs": 616, "transition_ids": 4860},
        ),
        ("recipes/an4/corpus/graph", "Kaldi graph dir", {"states": 38708, "arcs": 96162, "words": 107}),
        ("recipes/an4/corpus/graph/HCLG.fst", "OpenFst graph", {"states": 38708, "arcs": 96162}),
        ("an4/kaldi_nnet1/rbm_ce.nnet", "Kaldi nnet1 network", {"input_dim": 440, "output_dim": 616}),
        ("golden/conv/tokens/bare.txt.nnet", "Kaldi nnet1 network", {"input_dim": 72, "output_dim": 10}),
        (
            "golden/conv/parallel/init.nnet",
            "Kaldi nnet1 network",
            {
                "components": [
                    "copy 90-90",
                    "parallel 90-14 (convolutional 72-24, maxpooling 24-8, rescale 8-8, addshift 8-8, sigmoid 8-8 | "
                    "affinetransform 18-6, sigmoid 6-6, affinetransform 6-6, sigmoid 6-6)",
                    "affinetransform 14-10",
                    "softmax 10-10",
                ]
            },
        ),
        ("golden/nnet1/init.txt.nnet", "Kaldi nnet1 network", {"input_dim": 30, "output_dim": 9}),
        ("an4/kaldi_nnet1/ali_train_pdf.counts", "Kaldi vector of pdf counts", {"pdfs": 616}),
        (
            "an4/kaldi_nnet1/loglikes_first3.ark",
            "archive of matrices (FM)",
            {"records": 3, "frames": 1137, "dims": 616},
        ),
        ("golden/tables/compressed_7.ark", "archive of matrices (CM3)", {"records": 3, "frames": 108, "dims": 6}),
        ("golden/tables/an4_all_pdfs.txt.gz", "archive of integer vectors (text)", {"records": 948, "largest_id": 615}),
    ],
)
def test_what_kaldi_wrote(from_kaldi: Callable[[str], Path], name: str, kind: str, some: dict[str, Any]) -> None:
    found = facts(from_kaldi(name))
    assert found["kind"] == kind
    assert {key: found[key] for key in some} == some


def test_large_alignment_dirs_and_graphs_are_not_read_whole(an4: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "MAX_SCAN_BYTES", 10_000)
    found = facts(an4 / "ali")
    assert "utterances" not in found
    assert found["first_keys"] == ["fash-an251-fash-b", "fash-an253-fash-b", "fash-an254-fash-b"]
    assert facts(an4 / "graph/HCLG.fst")["bytes"] == "2312817, too many to scan"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("loglikes", "log-likelihoods for a Kaldi decoder"),
        ("posteriors", "posteriors or log-posteriors"),
        ("activations", "activations of a layer"),
    ],
)
def test_what_decode_prep_wrote(table: Path, name: str, kind: str) -> None:
    (table / "a.scp").rename(table / f"{name}.scp")
    assert facts(table) == {"kind": kind, "entries": 2, "frames": 12, "dims": 3, "first_keys": ["utt1", "utt2"]}


def test_what_score_wrote(tmp_path: Path) -> None:
    score = {"best": 0.1, "best_word_insertion_penalty": 0.5, "reference": "ab" * 32, "wer": 5.82}
    expected = {"kind": "words and word error rates of ddnn score", "wer": 5.82}
    expected |= {"acoustic_scale": 0.1, "word_insertion_penalty": 0.5}
    (tmp_path / "score.json").write_text(json.dumps(score))
    assert facts(tmp_path) == expected
    (tmp_path / "text").write_text("utt1 yes no\nutt2 yes\n")
    words = {"utterances": 2, "words": 3, "different_words": 2, "first_keys": ["utt1", "utt2"]}
    assert facts(tmp_path) == expected | words
    (tmp_path / "score.json").write_text(json.dumps({**score, "wer": "\x1b[31m"}))
    assert facts(tmp_path)["wer"] == "unknown"
    for damaged in ("{", "[]", '"x"', json.dumps({**score, "best": None})):
        (tmp_path / "score.json").write_text(damaged)
        with pytest.raises(DataError, match="expected the JSON of a scoring"):
            describe_path(tmp_path)


def test_nothing_known(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("anna says hello\n")
    for path, said in ((tmp_path / "x", "scp,"), (tmp_path, "Kaldi data dir")):
        with pytest.raises(UserError, match="unrecognized") as caught:
            describe_path(path)
        assert caught.value.location == str(path)
        assert said in str(caught.value.hint)
    with pytest.raises(DataError, match="the file does not exist"):
        describe_path(tmp_path / "nix")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="is no regular file"):
        describe_path(tmp_path / "pipe")


def test_damaged_files_are_not_described(table: Path) -> None:
    whole = (table / "a.ark").read_bytes()
    (table / "cut.ark").write_bytes(whole[:-5])
    with pytest.raises(DataError, match="cut short"):
        describe_path(table / "cut.ark")
    (table / "cut.ark.gz").write_bytes(gzip.compress(whole)[:-12])
    with pytest.raises(DataError, match="gzip"):
        describe_path(table / "cut.ark.gz")
    (table / "empty").touch()
    with pytest.raises(DataError, match="empty"):
        describe_path(table / "empty")


KNOWN = [b"<Nnet>", b"<TransitionModel>", b"FM ", b"[ 1 2"]
STARTS = [
    b"",
    b"u ",
    b"u \0B",
    b"u \0BFM ",
    b"u \0BCM2 ",
    b"u \0B\x04",
    b"u [ 1 2",
    b"u 1 2",
    b"u\n",
    b"\xd6\xfd\xb2\x7e",
]
STARTS += [b"\x1f\x8b\x08", b"\x1f\x8b\x08\0\0\0\0\0\0\3", b'{"split": "cv"}', *KNOWN, *(b"\0B" + k for k in KNOWN)]
NAMES = ["a", "a.gz", "a.scp", "a.jsonl", "a.yaml", "a.safetensors"]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(STARTS), st.binary(max_size=80), st.sampled_from(NAMES))
def test_any_bytes_are_described_or_refused(tmp_path: Path, start: bytes, rest: bytes, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(start + rest)
    try:
        found = describe_path(path)
    except UserError as error:
        assert str(path) in str(error) or error.location is not None
    else:
        json.dumps(found.as_dict())


def test_metrics_of_a_pretraining(tmp_path: Path) -> None:
    rows = [
        PretrainRow(rbm=1, epoch=n, reconstruction_error=2.0, mean_reconstruction_error=1.0 + 0.5 * n) for n in (1, 2)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(row.model_dump_json() + "\n" for row in rows))
    (tmp_path / "rbm1.safetensors").touch()
    assert describe_path(tmp_path).kind == "ddnn pretraining dir"
    shown = facts(tmp_path / "metrics.jsonl")["rbm_1"]
    assert shown.startswith("rbm 1 epoch  2 reconstruction error 2  (mean over epochs 2)")


@pytest.mark.parametrize("value", [None, "x", [1], 1.5])
def test_odd_metrics_of_a_pretraining_are_no_bug(tmp_path: Path, value: object) -> None:
    row = {"type": "pretrain", "rbm": 1, "epoch": 1, "mean_reconstruction_error": None}
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(row))
    assert "nan" in facts(path)["rbm_1"]
    path.write_text(json.dumps({**row, "rbm": value}))
    with pytest.raises(DataError, match="not a metrics row"):
        describe_path(path)


def test_tables_of_a_data_dir_and_settings(tmp_path: Path) -> None:
    contents = {
        "utt2spk": "u1 a\nu2 a\nu3 b\n",
        "spk2utt": "a u1 u2\nb u3\n",
        "text": "u1 yes no\nu2\nu3 yes\n",
        "words.txt": "<eps> 0\nyes 1\nno 7\n",
        "segments": "u1 r1 0.0 1.5\n",
        "wav.scp": "r1 touch ran |\n",
        "splice_opts": "--left-context=3 --right-context=3\n",
        "train.log": "first\nlast one\n",
    }
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    found = {name: facts(tmp_path / name) for name in contents}
    assert found["utt2spk"] | {"kind": ""} == {
        "kind": "",
        "utterances": 3,
        "speakers": 2,
        "first_keys": ["u1", "u2", "u3"],
    }
    assert found["spk2utt"] == {"kind": "spk2utt of a Kaldi data dir"}
    text = found["text"]
    assert (text["utterances"], text["words"], text["different_words"]) == (3, 3, 2)
    assert (found["words.txt"]["symbols"], found["words.txt"]["largest_id"]) == (3, 7)
    assert found["segments"] == found["wav.scp"] == {"kind": "table of a Kaldi data dir"}
    assert not (tmp_path / "ran").exists()
    assert found["splice_opts"]["last"] == contents["splice_opts"].strip()
    assert (found["train.log"]["lines"], found["train.log"]["last"]) == (2, "last one")


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"\0BContextDependency \x04\3\0\0\0", "Kaldi phonetic decision tree"),
        (b"ContextDependency 3 1 ToPdf CE 7 \n", "Kaldi phonetic decision tree"),
        (b"<Topology>\n<TopologyEntry>\n", "Kaldi HMM topology"),
    ],
)
def test_what_ddnn_does_not_read_is_named(tmp_path: Path, content: bytes, kind: str) -> None:
    (tmp_path / "x").write_bytes(content)
    assert facts(tmp_path / "x") == {"kind": kind}
    assert describe_path(tmp_path / "x").as_text() == f"{tmp_path}/x: {kind}"


def test_dirs_of_kaldi_and_of_runs(tmp_path: Path, golden: Path) -> None:
    nnet, lattices, runs = (tmp_path / name for name in ("nnet", "decode", "exp"))
    nnet.mkdir()
    network = next(iter(sorted((golden / "nnet1").glob("*.nnet"))))
    (nnet / "final.nnet").write_bytes(network.read_bytes())
    assert facts(nnet)["kind"] == "Kaldi nnet1 dir" and facts(nnet)["networks"][0].startswith("final.nnet ")
    lattices.mkdir()
    record = b"utt1 \0B\xd6\xfd\xb2\x7e\6\0\0\0vector\x10\0\0\0compactlattice44"
    (lattices / "lat.1.gz").write_bytes(gzip.compress(record))
    assert facts(lattices) == {"kind": "Kaldi decoding dir (lattices)"}
    found = facts(lattices / "lat.1.gz")
    assert found == {"kind": "archive of Kaldi lattices (compactlattice44)"}
    for name in ("a", "b_c"):
        (runs / name).mkdir(parents=True)
        (runs / name / "recipe.yaml").touch()
    assert facts(runs) == {"kind": "folder of ddnn run dirs", "number": 2, "runs": ["a (unknown)", "b_c (unknown)"]}


def test_matrices_and_vectors_without_a_key(tmp_path: Path) -> None:
    path, values = tmp_path / "x", np.arange(6, dtype=np.float32).reshape(2, 3)
    write_matrix(path, values)
    assert path.read_bytes().startswith(b"\0BFM ")
    expected = {"kind": "Kaldi matrix", "rows": 2, "columns": 3}
    assert facts(path) == expected
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="not a Kaldi matrix"):
        describe_path(path)
    path.write_text(" [\n  1 2 3\n  4 5 6 ]\n")
    assert facts(path) == expected
    path.write_bytes(b"\0BFV \4\2\0\0\0" + np.array([3, 4], "<f4").tobytes())
    assert facts(path) == {"kind": "Kaldi vector"}
    counts = path.rename(tmp_path / "ali_train_pdf.counts")
    assert facts(counts) == {"kind": "Kaldi vector of pdf counts", "pdfs": 2, "frames": 7.0}
    path.write_text(" [ -1.5 2 3 ]\n")
    assert facts(path) == {"kind": "Kaldi vector"}
    counts.write_text(" [ nan 2 3 ]\n")
    with pytest.raises(DataError, match="expected a count of frames, found nan"):
        describe_path(counts)


def test_transforms_of_a_system(tmp_path: Path) -> None:
    system = write_ali_dir(tmp_path / "tri4_ali", {"utt1": np.zeros(3, np.int32)})
    write_transforms(system, ["anna", "bert", "cleo"], jobs=1)
    kind, said = "Kaldi alignment dir", "LDA+MLLT 5 x 16 over 1+1+2 frames, fMLLR of 3 speakers or utterances"
    assert (facts(system)["kind"], facts(system)["transforms"]) == (kind, said)
    assert facts(system / "trans.1") == {
        "kind": "archive of matrices (FM)", "records": 3, "rows": 15, "dims": 6, "first_keys": ["anna", "bert", "cleo"],
    }  # fmt: skip
    assert facts(system / "final.mat") == {"kind": "Kaldi matrix", "rows": 5, "columns": 16}
    lattices = system / "decode"
    write_trans(lattices, ["utt1"], 5)
    record = b"utt1 \0B\xd6\xfd\xb2\x7e\6\0\0\0vector\x10\0\0\0compactlattice44"
    (lattices / "lat.1.gz").write_bytes(gzip.compress(record))
    assert facts(lattices)["transforms"] == "LDA+MLLT 5 x 16 over 1+1+2 frames, fMLLR of 1 speakers or utterances"
    (lattices / "lat.1.gz").unlink()
    assert facts(lattices)["kind"] == "Kaldi dir of transforms"
    (system / "trans.1").write_bytes((system / "trans.1").read_bytes()[:-1])
    assert facts(system)["transforms"].startswith("not readable: utterance cleo: cut short") and facts(system)["pdfs"]
    (system / "splice_opts").write_text("--nonsense=1\n")
    assert facts(system)["transforms"].startswith("not readable: unknown option '--nonsense=1'")


def test_posteriors_of_kaldi(tmp_path: Path) -> None:
    """Kaldi `hmm/posterior.cc`: pdf and weight of each frame. In binary also frames without any may come first."""
    expected = {"kind": "archive of Kaldi posteriors, not read by ddnn"}
    (tmp_path / "post").write_text("utt1 [ 3 0.5 4 0.5 ] [ 7 1 ] \nutt2 [ 1 1 ] [ ] \n")
    assert facts(tmp_path / "post") == expected

    def number(value: int) -> bytes:
        return b"\4" + value.to_bytes(4, "little")

    pair = number(3) + b"\4" + np.float32(0.5).tobytes()
    (tmp_path / "post").write_bytes(b"utt1 \0B" + number(3) + number(0) + number(1) + pair + number(1) + pair)
    assert facts(tmp_path / "post") == expected
    write_int_vectors(tmp_path / "ali", [("utt1", np.array([0, 1, 3, 100_000]))])
    assert facts(tmp_path / "ali")["kind"] == "archive of integer vectors (binary)"
