"""Models, nnet1 files and log-likelihoods that are damaged or do not fit, as a user meets them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from corpora import write_graph_dir, write_model
from jobs import RunCli, assert_refused, files_in, make_job

from ddnn.kaldi.archive import write_matrices

Damage = Callable[[Path], object]
NOT_NNET1 = "not a Kaldi nnet1 network: expected"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run, exported and with log-likelihoods, a graph and its model: everything under one folder."""
    from ddnn.decoding.prepare import export_nnet1, prepare_decoding
    from ddnn.recipe.load import load_recipe
    from ddnn.training.job import run_training

    job = make_job(tmp_path_factory.mktemp("whole"))
    run_training(load_recipe(job.recipe), job.run, "cpu")
    export_nnet1(job.run, job.root / "nnet")
    prepare_decoding(job.run, job.data, job.root / "decode", "cpu")
    return job.root


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage; the scp in it names the archive in it."""
    copy = tmp_path / "models"
    shutil.copytree(whole, copy)
    scp = copy / "decode/loglikes.scp"
    scp.write_text(scp.read_text().replace(str(whole), str(copy)))
    return copy


def cut(path: Path, size: int) -> None:
    with path.open("r+b") as handle:
        handle.truncate(size)


MODELS: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "no model": (lambda run: (run / "final.safetensors").unlink(), ("has not finished", "no final.safetensors")),
    "empty model": (lambda run: cut(run / "final.safetensors", 0), ("final.safetensors", "not a ddnn model")),
    "cut model": (lambda run: cut(run / "final.safetensors", 700), ("final.safetensors", "not a ddnn model")),
    "not a model": (
        lambda run: (run / "final.safetensors").write_text("no " * 99),
        ("final.safetensors", "not a ddnn"),
    ),
    "no run dir": (shutil.rmtree, ("no such run dir",)),
}


@pytest.mark.parametrize(("damage", "said"), list(MODELS.values()), ids=list(MODELS))
def test_run_dirs(folder: Path, run_cli: RunCli, damage: Damage, said: tuple[str, ...]) -> None:
    run, out = folder / "run", folder / "out"
    damage(run)
    data = ["--data", folder / "data"]
    assert_refused(run_cli("decode-prep", run, *data, "--out", out), str(run), *said)
    assert_refused(run_cli("evaluate", run, *data, "--alignments", folder / "ali"), str(run), *said)
    assert_refused(run_cli("export", run, "--out", out), str(run), *said)
    assert not out.exists()


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (None, ("there is no ali_train_pdf.counts",)),
        (" [ 1 2 3 4 ]\n", ("has 4 pdfs, the model 3",)),
        (" [ 1 -2 3 ]\n", ("pdf-id 1: expected a count of frames, found -2",)),
        (" [ 1 2 3\n", ("cut short: no ']' ends pdf counts",)),
    ],
)
def test_pdf_counts(folder: Path, run_cli: RunCli, counts: str | None, said: tuple[str, ...]) -> None:
    path, out = folder / "run/ali_train_pdf.counts", folder / "out"
    path.unlink() if counts is None else path.write_text(counts)
    result = run_cli("decode-prep", folder / "run", "--data", folder / "data", "--out", out)
    assert_refused(result, "ali_train_pdf.counts", *said)
    assert not out.exists()


def convolutional(old: str, new: str) -> Damage:
    """Puts Kaldi's convolutional network there, with a change."""
    text = (Path(__file__).parent / "golden/conv/conv_max/init.txt.nnet").read_text()
    assert old in text
    return lambda path: path.write_text(text.replace(old, new, 1))


NESTED = "<ParallelComponent> 72 72 <NestedNnetCount> 1 <NestedNnet> 1 <Nnet> "
NNET1: dict[str, tuple[str, Damage, tuple[str, ...]]] = {
    "missing": ("final.nnet", Path.unlink, ("cannot read", "No such file")),
    "empty": ("final.nnet", lambda path: cut(path, 0), ("the file is empty",)),
    "text": ("final.nnet", lambda path: path.write_text("a network"), (NOT_NNET1, "<Nnet>", "found 'a'")),
    "cut": ("final.nnet", lambda path: cut(path, 200), (NOT_NNET1, "it has 200 bytes")),
    "no transform": ("feature_transform.nnet", Path.unlink, ("cannot read", "No such file")),
    "cut transform": ("feature_transform.nnet", lambda path: cut(path, 60), (NOT_NNET1, "it has 60 bytes")),
    "not its transform": (
        "feature_transform.nnet",
        lambda path: path.write_text(
            "<Nnet>\n<Splice> 20 4\n[ -2 -1 0 1 2 ]\n<!EndOfComponent>\n</Nnet>\n"
        ),
        ("12", "20"),
    ),
    "patches that do not fit": (
        "final.nnet",
        convolutional("<PatchStep> 1", "<PatchStep> 2"),
        ("<ConvolutionalComponent> (component 1): patches of 3 at steps of 2 do not fit into 8 exactly",),
    ),
    "pools that do not fit": (
        "final.nnet",
        convolutional("<PoolStride> 6", "<PoolStride> 5"),
        ("<MaxPoolingComponent> (component 2): PoolStride 5 does not divide the input dim 36",),
    ),
    "a filter of NaN": (
        "final.nnet",
        convolutional("-0.04411672", "nan"),
        ("component 1 (ConvolutionalComponent): filters[0, 1] is nan, expected a finite value",),
    ),
    "unknown component": (
        "final.nnet",
        convolutional("<Sigmoid>", "<LstmProjected>"),
        (NOT_NNET1, "component 3 to be one that is supported", "found '<LstmProjected>'"),
    ),
    "networks in networks": (
        "final.nnet",
        convolutional("<ConvolutionalComponent>", NESTED * 1000 + "<ConvolutionalComponent>"),
        (NOT_NNET1, "networks nested at most 8 deep"),
    ),
    "counts of another": ("counts", lambda path: path.write_text(" [ 1 2 ]\n"), ("2 pdf counts found", "3 pdfs")),
}  # fmt: skip


@pytest.mark.parametrize(("name", "damage", "said"), list(NNET1.values()), ids=list(NNET1))
def test_import_nnet1(folder: Path, run_cli: RunCli, name: str, damage: Damage, said: tuple[str, ...]) -> None:
    nnet, out = folder / "nnet", folder / "out"
    shutil.copyfile(folder / "run/ali_train_pdf.counts", nnet / "counts")
    kept = (nnet / name).read_bytes()
    arguments = ["import-nnet1", nnet / "final.nnet", "--feature-transform", nnet / "feature_transform.nnet"]
    arguments += ["--pdf-counts", nnet / "counts", "--out", out]
    damage(nnet / name)
    location = "final.nnet" if name == "feature_transform.nnet" and "12" in said else name
    assert_refused(run_cli(*arguments), location, *said)
    assert not out.exists()
    (nnet / name).write_bytes(kept)
    assert run_cli(*arguments).exit_code == 0
    assert files_in(out) == {"final.safetensors", "ali_train_pdf.counts"}


U = "spk1-utt005"


def change_matrix(change: Callable[[np.ndarray], np.ndarray]) -> Damage:
    def damage(folder: Path) -> None:
        from ddnn.kaldi.archive import iterate_matrices

        matrices = list(iterate_matrices(folder / "decode/loglikes.ark"))
        changed = [(name, change(matrix.copy()) if name == U else matrix) for name, matrix in matrices]
        write_matrices(folder / "decode/loglikes.ark", folder / "decode/loglikes.scp", changed)

    return damage


def with_value(value: float) -> Damage:
    def put(matrix: np.ndarray) -> np.ndarray:
        matrix[7, 2] = value
        return matrix

    return change_matrix(put)


def add_line(folder: Path) -> None:
    scp = folder / "decode/loglikes.scp"
    scp.write_text(scp.read_text() + scp.read_text().splitlines()[3] + "\n")


def lose_line(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))


SCORE: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "no scp": (lambda f: (f / "decode/loglikes.scp").unlink(), ("loglikes.scp", "no log-likelihoods")),
    "empty scp": (lambda f: cut(f / "decode/loglikes.scp", 0), ("loglikes.scp", "is empty")),
    "no archive": (lambda f: (f / "decode/loglikes.ark").unlink(), ("spk0-utt000", "loglikes.ark", "does not exist")),
    "cut archive": (lambda f: cut(f / "decode/loglikes.ark", 5000), ("spk", "loglikes.ark", "at most", "remain")),
    "utterance twice": (add_line, ("loglikes.scp", "occurs twice, in lines 4 and 25")),
    "utterance too few": (lambda f: lose_line(f / "decode/loglikes.scp"), ("have no log-likelihoods (spk0-utt000)",)),
    "reference too short": (lambda f: lose_line(f / "data/text"), ("have no reference (spk0-utt000)", "loglikes.scp")),
    "no reference": (lambda f: (f / "data/text").unlink(), ("text", "does not exist")),
    "NaN": (with_value(np.nan), (U, "pdf 2 in frame 7 is nan, expected a finite number")),
    "Inf": (with_value(np.inf), (U, "pdf 2 in frame 7 is inf, expected a finite number")),
    "fewer pdfs": (change_matrix(lambda x: x[:, :2]), (U, "shape 20x2", "expected at least one frame and 3 pdfs")),
    "no frames": (change_matrix(lambda x: x[:0]), (U, "shape 0x0", "expected at least one frame and 3 pdfs")),
    "not a final.mdl": (
        lambda f: (f / "ali/final.mdl").write_bytes((f / "data/feats.ark").read_bytes()),
        ("final.mdl", "not a Kaldi transition model: expected <TransitionModel>", "found"),
    ),
    "cut final.mdl": (
        lambda f: cut(f / "ali/final.mdl", 100),
        ("final.mdl", "not a Kaldi transition model: cut short"),
    ),
    "no graph": (lambda f: shutil.rmtree(f / "graph"), ("HCLG.fst", "No such file")),
    "cut graph": (lambda f: cut(f / "graph/HCLG.fst", 150), ("HCLG.fst",)),
    "no words": (lambda f: (f / "graph/words.txt").write_text("<eps> 0\na 1\n"), ("words.txt", "word id 2")),
}


@pytest.mark.parametrize(("damage", "said"), list(SCORE.values()), ids=list(SCORE))
def test_score(folder: Path, run_cli: RunCli, damage: Damage, said: tuple[str, ...]) -> None:
    pytest.importorskip("kaldi_decoder")
    pytest.importorskip("kaldialign")
    arguments = ["score", folder / "decode", "--graph", folder / "graph", "--model", folder / "ali/final.mdl"]
    arguments += ["--text", folder / "data/text", "--acoustic-scale", "0.1"]
    before = (folder / "decode/loglikes.ark").read_bytes(), (folder / "decode/loglikes.scp").read_text()
    text = (folder / "data/text").read_text()
    damage(folder)
    result = run_cli(*arguments)
    assert_refused(result, *said)
    assert result.stdout == ""
    (folder / "decode/loglikes.ark").write_bytes(before[0])
    (folder / "decode/loglikes.scp").write_text(before[1])
    (folder / "data/text").write_text(text)
    write_model(folder / "ali/final.mdl")
    write_graph_dir(folder / "graph")
    assert run_cli(*arguments).exit_code == 0
