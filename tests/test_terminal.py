"""What a person at a terminal sees: whole words, lines of epochs that fit, colors where they mean something; and that a pipe
and train.log have none of it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from distributed.mpi_worlds import need_mpi
from forked_python import forked_python
from jobs import Job, make_job
from report_runs import rows_of, write_run
from terminal import on_terminal, plain

from ddnn.cli import main
from ddnn.runs.rows import EpochRow, WarmupRow
from ddnn.util.text import escaped_output, fitted, show

LOGGING = """
import logging, sys
from ddnn.util.text import escaped_output, log_to_stderr, show
with escaped_output():
    log_to_stderr()
    log = logging.getLogger("ddnn")
    log.setLevel("INFO")
    log.info("%s", "a-word-of-eighteen " * 6)
    log.info("name  %s", "value " * 10)
    log.warning("careful")
    log.error("broken %s", "\\x1b[31m")
    log.info("done", extra={"color": "green"})
    log.info("the full line of an epoch", extra={"short": "ep"})
    show("a result", sys.stdout, "green")
"""
WRAPPED = """\
a-word-of-eighteen a-word-of-eighteen
    a-word-of-eighteen
    a-word-of-eighteen
    a-word-of-eighteen
    a-word-of-eighteen
name  value value value value value
      value value value value value
"""
REST = "careful\nbroken \\x1b[31m\ndone\nep\na result\n"
COLORED = "\x1b[33mcareful\x1b[0m\n\x1b[31mbroken \\x1b[31m\x1b[0m\n\x1b[32mdone\x1b[0m\nep\n\x1b[32ma result\x1b[0m\n"


@pytest.mark.parametrize(
    ("environment", "rest"),
    [({}, COLORED), ({"NO_COLOR": "1"}, REST), ({"NO_COLOR": ""}, COLORED), ({"TERM": "dumb"}, REST)],
)
def test_log_lines_are_broken_between_words_and_warnings_colored(environment: dict[str, str], rest: str) -> None:
    code, text = on_terminal([forked_python(), "-c", LOGGING], 40, environment)
    assert (code, text) == (0, WRAPPED + rest)


def test_a_pipe_gets_whole_lines_without_colors() -> None:
    done = subprocess.run([forked_python(), "-c", LOGGING], capture_output=True, text=True, check=True)
    assert "\x1b" not in done.stderr + done.stdout and done.stdout == "a result\n"
    assert done.stderr.splitlines()[0] == "a-word-of-eighteen " * 6
    assert "the full line of an epoch\n" in done.stderr


def test_a_colored_line_is_escaped(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Names from files do not control the terminal, whatever the color."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with escaped_output():
        show("a\x1b]0;name", sys.stdout, "red")
    assert capsys.readouterr().out == "\x1b[31ma\\x1b]0;name\x1b[0m\n"


def test_what_is_too_long_for_a_line_of_its_own_is_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths, above all, and words with hyphens; a text that fits stays as it is, blanks too."""
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    path = "/a/folder/whose-name-is-long/file"
    assert fitted(f"see {path}\n\n  as  it is", sys.stderr) == f"see\n    {path}\n\n  as  it is"
    assert fitted("          deep inside a list", sys.stderr) == "          deep\n          inside a\n          list"


def epoch(**fields: Any) -> EpochRow:
    row = {"type": "epoch", "split": "train", "epoch": 12, "figures": {"loss": 3.86081, "frame_accuracy": 0.18271}}
    speed = {
        "learning_rate": 0.000125,
        "schedule_learning_rate": 0.0000625,
        "seconds": 1234.56,
        "frames_per_second": 135720.4,
    }
    return EpochRow.model_validate({**row, **speed, "precision": "bf16", **fields})


def test_short_lines_of_epochs() -> None:
    """With all figures in 79 columns, whatever they are; what the start of the log says is not repeated."""
    full = epoch().as_text()
    assert full.endswith("learning rate 0.000125 (2 x 6.25e-05)  1234.6 s  135720 frames/s  bf16") and len(full) > 100
    short = epoch().as_short_text(None)
    assert short == "epoch 12 train  loss 3.8608  fr acc 18.27 %  lr 0.000125  1234.6 s  135720 frames/s"
    assert len(epoch().as_short_text(0.000125)) <= 79 and "lr" not in epoch().as_short_text(0.000125)
    assert "  lr 0.000125  " in epoch().as_short_text(0.00025), "it has been halved"
    rejected = epoch(split="cv", accepted=False).as_short_text(0.000125)
    assert rejected == "epoch 12 cv     loss 3.8608  fr acc 18.27 %  1234.6 s  135720 frames/s  rejected"
    smbr = epoch(figures={"expected_error": 0.1, "expected_accuracy": 0.9}, learning_rate=1e-5, seconds=9.5)
    assert smbr.as_short_text(1e-5) == "epoch 12 train  exp err 10.00 %  exp acc 90.00 %  9.5 s  135720 frames/s"
    warmup = WarmupRow(type="warmup", epoch=0, figures={"loss": 4.5}, learning_rate=0.008)
    assert warmup.as_short_text(0.008) == "epoch  0 warmup loss 4.5000  0.0 s  0 frames/s"


def train(job: Job, columns: int, *words: str, run: str = "run") -> tuple[int, str]:
    command = [
        forked_python(),
        "-m",
        "ddnn.cli",
        "train",
        str(job.recipe),
        "--run-dir",
        str(job.root / run),
        "--device",
        "cpu",
    ]
    code, text = on_terminal([*command, *words], columns)
    for line in plain(text).splitlines() if code == 0 else ():  # an error may have a command, to be copied whole
        assert len(line) <= columns or " " not in line.strip(), "a path alone may be longer"
    return code, text


NEWBOB = ("--set", "schedule={name: newbob, max_epochs: 4, initial_learning_rate: 0.01, keep_lr_epochs: 2}")


def test_a_training_on_a_narrow_and_a_wide_terminal(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    code, text = train(job, 80, *NEWBOB)
    assert code == 0, text
    epochs = [line for line in plain(text).splitlines() if re.match(r"epoch +\d+ (train|cv)", line)]
    rates = [re.search(r"lr (\S+)", line) for line in epochs]
    full = re.findall(r"INFO (epoch .*)", (job.run / "train.log").read_text())
    applied = [re.search(r"learning rate (\S+)", line) for line in full]
    assert len(epochs) == len(full) > 4 and applied[0] is None and applied[1] is not None
    for n, (line, whole) in enumerate(zip(epochs, full, strict=True)):
        assert re.findall(r"\d+\.\d{4}|[\d.]+ %|\S+ s |\d+ frames/s", line) == re.findall(
            r"\d+\.\d{4}(?!\S*  \S+ s)|[\d.]+ %|\S+ s |\d+ frames/s", whole
        )
        assert "fr acc" in line and "frame accuracy" in whole and ("rejected" in line) == ("rejected" in whole)
        rate, before = applied[n] and applied[n][1], applied[n - 1] and applied[n - 1][1] if n else None
        assert (rates[n] and rates[n][1]) == (rate if rate != before else None), "only if it has changed"
    assert f"\x1b[32mfinished: {job.run}/final.safetensors" in text.replace("\n    ", " ")
    assert "\x1b" not in (job.run / "train.log").read_text()
    code, text = train(job, 160, *NEWBOB, run="wide")
    assert "  frame accuracy " in text and "fr acc" not in text


def test_two_workers_on_a_terminal(tmp_path: Path) -> None:
    """The first writes its lines itself, since mpirun brings them late, into a bar; what ends them is the launcher's to say."""
    need_mpi()
    job = make_job(tmp_path)
    code, text = train(job, 80, *NEWBOB, "--workers", "2")
    assert code == 0 and "\x1b[32mfinished:" in text and re.search(r"epoch +1 train .*fr acc", text), text
    code, text = train(job, 80, "--workers", "2", "--set", "schedule.initial_learning_rate=1e9", run="diverged")
    assert code == 3 and re.search(r"\x1b\[31m\n?ddnn: worker \d .*learned nothing", text), text


def test_errors_are_red(tmp_path: Path) -> None:
    command = [forked_python(), "-m", "ddnn.cli", "info", str(tmp_path / "nothing")]
    code, text = on_terminal(command, 80)
    assert code == 2 and re.fullmatch(r"\x1b\[31mddnn: error: (.|\n)*\x1b\[0m\n", text)


def test_the_best_acoustic_scale_is_green(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import ddnn.decoding.score as scoring

    monkeypatch.setattr(scoring, "score", lambda *arguments, **options: SimpleNamespace(best=1))
    monkeypatch.setattr(scoring, "render_text", lambda *arguments, **options: "0.1 WER\n0.2 WER *\nbest: 0.2\n")
    monkeypatch.setattr(sys, "argv", ["ddnn", "score", "x", "--graph", "g", "--model", "m", "--text", "t"])
    for is_terminal, shown in ((False, "0.2 WER *"), (True, "\x1b[32m0.2 WER *\x1b[0m")):
        monkeypatch.setattr(sys.stdout, "isatty", lambda value=is_terminal: value, raising=False)
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv("TERM", "xterm")
        with pytest.raises(SystemExit):
            main()
        assert capsys.readouterr().out == f"0.1 WER\n{shown}\nbest: 0.2\n"


def test_remarks_of_a_report(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, rows_of(1, start={"cv_digest": name})) for name in ("one", "two")]
    ddnn = [forked_python(), "-m", "ddnn.cli"]
    code, text = on_terminal([*ddnn, "report", "--no-plots", *map(str, runs)], 60)
    assert code == 0 and "\nCV sets differ: CV losses compare only within one | two\n" in text
    code, text = on_terminal([*ddnn, "report", "--no-plots", *map(str, runs)], 50)
    assert code == 0 and "\nCV sets differ: CV losses compare only within one\n    | two\n" in text


def test_lines_of_a_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In whole words below each other; but the command that resumes is one line, to be copied."""
    lines = ["  training  epoch  1 train  loss 1.5", "  resume    ddnn train a/folder --resume"]
    found = SimpleNamespace(as_text=lambda: "\n".join(["run: interrupted", *lines]))
    monkeypatch.setattr("ddnn.inspection.status.read_statuses", lambda run_dirs: found)
    monkeypatch.setattr(sys, "argv", ["ddnn", "status", "run"])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "24")
    with pytest.raises(SystemExit):
        main()
    expected = ["run: interrupted", "  training  epoch  1", "            train  loss", "            1.5", lines[1]]
    assert capsys.readouterr().out.splitlines() == expected
