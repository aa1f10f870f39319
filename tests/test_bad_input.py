"""Bad input as a user meets it: exit code 2, one message that names file, utterance, value found and expected; nothing
half-written; and once the input is mended the same command works."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from corpora import write_data_dir, write_pdfs, write_recipe
from jobs import BEFORE_TRAINING, Job, RunCli, assert_refused, assert_trains, files_in, make_job

from ddnn.kaldi.archive import iterate_matrices, write_int_vectors
from ddnn.nn.acoustic_model import save_model
from ddnn.runs.run_dir import load_run

U = "spk1-utt005"
"""The utterance that is damaged: neither the first of the corpus nor the last."""

Damage = Callable[[Job], object]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job(tmp_path / "a job")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run dir of a training that went well."""
    from ddnn.recipe.load import load_recipe
    from ddnn.training.job import run_training

    job = make_job(tmp_path_factory.mktemp("trained"))
    run_training(load_recipe(job.recipe), job.run, "cpu")
    return job.run


def cut(path: Path, size: int) -> None:
    with path.open("r+b") as handle:
        handle.truncate(size)


def flip(path: Path, position: int) -> None:
    damaged = bytearray(path.read_bytes())
    damaged[position] ^= 0xFF
    path.write_bytes(damaged)


def cut_ark(behind: int) -> Damage:
    """The archive ends so many bytes behind the beginning of U's record: NUL, B, `FM `, two dims of 1 + 4, data."""
    return lambda job: cut(job.ark, job.offset(U) + behind)


def change_scp(change: Callable[[list[str]], list[str]]) -> Damage:
    return lambda job: job.scp.write_text("\n".join(change(job.scp.read_text().splitlines())) + "\n")


def change_line(change: Callable[[str], str]) -> Damage:
    return change_scp(lambda lines: [change(line) if line.startswith(U) else line for line in lines])


def change_features(change: Callable[[np.ndarray], np.ndarray]) -> Damage:
    return lambda job: job.write_features({**job.features, U: change(job.features[U].copy())})


def with_value(value: float) -> Damage:
    def put(features: np.ndarray) -> np.ndarray:
        features[7, 2] = value
        return features

    return change_features(put)


def change_ids(change: Callable[[dict[str, np.ndarray]], None]) -> Damage:
    """Transition-ids of the alignment, changed and written again."""

    def damage(job: Job) -> None:
        ids = {name: 2 * pdfs + 1 for name, pdfs in job.labels.items()}
        change(ids)
        write_int_vectors(job.ali / "ali.1.gz", sorted(ids.items()))

    return damage


def twice_aligned(job: Job) -> None:
    write_int_vectors(job.ali / "ali.2.gz", [(U, 2 * job.labels[U] + 1)])
    (job.ali / "num_jobs").write_text("2\n")


def rename_model(job: Job) -> None:
    (job.ali / "final.mdl").write_bytes(job.ark.read_bytes())


DATA: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "no scp": (lambda job: job.scp.unlink(), ("feats.scp", "does not exist")),
    "empty scp": (lambda job: job.scp.write_text(""), ("feats.scp", "is empty", "a line per utterance")),
    "no archive": (lambda job: job.ark.unlink(), ("spk0-utt000", "feats.ark", "does not exist", "feats.scp, line 1")),
    "empty archive": (lambda job: cut(job.ark, 0), ("spk0-utt000", "feats.ark", "the file is empty")),
    "cut before the record": (cut_ark(0), (U, "feats.ark", "is past the end of the file, which has")),
    "cut in the marker": (cut_ark(1), (U, "feats.ark", "expected Kaldi's binary marker")),
    "cut in the type": (cut_ark(4), (U, "feats.ark", "expected a matrix (FM, DM, CM, CM2 or CM3), found b'FM'")),
    "cut in the dims": (cut_ark(9), (U, "feats.ark", "the header of the matrix takes 10 bytes, 4 remain")),
    "cut before the data": (cut_ark(15), (U, "feats.ark", "20 rows and 4 columns, 320 bytes, at most 0 remain")),
    "cut in the data": (cut_ark(15 + 319), (U, "feats.ark", "20 rows and 4 columns, 320 bytes, at most 319 remain")),
    "offset past the end": (
        change_line(lambda line: line + "000"),
        (U, "feats.ark", "is past the end of the file, which has"),
    ),
    "offset into the middle": (
        change_line(lambda line: f"{line.rpartition(':')[0]}:{int(line.rpartition(':')[2]) + 40}"),
        (U, "feats.ark", "expected a Kaldi matrix", "found"),
    ),
    "range past the end": (
        change_line(lambda line: line + "[0:20]"),
        (U, "the range takes rows 0 to 20, the matrix at ", "has 20 rows"),
    ),
    "a command": (change_line(lambda line: f"{U} cat feats.ark |"), (U, "feats.scp, line", "is a shell command")),
    "NaN": (with_value(np.nan), (U, "feats.ark", "nan in row 7, column 2")),
    "Inf": (with_value(-np.inf), (U, "feats.ark", "-inf in row 7, column 2")),
    "other dims": (
        change_features(lambda x: x[:, :3]),
        (U, "feats.scp", "3 dims found, 4 expected as in the first utterance"),
    ),
    "a vector": (
        lambda job: job.ark.write_bytes(job.ark.read_bytes().replace(b"FM ", b"FV ", 1)),
        ("spk0-utt000", "feats.ark", "expected a matrix (FM, DM, CM, CM2 or CM3), found a vector"),
    ),
    "utterance twice": (
        change_scp(lambda lines: [*lines, next(line for line in lines if line.startswith(U))]),
        (U, "feats.scp", "occurs twice, in lines 8 and 25"),
    ),
    "utterance without speaker": (
        lambda job: (job.data / "utt2spk").write_text("spk0-utt000 spk0\n"),
        ("utt2spk", "23 of 24 utterances", "the first is spk0-utt004"),
    ),
    "all without frames": (
        lambda job: job.write_features({name: np.zeros((0, 0), np.float32) for name in job.names}),
        ("data", "24 of 24 utterances cannot be used", "spk0-utt000"),
    ),
}

ALIGNMENTS: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "no ali.1.gz": (lambda job: (job.ali / "ali.1.gz").unlink(), ("ali", "there is no ali.*.gz")),
    "empty gzip": (lambda job: cut(job.ali / "ali.1.gz", 0), ("ali.1.gz", "the file is empty")),
    "no gzip": (lambda job: write_pdfs(job.ali / "ali.1.gz", job.labels), ("ali.1.gz", "expected a gzip, found other")),
    "cut gzip": (lambda job: cut(job.ali / "ali.1.gz", 150), ("ali.1.gz", "damaged or cut gzip")),
    "gzip without its end": (
        lambda job: cut(job.ali / "ali.1.gz", (job.ali / "ali.1.gz").stat().st_size - 8),
        ("ali.1.gz", "damaged or cut gzip", "ended before the end-of-stream marker"),
    ),
    "damaged gzip": (lambda job: flip(job.ali / "ali.1.gz", 60), ("ali.1.gz",)),
    "wrong checksum": (lambda job: flip(job.ali / "ali.1.gz", -6), ("ali.1.gz", "damaged or cut gzip: CRC")),
    "cut before it was packed": (
        lambda job: (job.ali / "ali.1.gz").write_bytes(
            gzip.compress(gzip.decompress((job.ali / "ali.1.gz").read_bytes())[:-7])
        ),
        ("ali.1.gz", "spk3-utt023", "cut short: a vector of 20 integers takes 100 bytes, 93 remain"),
    ),
    "a job too few": (lambda job: (job.ali / "num_jobs").write_text("2\n"), ("ali", "ali.2.gz is missing: expected 2")),
    "utterance aligned twice": (twice_aligned, ("ali.2.gz", U, "occurs twice")),
    "transition-id too large": (
        change_ids(lambda ids: ids[U].__setitem__(3, 7)),
        ("ali.1.gz", U, "frame 3: expected a transition-id from 1 to 6, found 7"),
    ),
    "transition-id 0": (
        change_ids(lambda ids: ids[U].__setitem__(19, 0)),
        ("ali.1.gz", U, "frame 19: expected a transition-id from 1 to 6, found 0"),
    ),
    "no final.mdl": (
        lambda job: (job.ali / "final.mdl").unlink(),
        (
            "final.mdl",
            "cannot read",
            "No such file",
            "copy it from the directory of the system that made the alignment",
        ),
    ),
    "empty final.mdl": (lambda job: cut(job.ali / "final.mdl", 0), ("final.mdl", "the file is empty")),
    "final.mdl is text": (
        lambda job: (job.ali / "final.mdl").write_text("not a model\n"),
        ("final.mdl", "not a Kaldi transition model: expected <TransitionModel> at byte 0, found 'not'"),
    ),
    "final.mdl is an archive": (rename_model, ("final.mdl", "not a Kaldi transition model: expected <Tr")),
    "final.mdl is cut": (
        lambda job: cut(job.ali / "final.mdl", 100),
        ("final.mdl", "not a Kaldi transition model: cut short", "it has 100 bytes"),
    ),
}

TOO_FEW: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "alignments missing": (
        change_ids(lambda ids: [ids.pop(name) for name in (U, "spk2-utt006")] and None),
        (
            "2 of 24 utterances cannot be used (2 without an alignment",
            f"the first is {U}",
            "max_skipped_fraction (now 0.05)",
        ),
    ),
    "lengths differ": (
        change_ids(lambda ids: ids.update({name: ids[name][:-5] for name in (U, "spk2-utt006")})),
        ("2 of 24 utterances cannot be used", "2 differing from theirs by 5 frames or more", f"the first is {U}"),
    ),
}


def cases(*tables: dict[str, tuple[Damage, tuple[str, ...]]]) -> pytest.MarkDecorator:
    every = {name: case for table in tables for name, case in table.items()}
    return pytest.mark.parametrize(("damage", "said"), list(every.values()), ids=list(every))


@cases(DATA, ALIGNMENTS, TOO_FEW)
def test_train(job: Job, run_cli: RunCli, damage: Damage, said: tuple[str, ...]) -> None:
    damage(job)
    assert_refused(run_cli("train", job.recipe, "--run-dir", job.run, "--device", "cpu"), *said)
    assert files_in(job.run) <= BEFORE_TRAINING
    job.write()
    assert_trains(run_cli, job)


@cases(DATA)
def test_decode_prep(job: Job, trained: Path, run_cli: RunCli, damage: Damage, said: tuple[str, ...]) -> None:
    out = job.root / "decode"
    arguments = ["decode-prep", trained, "--data", job.data, "--out", out, "--device", "cpu"]
    damage(job)
    assert_refused(run_cli(*arguments), *said)
    assert files_in(out) == set()
    job.write()
    assert run_cli(*arguments).exit_code == 0
    assert files_in(out) == {
        "loglikes.ark",
        "loglikes.scp",
        "ali_train_pdf.counts",
        "decode.sh",
        "transition_model.sha256",
        "model.sha256",
    }


@cases(DATA, ALIGNMENTS)
def test_evaluate(job: Job, trained: Path, run_cli: RunCli, damage: Damage, said: tuple[str, ...]) -> None:
    damage(job)
    result = run_cli("evaluate", trained, "--data", job.data, "--alignments", job.ali, "--json", "--device", "cpu")
    assert_refused(result, *said)
    assert result.stdout == ""


def test_some_utterances_are_skipped_or_trimmed_and_counted(
    job: Job, trained: Path, run_cli: RunCli, caplog: pytest.LogCaptureFixture
) -> None:
    skipped = {name: name for name in ("spk0-utt000", "spk1-utt005", "spk2-utt010")}
    no_alignment, no_frames, five_less = skipped
    four_less, four_more = "spk3-utt011", "spk3-utt015"

    def change(ids: dict[str, np.ndarray]) -> None:
        del ids[no_alignment]
        ids[five_less] = ids[five_less][:-5]
        ids[four_less] = ids[four_less][:-4]
        ids[four_more] = np.append(ids[four_more], ids[four_more][:4])

    change_ids(change)(job)
    job.write_features({**job.features, no_frames: np.zeros((0, 0), np.float32)})
    evaluated = run_cli("evaluate", trained, "--data", job.data, "--alignments", job.ali, "--json", "--device", "cpu")
    found = json.loads(evaluated.stdout)
    # A matrix without frames differs from its 20 aligned ones.
    assert found["utterances"] == {"used": 21, "no_alignment": 1, "length_differs": 2, "trimmed": 2, "empty": 0}
    assert found["frames"] == 20 * 20 + 16
    assert "the figures lack 3 of 24 utterances (12.5 %)" in caplog.text
    assert_trains(run_cli, job, ["data.max_skipped_fraction=0.125"])
    log = (job.run / "train.log").read_text()
    assert "3 of 24 utterances skipped (1 without an alignment, 2 differing from theirs by 5 frames or more" in log
    assert "2 trimmed" in log
    assert f"{five_less} skipped: 20 frames of features, 15 of alignment" in log
    (job.root / "run").rename(job.root / "other run")
    refused = run_cli(
        "train", job.recipe, "--run-dir", job.run, "--set", "data.max_skipped_fraction=0.12", "--device", "cpu"
    )
    assert_refused(refused, "3 of 24 utterances cannot be used", "the first is spk0-utt000")


def test_cross_validation_on_the_training_data(job: Job, run_cli: RunCli) -> None:
    data = write_data_dir(job.root / "copy", job.features)
    arguments = ["train", job.recipe, "--run-dir", job.run, "--device", "cpu", "--set", "data.cv.fraction=null"]
    own = ["--set", f"data.cv.data={data}", "--set", f"data.cv.alignments={job.ali}"]
    message = f"24 of 24 utterances for cross-validation are also in data.train, {job.data}; the first is "
    assert_refused(run_cli(*arguments, *own), f"location: {data}", message + job.names[0])
    assert files_in(job.run) <= BEFORE_TRAINING


def test_alignments_that_do_not_belong_to_the_model_are_told(
    job: Job, trained: Path, run_cli: RunCli, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody can know, but a loss at chance level and lengths that all differ alike speak for it."""
    arguments = ["evaluate", trained, "--data", job.data, "--alignments", job.ali, "--device", "cpu"]
    assert run_cli(*arguments).exit_code == 0
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and "the network was trained on 18 of these 24 utterances" in warnings[0]
    change_ids(lambda ids: ids.update({name: (one + 2) % 6 for name, one in ids.items()}))(job)
    assert run_cli(*arguments).exit_code == 0
    assert "is not below that of equal probabilities for all 3 pdfs, 1.0986" in caplog.text
    change_ids(lambda ids: ids.update({name: one[:-2] for name, one in ids.items()}))(job)
    told = (
        "the alignments of 24 of 24 utterances are 2 frames shorter than the features; the first is spk0-utt000 with "
    )
    assert run_cli(*arguments).exit_code == 0
    assert f"{told}20 frames of features and 18 of alignment. This usually" in caplog.text
    assert_trains(run_cli, job)
    assert told in (job.run / "train.log").read_text()


def test_a_model_that_knows_only_the_frequencies_is_told(
    job: Job, trained: Path, tmp_path: Path, run_cli: RunCli, caplog: pytest.LogCaptureFixture
) -> None:
    """Its loss is below that of equal probabilities. Without the run's counts the evaluated labels' are compared."""
    run = shutil.copytree(trained, tmp_path / "run")
    model = load_run(run)
    model.network.parameters.zero_()
    model.network.parameters[-3] = 1.0  # the first of the output layer's biases
    save_model(run / "final.safetensors", model)
    change_ids(
        lambda ids: ids.update({name: one * 0 + 1 + 2 * (np.arange(20) % 10 == 9) for name, one in ids.items()})
    )(job)
    arguments = ["evaluate", run, "--data", job.data, "--alignments", job.ali, "--device", "cpu"]
    for counts in (" [ 440 20 20 ]\n", "damaged"):
        (run / "ali_train_pdf.counts").write_text(counts)
        caplog.clear()
        assert run_cli(*arguments).exit_code == 0
        assert "the network is no better than one that ignores its input: loss 0." in caplog.text
        assert "equal probabilities" not in caplog.text


def test_a_file_in_place_of_a_data_dir_is_told(job: Job, trained: Path, run_cli: RunCli) -> None:
    words = ["train", job.recipe, "--run-dir", job.run, "--set", f"data.train={job.data / 'feats.scp'}"]
    assert_refused(run_cli(*words), "the data dir is a file", f"hint: name its directory: {job.data}")


@pytest.fixture
def exp(job: Job, trained: Path) -> Path:
    """The folder of two run dirs."""
    for name in ("dnn", "other"):
        shutil.copytree(trained, job.root / "exp" / name)
    (job.root / "exp" / "empty").mkdir()
    (job.root / "wavs").mkdir()
    (job.root / "wavs/wav.scp").touch()
    return job.root / "exp"


WRONG_PATHS: dict[str, tuple[str, tuple[str, ...]]] = {
    "no run dir": ("{} exp/none --data data --alignments ali", ("no such run dir", "location: exp/none")),
    "a file in place of a run dir": ("{} recipe.yaml --data data --alignments ali", ("not a ddnn model",)),
    "metrics in place of a run dir": ("report exp/dnn/metrics.jsonl --no-plots", ("name its directory: exp/dnn",)),
    "status of a data dir": ("status data", ("there is no run dir", "this is a data dir; ddnn info describes it")),
    "a data dir without features": (
        "{} exp/dnn --data wavs --alignments ali",
        ("there is a wav.scp, but no feats.scp", "make features first"),
    ),
    "a folder of run dirs": (
        "{} exp --data data --alignments ali",
        ("no final.safetensors", "name a run dir in it, such as exp/dnn, exp/other"),
    ),
    "no data dir": ("{} exp/dnn --data none --alignments ali", ("the data dir does not exist", "location: none")),
    "the folder of data dirs": (
        "{} exp/dnn --data . --alignments ali",
        ("no feats.scp; data dirs in it are data", "name one of them, such as data"),
    ),
    "a file in place of a data dir": (
        "{} exp/dnn --data data/feats.scp --alignments ali",
        ("the data dir is a file", "name its directory: data"),
    ),
    "no alignments": (
        "evaluate exp/dnn --data data --alignments none",
        ("the alignment dir or archive does not exist", "location: none"),
    ),
    "no transforms": (
        "{} exp/dnn --data data --alignments ali --transforms none",
        ("the model was trained with no transforms", "location: --transforms"),
    ),
    "info of nothing": ("info none", ("does not exist", "location: none")),
    "info of a folder without anything": ("info exp/empty", ("unrecognized directory", "Kaldi data dir (feats.scp)")),
}


@pytest.mark.parametrize(("words", "said"), WRONG_PATHS.values(), ids=WRONG_PATHS)
def test_wrong_paths(
    job: Job, exp: Path, run_cli: RunCli, words: str, said: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`{}`: evaluate, and decode-prep, which takes no alignments."""
    monkeypatch.chdir(job.root)
    commands = [words.format("evaluate")]
    if "{}" in words:
        commands.append(words.format("decode-prep").replace(" --alignments ali", " --out decode"))
    for command in commands:
        assert_refused(run_cli(*command.split()), *said)
    assert not Path("decode").exists()


def test_utterances_without_frames_are_skipped_and_counted(job: Job, trained: Path, run_cli: RunCli) -> None:
    job.write_features({**job.features, U: np.zeros((0, 0), np.float32)})
    change_ids(lambda ids: ids.update({U: np.zeros(0, np.int32)}))(job)
    assert_trains(run_cli, job)
    log = (job.run / "train.log").read_text()
    assert f"utterance {U} skipped: it has no frames" in log and "1 without frames" in log
    arguments = ["decode-prep", job.run, "--data", job.data, "--out", job.root / "decode", "--device", "cpu"]
    assert run_cli(*arguments).exit_code == 0
    assert {name for name, _ in iterate_matrices(job.root / "decode/loglikes.ark")} == {*job.names} - {U}


def test_pdf_ids_beyond_the_model(job: Job, trained: Path, run_cli: RunCli) -> None:
    pdfs = {name: labels.copy() for name, labels in job.labels.items()}
    pdfs[U][4] = 3
    archive = write_pdfs(job.root / "pdfs.txt", pdfs)
    write_recipe(job.recipe, job.data, archive)
    settings = ["--set", "data.num_pdfs=3", "--run-dir", job.run, "--device", "cpu"]
    said = ("pdfs.txt", U, "frame 4: expected a pdf-id from 0 to 2, found 3")
    assert_refused(run_cli("train", job.recipe, *settings), *said)
    assert files_in(job.run) <= BEFORE_TRAINING
    result = run_cli("evaluate", trained, "--data", job.data, "--alignments", archive, "--device", "cpu")
    assert_refused(result, "pdfs.txt", U, "the alignment has 4 pdfs, the model 3")
    write_pdfs(archive, job.labels)
    assert_trains(run_cli, job, ["data.num_pdfs=3"])


@pytest.mark.parametrize(
    ("recipe", "said"),
    [
        ("- data\n- model\n", ("line 1", "a list found, expected `key: value` lines")),
        ("train me\n", ("line 1", "plain text found, expected `key: value` lines")),
        ("", ("nothing found, expected `key: value` lines",)),
        ("data:\n\ttrain: data\n", ("line 2", "a tab found; use spaces")),
        (
            "{data}schedule: {{initail: 0.1}}\n",
            ("line 2", "schedule.initail: unknown key", "schedule.initial_learning_rate?"),
        ),
        (
            "{data}schedule: {{initial_learning_rate: -0.1}}\n",
            ("line 2", "schedule.initial_learning_rate: -0.1 found, expected a number > 0"),
        ),
        (
            "{data}minibtach: 8\nschedule: {{initial_learning_rate: -1}}\n",
            ("2 problems", "line 2", "minibatch_size?", "line 3", "-1 found"),
        ),
        ("data: {{train: nowhere, alignments: '{ali}'}}\n", ("line 1", "data.train: 'nowhere' does not exist")),
        (None, ("cannot read the file: No such file or directory",)),
    ],
)
def test_recipe(job: Job, run_cli: RunCli, recipe: str | None, said: tuple[str, ...]) -> None:
    path = job.root / "réci pe.yaml"
    if recipe is not None:
        data = f"data: {{train: '{job.data}', alignments: '{job.ali}'}}\n"
        path.write_text(recipe.format(data=data, ali=job.ali), encoding="utf-8")
    assert_refused(run_cli("train", path, "--run-dir", job.run), "réci pe.yaml", *said)
    assert not job.run.exists()


def test_a_run_dir_that_exists(job: Job, trained: Path, run_cli: RunCli) -> None:
    before = {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()}
    said = ("the run dir exists already and is not empty", str(trained))
    assert_refused(run_cli("train", job.recipe, "--run-dir", trained), *said)
    nnet = job.root / "nnet"
    assert run_cli("export", trained, "--out", nnet).exit_code == 0
    assert_refused(run_cli("import-nnet1", nnet / "final.nnet", "--out", trained), *said)
    assert_refused(run_cli("export", trained, "--out", nnet), "the file exists already", "final.nnet")
    assert {path: path.read_bytes() for path in trained.rglob("*") if path.is_file()} == before
    job.run.write_text("a file")
    assert_refused(run_cli("train", job.recipe, "--run-dir", job.run), "the run dir is a file", str(job.run))
    assert job.run.read_text() == "a file"
    assert_refused(run_cli("train", job.recipe, "--run-dir", job.run / "below"), str(job.run))


def test_log_likelihoods_that_exist(job: Job, trained: Path, run_cli: RunCli) -> None:
    arguments = ["decode-prep", trained, "--data", job.data, "--out", job.root / "decode", "--device", "cpu"]
    assert run_cli(*arguments).exit_code == 0
    before = {path.name: path.read_bytes() for path in (job.root / "decode").iterdir()}
    assert_refused(run_cli(*arguments), "log-likelihoods are there already", "decode", "--out")
    assert {path.name: path.read_bytes() for path in (job.root / "decode").iterdir()} == before
