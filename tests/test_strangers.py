"""Files and folders of a stranger: none of them runs a command or a module of its own, and none speaks for ddnn."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from corpora import write_recipe
from distributed.mpi_worlds import need_mpi
from forked_python import forked_python
from jobs import Job, make_job
from reproduce.small import write_corpus
from training import deaths as deaths_module
from training.deaths import DEATHS

from ddnn.kaldi.archive import write_matrices

RunCli = Callable[..., Any]
ALLOWED = "data: {allow_pipes: true}\n"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """A job whose first utterance comes from a shell command, which leaves a trace."""
    made = make_job(tmp_path / "job")
    name = made.names[0]
    alone = tmp_path / "job" / "alone.ark"
    write_matrices(alone, alone.with_suffix(".scp"), [(name, made.features[name])])
    start = int(alone.with_suffix(".scp").read_text().rpartition(":")[2]) + 1
    first, *others = made.scp.read_text().splitlines(keepends=True)
    assert first.split()[0] == name
    made.scp.write_text(f"{name} touch {trace(made)}; tail -c +{start} {alone} |\n{''.join(others)}")
    return made


def trace(job: Job) -> Path:
    return job.root / "command-was-run"


def allow(recipe: Path) -> None:
    """In the recipe itself."""
    recipe.write_text(recipe.read_text().replace("data:\n", "data:\n  allow_pipes: true\n"))


def write_run_dir(job: Job) -> Path:
    """A run dir as a stranger may write it: an unfinished training whose recipe allows commands."""
    run = job.root / "strange"
    run.mkdir()
    shutil.copy(job.recipe, run / "recipe.yaml")
    allow(run / "recipe.yaml")
    (run / "train.log").write_text("begun\n")
    return run


def assert_no_command(result: Any, job: Job) -> None:
    assert result.exit_code == 2, result.stderr
    assert "data.allow_pipes: true counts only on the command line, or in a recipe that it names" in result.stderr
    assert "give --allow-pipes if the commands are yours" in result.stderr
    assert not trace(job).exists()


@pytest.mark.parametrize("beside", ["train.log", "status.json"])
def test_a_run_dirs_recipe_that_is_named_for_another_run_allows_no_commands(
    beside: str, job: Job, run_cli: RunCli
) -> None:
    """To repeat a colleague's run one names just that file."""
    recipe = write_run_dir(job) / "recipe.yaml"
    (recipe.parent / "train.log").rename(recipe.parent / beside)
    assert_no_command(run_cli("train", recipe, "--run-dir", job.run, "--device", "cpu"), job)
    link = job.root / "link.yaml"
    link.symlink_to(recipe)
    assert_no_command(run_cli("train", link, "--run-dir", job.run, "--device", "cpu"), job)
    (recipe.parent / beside).unlink()
    assert run_cli("train", recipe, "--run-dir", job.run, "--device", "cpu").exit_code == 0
    assert trace(job).exists()


def test_an_included_file_allows_no_commands(job: Job, run_cli: RunCli) -> None:
    (job.root / "fragment.yaml").write_text(ALLOWED)
    (job.root / "--set data.allow_pipes=true").mkdir()  # a name that looks like the command line
    disguised = "--set data.allow_pipes=true/fragment.yaml"
    (job.root / disguised).write_text(ALLOWED)
    for name in ("fragment.yaml", disguised):
        recipe = job.root / "with include.yaml"
        recipe.write_text(f"include: '{name}'\n{job.recipe.read_text()}")
        assert_no_command(run_cli("train", recipe, "--run-dir", job.run), job)
        off = run_cli("train", recipe, "--run-dir", job.run, "--set", "data.allow_pipes=false")
        assert off.exit_code == 2 and "is a shell command, which is not run" in off.stderr and not trace(job).exists()
    assert run_cli("train", recipe, "--run-dir", job.run, "--allow-pipes", "--device", "cpu").exit_code == 0
    assert trace(job).exists()


def test_the_named_recipe_and_the_command_line_allow_commands(job: Job, run_cli: RunCli) -> None:
    refused = run_cli("train", job.recipe, "--run-dir", job.run)
    assert refused.exit_code == 2 and "hint: add --allow-pipes" in refused.stderr and not trace(job).exists()
    allow(job.recipe)
    done = run_cli("train", job.recipe, "--run-dir", job.run, "--device", "cpu")
    assert done.exit_code == 0 and trace(job).exists()
    commands = f"data.allow_pipes: 1 of 24 entries of {job.scp} are shell commands, which are run\n"
    assert commands in (job.run / "train.log").read_text()
    assert run_cli("info", job.run / "recipe.yaml").exit_code == 0
    assert run_cli("report", job.run, "--no-plots").exit_code == 0


@pytest.mark.parametrize(
    "words",
    [
        "train {run} --resume",
        "train {run} --resume=auto --run-dir {root}/other",
        "train {run}/recipe.yaml --run-dir {run} --resume",
        "train {link} --resume",
        "train {run}/recipe.yaml --run-dir {link} --resume",
        "train {run} --resume --workers 2",
        "train {run} --resume --slurm",
        "train {run}/recipe.yaml --run-dir {run} --resume --slurm",
        "pretrain {run}/recipe.yaml --run-dir {run} --set init=rbm",
        "pretrain {run}/recipe.yaml --run-dir {run} --set init=rbm --slurm",
    ],
)
def test_a_run_dir_allows_no_commands(job: Job, run_cli: RunCli, words: str) -> None:
    run, link = write_run_dir(job), job.root / "link"
    link.symlink_to(run)
    if words.startswith("pretrain"):
        (run / "train.log").unlink()
    assert_no_command(run_cli(*words.format(run=run, root=job.root, link=link).split()), job)


def test_a_run_dir_with_links_or_includes_allows_no_commands(job: Job, run_cli: RunCli) -> None:
    run = write_run_dir(job)
    (run / "recipe.yaml").rename(job.root / "elsewhere.yaml")
    (run / "recipe.yaml").symlink_to(job.root / "elsewhere.yaml")
    assert_no_command(run_cli("train", run, "--resume"), job)
    assert_no_command(run_cli("train", run / "recipe.yaml", "--run-dir", run, "--resume"), job)
    (run / "recipe.yaml").unlink()
    (run / "recipe.yaml").write_text("include: ../elsewhere.yaml\n")
    assert_no_command(run_cli("train", run, "--resume"), job)


def test_the_command_to_resume_allows_commands_again(job: Job, run_cli: RunCli) -> None:
    allow(job.recipe)
    for command, run in (("train", job.run), ("pretrain", job.root / "rbm")):
        rbm = ("--set", "init=rbm", "--set", "pretrain={epochs: [1]}")
        options = () if command == "train" else rbm
        done = run_cli(command, job.recipe, "--run-dir", run, "--device", "cpu", *options)
        assert done.exit_code == 0, done.stderr
        for name in ("final.safetensors", "dbn.safetensors"):
            (run / name).unlink(missing_ok=True)
        status = json.loads((run / "status.json").read_text())
        (run / "status.json").write_text(json.dumps({**status, "state": "interrupted"}))
        assert "--allow-pipes runs the shell commands of its scp files" in run_cli("status", run).stdout
        resume = json.loads(run_cli("status", run, "--json").stdout)["resume_command"]
        assert resume.endswith(" --allow-pipes")
        _, *words = shlex.split(resume)
        trace(job).unlink()
        assert_no_command(run_cli(*words[:-1]), job)
        assert run_cli(*words, "--device", "cpu").exit_code == 0 and trace(job).exists()


def test_a_job_is_allowed_the_commands_of_its_recipe(job: Job, run_cli: RunCli) -> None:
    options = ("--slurm", "--dry-run", "--run-dir", job.run)
    assert "data.allow_pipes" not in run_cli("train", job.recipe, *options).stdout
    allow(job.recipe)
    for command in (("train",), ("pretrain", "--set", "init=rbm")):
        assert run_cli(*command, job.recipe, *options).stdout.count(" --set=data.allow_pipes=true -- ") == 1


def test_a_corpus_allows_no_commands(job: Job, run_cli: RunCli) -> None:
    folder = write_corpus(job.root / "corpus", graphs=False, init="random")
    base = folder / "tables" / "base.yaml"
    base.write_text(base.read_text().replace("data: {", "data: {allow_pipes: true, "))
    result = run_cli("reproduce", "table6", "--corpus", folder, "--out", job.root / "out")
    assert_no_command(result, job)


def test_workers_that_are_started_again_are_allowed_what_their_user_has_allowed(job: Job) -> None:
    need_mpi()
    allow(job.recipe)
    (job.root / "patch").mkdir()
    shutil.copy(deaths_module.__file__, job.root / "patch" / "sitecustomize.py")
    path = os.pathsep.join([str(job.root / "patch"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, DEATHS: '[[1, "minibatch", 3]]', "PYTHONPATH": path}
    words = ["train", job.recipe, "--run-dir", job.run, "--workers", "2", "--device", "cpu"]
    done = ddnn(*words, environment=environment, python=forked_python())
    assert done.returncode == 0, done.stderr
    assert "restart 1, from the beginning" in done.stderr
    assert (job.run / "train.log").read_text().count("entries of") == 2


def ddnn(
    *words: object, environment: dict[str, str] | None = None, python: str = sys.executable, **options: Any
) -> Any:
    """`ddnn` as the shell runs it: the working directory is not where Python looks for modules."""
    start = "import sys; sys.path[:1] == [''] and sys.path.pop(0); from ddnn.cli import main; main()"
    command = [python, "-c", start, *map(str, words)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, **options)


TRAPS = ("click", "ddnn", "json", "kaldiio", "mpi4py", "numpy", "random", "runpy", "sitecustomize", "torch", "yaml")


@pytest.fixture
def trapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with modules that leave a trace where they are imported. Nothing but the command lines of
    ddnn protects from them, as with Python 3.10."""
    folder = tmp_path / "trapped"
    folder.mkdir()
    for name in TRAPS:
        (folder / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'a').write({name + ' '!r})\n")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(folder)
    return tmp_path / "imported"


def assert_not_imported(trapped: Path) -> None:
    assert not trapped.exists(), f"modules of the working directory were imported: {trapped.read_text()}"


def test_the_trap_works(trapped: Path) -> None:
    subprocess.run([sys.executable, "-m", "random"], capture_output=True, check=False)
    assert trapped.read_text() == "random "


@pytest.mark.parametrize(
    "words",
    [
        "train {recipe} --run-dir {run} --workers 2 --device cpu",
        "pretrain {recipe} --run-dir {run} --workers 2 --device cpu --set init=rbm --set pretrain={{epochs:[1]}}",
        "bench --workers 2 --seconds 0.1 --averaging-period 1",
    ],
)
def test_workers_do_not_import_from_the_working_directory(trapped: Path, tmp_path: Path, words: str) -> None:
    need_mpi()
    job = make_job(tmp_path / "job")
    done = ddnn(*words.format(recipe=job.recipe, run=job.run).split())
    assert_not_imported(trapped)
    assert done.returncode == 0, done.stderr


def test_loading_processes_do_not_import_from_the_working_directory(trapped: Path) -> None:
    from ddnn.data.feature_reader import with_own_reader
    from ddnn.kaldi.data_dir import compute_cmvn_stats
    from ddnn.util.pool import worker_pool

    with worker_pool(1, "", "") as pool:
        assert list(pool.run([(with_own_reader, compute_cmvn_stats, {}, 4)])) == [{}]
    assert_not_imported(trapped)


def test_reproduce_does_not_import_from_the_working_directory(trapped: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = write_corpus(tmp_path / "corpus", graphs=False)
    words = "table1 --corpus {} --out {} --device cpu --seeds 1 --workers 1"  # RBMs, one run, its evaluation
    done = ddnn("reproduce", *words.format(folder, tmp_path / "out").split())
    assert_not_imported(trapped)
    assert done.returncode == 0 and len(list((tmp_path / "out" / "records").glob("*.json"))) == 1, done.stderr


def test_the_script_of_a_job_does_not_import_from_the_working_directory(
    trapped: Path, tmp_path: Path, run_cli: RunCli
) -> None:
    job = make_job(tmp_path / "job")
    script = run_cli("train", job.recipe, "--run-dir", job.run, "--slurm", "--dry-run").stdout
    (training,) = re.findall(r"^\(trap '' USR1; exec (.*)\) &$", script, re.MULTILINE)
    job.run.mkdir()
    shutil.copy(job.recipe, job.run / "recipe.yaml")
    done = subprocess.run(["/bin/sh", "-c", training], capture_output=True, text=True, check=False)
    assert_not_imported(trapped)
    assert done.returncode == 0, done.stderr


def test_where_users_say_that_modules_are_they_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ddnn.util.process import python_command

    (tmp_path / "own.py").write_text("import sys; print(sys.argv[1:], sys.argv[0], __name__)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = subprocess.run(python_command("own", "a b"), capture_output=True, text=True, check=True)
    assert done.stdout == f"['a b'] {tmp_path / 'own.py'} __main__\n"


HOSTILE = "x\x1b]0;title\x07\x9b31m\r\u202e[bold]\x7f\nforged: ok"
"""A name that sets the terminal's title and color, changes the direction of text, and begins a line of its own."""


def assert_tame(text: str, *shown: str) -> None:
    assert [c for c in text if not c.isprintable() and c not in "\n\t"] == [], text
    assert not re.search("^ *forged", text, re.MULTILINE), text
    for part in shown:
        assert part in text, text


def test_names_from_files_do_not_control_the_terminal(
    tmp_path: Path, run_cli: RunCli, monkeypatch: pytest.MonkeyPatch
) -> None:
    escaped = "x\\x1b]0;title\\x07\\u009b31m\\r\\u202e[bold]\\u007f\\nforged: ok"
    job = make_job(tmp_path / HOSTILE)
    write_recipe(job.recipe, Path("data"), Path("ali"))
    job.scp.write_bytes(job.scp.read_bytes().replace(f"{job.data}/".encode(), b""))
    done = run_cli("train", job.recipe, "--run-dir", job.run, "--device", "cpu")
    assert done.exit_code == 0, done.stderr
    assert_tame(done.stdout + done.stderr)
    assert_tame(
        (job.run / "train.log").read_text(),
        f"{escaped}/data: 4 speakers, 24 utterances",
        f"{escaped}/run/final.safetensors",
    )
    for words in (
        ("info", job.data), ("info", job.run), ("info", job.recipe), ("status", job.run), ("info", job.root / "nothing"),
        ("evaluate", job.run, "--data", job.data, "--alignments", job.root / "nothing"),
        ("train", job.recipe, "--run-dir", job.run), ("train", job.root / "nothing", "--resume"),
    ):  # fmt: skip
        result = run_cli(*words)
        assert_tame(result.stdout + result.stderr, escaped)
    assert run_cli("train", job.run, "--resume").stdout.startswith(f"{tmp_path}/{escaped}/run: this training has")
    shutil.copytree(job.run, tmp_path / "two" / HOSTILE)
    monkeypatch.setenv("COLUMNS", "300")  # so that the table folds no name
    report = run_cli("report", job.run, tmp_path / "two" / HOSTILE, "--no-plots")
    assert report.exit_code == 0
    assert_tame(report.stdout, escaped)
    json.loads(run_cli("status", job.run, "--json").stdout)


def test_texts_from_files_do_not_control_the_terminal(tmp_path: Path, run_cli: RunCli) -> None:
    job = make_job(tmp_path / "job")
    recipe = job.recipe.read_text()
    for more in ('"a\\e[31m\\nforged: x": 1\n', 'init: "a\\e[31m\\nforged: x"\n', 'include: "a\\e[31m\\nforged: x"\n'):
        job.recipe.write_text(recipe + more)
        result = run_cli("train", job.recipe, "--run-dir", job.run)
        assert result.exit_code == 2
        assert_tame(result.stderr, "a\\x1b[31m\\n")
    job.recipe.write_text(recipe.replace("train: '", 'train: "a\\e[31m\\nforged: x" #'))
    assert_tame(run_cli("train", job.recipe, "--run-dir", job.run).stderr, "a\\x1b[31m\\n")
    assert_tame(run_cli("info", job.recipe).stdout, "a\\x1b[31m\\n")
    job.write()
    name = job.names[0]
    job.scp.write_text(job.scp.read_text().replace(name, f"{name}\x1b[31m"))
    (job.data / "utt2spk").write_text((job.data / "utt2spk").read_text().replace(name, f"{name}\x1b[31m"))
    done = run_cli(
        "train", job.recipe, "--run-dir", job.run, "--device", "cpu", "--set", "data.max_skipped_fraction=0.5"
    )
    assert done.exit_code == 0, done.stderr
    assert_tame((job.run / "train.log").read_text())
    result = run_cli("train", job.recipe, "--run-dir", job.root / "other", "--set", "data.max_skipped_fraction=0")
    assert_tame(result.stderr, f"{name}\\x1b[31m")


def test_bars_and_bugs_do_not_let_names_control_the_terminal() -> None:
    code = (
        "import os, platform, sys; os.environ['DDNN_PROGRESS'] = f'{platform.node()} /dev/stderr'\n"
        "from ddnn.util import progress\n"
        f"progress.only_first_worker_shows(0); name = {HOSTILE!r}\n"
        "from ddnn.util.text import escaped_output\n"
        "with escaped_output(), progress.frame_counter(name, 100) as advance: advance(25); print('done')\n"
        "import ddnn.inspection.path as path; sys.argv = ['ddnn', 'info', name]\n"
        "def broken(p): raise ZeroDivisionError(str(p))\n"
        "path.describe_path = broken\n"
        "from ddnn.cli import main; main()\n"
    )
    done = subprocess.run([forked_python(), "-c", code], capture_output=True, text=True, check=False)
    bar, trace, bug = done.stderr.partition("Traceback")
    assert "[bold]" in bar and "\x1b]0" not in bar and "forged" not in bar.splitlines()
    assert_tame((trace + bug).replace("\nforged", ""), "ZeroDivisionError: x\\x1b", "this is a bug in ddnn")
    assert done.returncode == 1
