"""The command line: what it calls, what it prints, how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from ddnn import __version__, cli
from ddnn.util.errors import UserError

STAGES = {
    "Data": ["synth", "info"],
    "Training": ["train", "pretrain", "status"],
    "Decoding and scoring": ["evaluate", "decode-prep", "score", "align", "graph", "denlats", "export", "import-nnet1"],
    "Comparing": ["compare-wer", "report", "scale", "reproduce"],
    "Tools": ["bench", "completion"],
}
COMMANDS = [command for commands in STAGES.values() for command in commands]

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `ddnn` in this process: exit code, stdout, stderr."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["ddnn", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        assert isinstance(caught.value.code, int)
        return caught.value.code, out, err

    return run


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[tuple[Any, ...], dict[str, Any]]]]:
    """Puts a recorder in a module's place: called("ddnn.x.y", "function", result) -> its calls."""

    def called(
        module: str, function: str, result: Any = None, **others: Any
    ) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def record(*args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            if isinstance(result, BaseException):
                raise result
            return result

        stand_in = types.ModuleType(module)
        for name, value in {function: record, **others}.items():
            setattr(stand_in, name, value)
        parent, _, last = module.rpartition(".")
        monkeypatch.setitem(sys.modules, module, stand_in)
        if parent in sys.modules:
            monkeypatch.setattr(sys.modules[parent], last, stand_in, raising=False)
        return calls

    return called


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """A recipe with the data it names."""
    for name in ("train", "ali"):
        (tmp_path / name).mkdir()
    path = tmp_path / "my recipe.yaml"
    path.write_text(f"data: {{train: '{tmp_path}/train', alignments: '{tmp_path}/ali'}}\nminibatch_size: 128\n")
    return path


@dataclass(frozen=True)
class Result:
    """Something that can be shown."""

    def as_text(self) -> str:
        """One line."""
        return "loss 1.5, größer"

    def as_dict(self) -> dict[str, Any]:
        """For --json."""
        return {"loss": 1.5, "name": "größer"}


def shell(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "ddnn.cli", *arguments], capture_output=True, text=True, **options)


def below(heading: str, text: str) -> str:
    """The lines of a help below a heading, up to the next empty one."""
    return text.partition(f"\n{heading}:\n")[2].partition("\n\n")[0]


def test_help_names_every_command_by_its_stage() -> None:
    done = shell("--help", env={**os.environ, "COLUMNS": "80"})
    assert done.returncode == 0
    for stage, commands in STAGES.items():
        lines = below(stage, done.stdout).splitlines()
        assert [line.split()[0] for line in lines if line[2] != " "] == commands
        assert {line[14:16] for line in lines} == {"  "} and {line[16] == " " for line in lines} == {False}, "aligned"
        assert "..." not in "".join(lines)
    assert "Examples:" in done.stdout


@pytest.mark.parametrize("command", ["train", "pretrain", "reproduce"])
def test_options_of_slurm_have_a_heading_of_their_own(run: Run, command: str) -> None:
    out = run(command, "--help")[1]
    options, slurm = below("Options", out), below("Slurm", out)
    assert "--device" in options and "  --help" not in slurm and "Slurm:" not in options + slurm
    for name in ("slurm", "cluster", "nodes", "sbatch-option", "job-name"):
        assert f"  --{name} " in slurm and f"  --{name} " not in options
    assert "  Number of nodes of a job." in slurm and "\n  RECIPE\n" not in out, "arguments have no text"


def test_help_does_not_import_heavy_packages() -> None:
    heavy = ("torch", "numpy", "pydantic", "yaml", "kaldiio")
    code = f"import sys, ddnn.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(run: Run, command: str) -> None:
    code, out, err = run(command, "-h")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: ddnn {command} ")
    assert f"  ddnn {command} " in re.split("Examples?:", out)[1]


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"ddnn {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nope"], "No such command 'nope'"),
        (["train"], "Missing argument 'RECIPE'"),
        (["train", "x.yaml", "--device", "tpu"], "'tpu' is not one of"),
        (["evaluate", "run"], "Missing option '--data'"),
        (["synth", "out", "--hours", "many"], "'many' is not a valid float"),
        ([], "Usage: ddnn"),
    ],
)
def test_usage_errors_end_with_2(run: Run, arguments: list[str], said: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--epochs", "3"], "--set schedule.max_epochs=3 or --set schedule.epochs=3"),
        (["--epochs=3"], "--set schedule.max_epochs=3"),
        (["--learning-rate", "0.1"], "--set schedule.initial_learning_rate=0.1"),
        (["--epochs"], "--set schedule.max_epochs=VALUE"),
        (["--units", "512"], "--set model.hidden_units=512"),
        (["--averaging=5"], "--set parallel.averaging_period=5"),
        (["--worker", "2"], "Did you mean"),
        (["--e", "2"], "Did you mean"),
        (["--reusme"], "Did you mean"),
    ],
)
def test_a_recipe_key_given_as_an_option(run: Run, arguments: list[str], said: str) -> None:
    for command in ("train", "pretrain"):
        code, _, err = run(command, "x.yaml", *arguments)
        assert code == 2 and (said in err or (said == "Did you mean" and "No such option" in err))


def test_resume_takes_no_run_dir_as_its_value(run: Run) -> None:
    code, _, err = run("train", "--resume=exp/dnn")
    assert code == 2 and "--resume or --resume=auto expected\n  location: --resume=exp/dnn\n" in err
    assert "ddnn train RUN_DIR --resume" in err


def test_a_recipe_that_does_not_exist_is_named_once_with_the_nearest(run: Run, recipe: Path) -> None:
    code, _, err = run("train", recipe.with_name("my recip.yml"))
    assert code == 2
    assert err.splitlines() == [
        "ddnn: error: cannot read the file: No such file or directory",
        f"  location: {recipe.with_name('my recip.yml')}",
        f"  hint: did you mean {recipe}?",
    ]
    assert "name a recipe" in run("train", recipe.parent / "zzz")[2]


def test_dry_run_prints_the_resolved_recipe_and_trains_nothing(
    run: Run, called: Any, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddnn.training.start.describe", lambda recipe: "a small network")
    described = {"describe_data": lambda recipe, kind, device, trained: [f"{kind} data", "m\x1b"]}
    calls = called("ddnn.training.data", "load_data", **described)
    code, out, _ = run("train", recipe, "--set", "schedule.initial_learning_rate=0.5", "--set", "seed=7", "--dry-run")
    assert code == 0
    assert out.startswith("# a small network\n# training data\n# m\\x1b\nseed: 7\n")
    tree = yaml.safe_load(out)
    assert (tree["minibatch_size"], tree["schedule"]["initial_learning_rate"]) == (128, 0.5)
    assert calls == []


def test_dry_run_for_real(run: Run, recipe: Path) -> None:
    """The data may be elsewhere; where it is looked at, it must be right."""
    code, out, _ = run("train", recipe, "--dry-run", "--no-data", "--set", "data.train=/elsewhere")
    assert code == 0
    assert (yaml.safe_load(out)["minibatch_size"], yaml.safe_load(out)["data"]["train"]) == (128, "/elsewhere")
    for command in ("train", "pretrain"):
        code, out, err = run(command, recipe, "--dry-run")
        assert (code, out) == (2, "") and "feats.scp" in err
    code, _, err = run("train", recipe, "--no-data")
    assert code == 2 and "given without --dry-run\n  location: --no-data" in err
    code, _, err = run("train", recipe, "--no-data", "--dry-run", "--slurm")
    assert code == 2 and "does not look at the data" in err


def test_train(run: Run, called: Any, recipe: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    calls = called("ddnn.training.job", "run_training")
    assert run("train", recipe)[0] == 0
    assert run("train", recipe, "--run-dir", "here", "--device", "cpu", "--workers", "1", "--set", "seed=3")[0] == 0
    (loaded, run_dir, device, comm), options = calls[0]
    assert (loaded.minibatch_size, run_dir, device) == (128, Path("exp/my recipe"), "auto")
    assert (comm.world_size, options["resume"]) == (1, False)
    (loaded, run_dir, device, _), _ = calls[1]
    assert (loaded.seed, run_dir, device) == (3, Path("here"), "cpu")


def test_resume(run: Run, called: Any, recipe: Path, tmp_path: Path) -> None:
    calls = called("ddnn.training.job", "run_training")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    code, _, err = run("train", run_dir, "--resume")
    assert code == 2 and "there is no recipe.yaml" in err
    (run_dir / "recipe.yaml").write_text(recipe.read_text())
    assert run("train", run_dir, "--resume", "--set", "checkpoint.keep_last=3")[0] == 0
    (loaded, location, _, _), options = calls[0]
    assert (loaded.checkpoint.keep_last, location, options["resume"]) == (3, run_dir, True)
    (run_dir / "final.safetensors").write_bytes(b"")
    code, out, _ = run("train", run_dir, "--resume")
    assert code == 0 and "this training has finished" in out and len(calls) == 1


def test_a_launcher_imports_no_torch() -> None:
    code = "import sys, ddnn.cli, ddnn.training.start; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_bad_recipe_is_one_message_and_2(run: Run, recipe: Path) -> None:
    code, out, err = run("train", recipe, "--set", "schedule.initail=1", "--workers", "0")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "ddnn: error: 2 problems in the recipe:",
        "  - schedule.initail: unknown key; did you mean schedule.initial_learning_rate?  [--set schedule.initail=1]",
        "  - parallel.workers: 0 found, expected a whole number >= 1  [--set parallel.workers=0]",
        f"  location: {recipe}",
    ]


def test_evaluate(run: Run, called: Any) -> None:
    calls = called("ddnn.training.model_evaluation", "evaluate_run", Result())
    arguments = ["evaluate", "run", "--data", "d d", "--alignments", "a", "--device", "cpu"]
    assert run(*arguments) == (0, "loss 1.5, größer\n", "")
    code, out, _ = run(*arguments, "--json", "--allow-pipes")
    assert (code, json.loads(out)) == (0, Result().as_dict())
    given = {"run_dir": Path("run"), "data": Path("d d"), "alignments": Path("a"), "device": "cpu", "by": None}
    given["transforms"] = None
    assert calls[0] == ((), {**given, "allow_pipes": False})
    assert calls[1][1] == {**given, "allow_pipes": True}


def test_commands_without_output(run: Run, called: Any) -> None:
    calls = called("ddnn.decoding.prepare", "prepare_decoding")
    assert run("decode-prep", "run", "--data", "d", "--out", "o", "--prior-scale", "0.5") == (0, "", "")
    words = ["--as", "activations", "--layer", "1", "--nj", "3", "--compress", "--compression-method", "3"]
    assert run("decode-prep", "run", "--data", "d", "--out", "-", *words) == (0, "", "")
    options = {
        "device": "auto",
        "prior_scale": 0.5,
        "allow_pipes": False,
        "transforms": None,
        "kind": "log-likelihoods",
        "layer": None,
        "prior_kind": None,
    }
    assert calls[0] == ((Path("run"), Path("d"), Path("o")), {**options, "jobs": 1, "compress": 0})
    options |= {"prior_scale": None, "kind": "activations", "layer": 1, "jobs": 3, "compress": 3}
    assert calls[1:] == [((Path("run"), Path("d"), Path("-")), options)]

    calls = called("ddnn.decoding.prepare", "export_nnet1")
    assert run("export", "run", "--format", "nnet1", "--out", "o") == (0, "", "")
    assert run("export", "run", "--text", "--out", "o") == (0, "", "")
    assert calls == [((Path("run"), Path("o")), {"text": text}) for text in (False, True)]

    calls = called("ddnn.decoding.prepare", "import_nnet1")
    assert run("import-nnet1", "n", "--feature-transform", "f", "--pdf-counts", "c", "--out", "o") == (0, "", "")
    assert run("import-nnet1", "n", "--out", "o") == (0, "", "")
    assert [args for args, _ in calls] == [
        (Path("n"), Path("f"), Path("o"), Path("c")),
        (Path("n"), None, Path("o"), None),
    ]


def test_synth(run: Run, called: Any) -> None:
    from ddnn.synth.corpus import SynthOptions

    made = types.SimpleNamespace(train_utterances=12, test_utterances=3)
    calls = called("ddnn.synth.corpus", "synthesize", made, SynthOptions=SynthOptions)
    code, out, _ = run("synth", "o", "--hours", "0.1", "--speakers", "4", "--dim", "13", "--pdfs", "9", "--seed", "2")
    assert (code, out) == (0, "o: 12 utterances to train on, 3 to test\n")
    assert calls[0][0] == (Path("o"), SynthOptions(hours=0.1, speakers=4, dim=13, pdfs=9, seed=2))


def test_synth_of_endless_hours(run: Run, tmp_path: Path) -> None:
    for hours in ("inf", "nan", "-1"):
        code, _, said = run("synth", str(tmp_path / "o"), "--hours", hours)
        assert code == 2 and "hours" in said


def test_info_and_bench(run: Run, called: Any) -> None:
    calls = called("ddnn.inspection.path", "describe_path", Result())
    assert run("info", "x y.scp") == (0, "loss 1.5, größer\n", "")
    assert json.loads(run("info", "x", "--json")[1]) == Result().as_dict()
    assert calls == [((Path("x y.scp"),), {}), ((Path("x"),), {})]
    assert run("info", "x", "y") == (0, 2 * "loss 1.5, größer\n", "")
    assert json.loads(run("info", "x", "y", "--json")[1]) == 2 * [Result().as_dict()]
    assert run("info")[0] == 2

    calls = called("ddnn.bench.step", "run_bench", Result())
    assert run("bench", "--network", "swbd", "--seconds", "1.5", "--threads", "2")[:2] == (0, "loss 1.5, größer\n")
    assert run("bench", "--plain", "--precision", "bf16")[0] == 0
    first = {"networks": ("swbd",), "device": "cpu", "seconds": 1.5, "threads": 2, "precisions": (), "plain": False}
    plain = {**first, "networks": ("an4",), "seconds": 20.0, "threads": 1, "precisions": ("bf16",), "plain": True}
    assert calls == [((), {**first, "minibatches": None}), ((), {**plain, "minibatches": None})]
    code, _, said = run("bench", "--plain", "--workers", "2")
    assert code == 2 and "--plain" in said and "omit --workers" in said


def test_score(run: Run, called: Any) -> None:
    from ddnn.decoding.options import DecodeOptions
    from ddnn.decoding.score import decode_options

    shown: dict[str, Any] = {"as_json": lambda result, alignments: {"wer": 4.14, "alignments": alignments}}
    shown |= {"render_text": lambda result, alignments: f"WER {alignments}\n", "decode_options": decode_options}
    calls = called("ddnn.decoding.score", "score", types.SimpleNamespace(best=0), **shown)
    arguments = ["score", "l", "--graph", "g", "--model", "m", "--text", "t"]
    assert run(*arguments) == (0, "WER False\n", "")
    code, out, _ = run(*arguments, "--acoustic-scale", "0.1,0.2", "--beam", "9", "--per-utterance", "--json")
    assert (code, json.loads(out)) == (0, {"wer": 4.14, "alignments": True})
    paths = {"graph_dir": Path("g"), "model": Path("m"), "text": Path("t")}
    options = {"options": DecodeOptions(), "out": None, "frame_shift": 0.01, "jobs": 1}
    assert calls[0] == ((Path("l"),), {**paths, **options})
    assert calls[1][1]["options"] == DecodeOptions((0.1, 0.2), beam=9.0)
    assert (
        run(*arguments, "--word-insertion-penalty", "0,0.5", "--out", "o", "--frame-shift", "0.03", "--nj", "3")[0] == 0
    )
    assert calls[2][1]["options"] == DecodeOptions(word_insertion_penalties=(0.0, 0.5))
    assert [calls[2][1][name] for name in ("out", "frame_shift", "jobs")] == [Path("o"), 0.03, 3]
    code, _, err = run(*arguments, "--acoustic-scale", "0.1", "--acoustic-scale-from", "dev.json")
    assert code == 2 and "given together with what it replaces\n  location: --acoustic-scale-from" in err
    code, _, err = run(*arguments, "--acoustic-scale", "0.1;0.2")
    assert (code, err) == (
        2,
        "ddnn: error: '0.1;0.2' found, expected numbers with commas between\n  location: --acoustic-scale\n"
        "  hint: give them as in --acoustic-scale 1,2,4\n",
    )


def test_user_error(run: Run, called: Any) -> None:
    called("ddnn.inspection.path", "describe_path", UserError("what is wrong", location="file", hint="do this"))
    assert run("info", "x") == (2, "", "ddnn: error: what is wrong\n  location: file\n  hint: do this\n")


def test_out_of_memory(run: Run, called: Any) -> None:
    called("ddnn.inspection.path", "describe_path", MemoryError())
    code, _, err = run("info", "x")
    assert code == 2
    assert err.startswith("ddnn: error: out of memory\n")


def test_keyboard_interrupt(run: Run, called: Any) -> None:
    called("ddnn.inspection.path", "describe_path", KeyboardInterrupt())
    code, out, err = run("info", "x")
    assert (code, out, err.strip()) == (130, "", "ddnn: interrupted")


BROKEN = """
import sys, types
from ddnn import cli
module = types.ModuleType("ddnn.inspection.path")
def describe_path(path):
    {body}
module.describe_path = describe_path
sys.modules["ddnn.inspection.path"] = module
sys.argv = ["ddnn", "info", "x"]
cli.main()
"""


def test_anything_else_is_a_bug_with_a_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", BROKEN.format(body="1 / 0")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "")
    assert "ZeroDivisionError" in done.stderr
    assert done.stderr.splitlines()[-1].startswith(f"ddnn: this is a bug in ddnn {__version__}; ")


def test_interrupt_signal() -> None:
    # A shell that starts this in the background has SIGINT ignored, which children inherit.
    body = "import signal, time; signal.signal(signal.SIGINT, signal.default_int_handler); print('ready', flush=True)"
    code = BROKEN.format(body=f"{body}; time.sleep(900)")
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=600)
    assert (child.returncode, err.strip()) == (130, "ddnn: interrupted")


@pytest.mark.parametrize(
    ("name", "said"), [("bash", "complete -o nosort"), ("zsh", "compdef"), ("fish", "complete --no-files")]
)
def test_completion_script(run: Run, name: str, said: str) -> None:
    code, out, err = run("completion", name)
    assert (code, err) == (0, "")
    assert said in out
    assert "_DDNN_COMPLETE" in out


def test_completion_completes() -> None:
    words = {"_DDNN_COMPLETE": "bash_complete", "COMP_WORDS": "ddnn tra", "COMP_CWORD": "1"}
    done = shell(env={**os.environ, **words})
    assert (done.returncode, done.stdout) == (0, "plain,train\n")
