"""Every command line of the pages, the help texts and the recipes is one that ddnn, make and the scripts accept.

bash itself reads each page's code blocks, with their loops, functions and variables, but finds no program: a command that it
would start is written down with its arguments instead. The trainings among them are then checked as by --dry-run --no-data.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import partial
from importlib.metadata import metadata
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner

from ddnn.cli.main import cli
from ddnn.recipe.schema import Recipe
from ddnn.slurm import submit
from ddnn.slurm.cluster import ClusterConfig
from ddnn.util.errors import UserError

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("recipes/**/*.md")]
BLOCK = re.compile(r"^```([^\n`]*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\s*(\$ )?(.*\s)?(ddnn|make|python|pip) [a-z./<'-]", re.MULTILINE)
RECORD = r"""
PATH=/nowhere; cd() { :; }; .() { :; }
command_not_found_handle() { local IFS=$'\x1f'; echo "$*" >> "$CALLS"; }
"""
OURS = re.compile(r"(?:recipes|tests|docs|configs)/[^*]+")
"""A word that names something of the project, which must exist."""
WRITTEN = {"--out", "--report"}
"""Options whose values need not exist."""
LAUNCHERS = {"ddnn", "mpirun", "srun", "apptainer"}
DEFAULT = "data: {train: train, alignments: ali}\n"
"""In place of a recipe that no block of the page has."""


def shell_blocks(page: Path) -> str:
    """The commands of a page: of a block with prompts, the lines behind them; of a recipe, those of its comment."""
    text = page.read_text()
    if page.suffix == ".sh":
        return text
    if page.suffix == ".yaml":
        return "\n".join(re.findall(r"^#   ((?:ddnn|sh|python) (?:.*\\\n#)*.*)", text, re.MULTILINE)).replace(
            "\\\n#", ""
        )
    blocks = [block for kind, block in BLOCK.findall(text) if kind in ("", "sh", "bash") and COMMAND.search(block)]
    sessions = ["\n".join(re.findall(r"^\$ ((?:.*\\\n)*.*)", block, re.MULTILINE)) or block for block in blocks]
    return "\n".join(block for block in sessions if not block.startswith("#!"))


SOURCES = [
    page
    for page in sorted([*PAGES, *ROOT.glob("recipes/**/*.yaml"), *ROOT.glob("recipes/**/*.sh")])
    if shell_blocks(page)
]


def calls(script: str, folder: Path) -> list[list[str]]:
    """The words of each command that bash would start, in `folder`."""
    script = re.sub(r" > \S+", "", script).replace("/path/to/ddnn/", "")
    read = subprocess.run(["bash", "-n", "-c", script], capture_output=True, text=True, check=False)
    assert read.returncode == 0, read.stderr
    file = folder / "calls"
    file.touch()
    command = ["bash", "-c", RECORD + script, "page", "1", "2"]
    subprocess.run(command, cwd=folder, env={"CALLS": str(file)}, capture_output=True, timeout=60, check=False)
    return [line.split("\x1f") for line in dict.fromkeys(file.read_text().splitlines())]


def write_recipes(page: Path) -> None:
    """Those that the blocks of a page have, into this folder, by the names in their first lines; and its cluster files, copied or its own."""
    for source, copy in re.findall(r"cp (configs/cluster/\S+) (\S+)", page.read_text()):
        Path(copy).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / source, copy)
    Path("recipe.yaml").write_text(DEFAULT)
    for kind, block in BLOCK.findall(page.read_text()):
        name = re.match(r"# (\S+\.yaml)\n|", block)[1]
        if kind == "yaml" and set(yaml.safe_load(block)) <= {"include", *Recipe.model_fields}:
            Path(name or "recipe.yaml").write_text(block if "data" in yaml.safe_load(block) else DEFAULT + block)
        elif kind == "yaml" and name is not None and set(yaml.safe_load(block)) <= set(ClusterConfig.model_fields):
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(block)


def check_ddnn(words: list[str]) -> None:
    """Raises what `ddnn` would on this command line; a training is checked without its data."""
    if words == ["--version"]:
        return
    assert words[0] in cli.commands, f"ddnn has no {words[0]}"
    context = cli.commands[words[0]].make_context(words[0], words[1:])
    if words[0] in ("train", "pretrain"):
        recipe = context.params["recipe"]
        arguments = [word for word in words[1:] if word not in ("--resume", "--resume=auto", "--dry-run")]
        if not recipe.exists() and Path("recipe.yaml").exists():
            arguments += ["--set=init=rbm"] if words[0] == "pretrain" else []
            arguments = ["recipe.yaml" if word == str(recipe) else word for word in arguments]
        dry_run = ["--dry-run"] if "--slurm" in arguments else ["--dry-run", "--no-data"]
        done = CliRunner().invoke(cli, [words[0], *arguments, *dry_run])
        if done.exception is not None:
            raise done.exception


def check(words: list[str]) -> None:
    """Raises what is wrong with a command."""
    for before, word in zip(["", *words], words, strict=False):
        path = word.rpartition("=")[2]
        if OURS.fullmatch(path) and before not in WRITTEN:
            assert (ROOT / path).exists() or Path(path).exists(), f"there is no {path}"
    if "ddnn" in words:
        assert words[0] in LAUNCHERS, f"what is {words[0]}?"
        check_ddnn(words[words.index("ddnn") + 1 :])
    elif words[0] == "make":
        makefile = (ROOT / "Makefile").read_text()
        for word in words[1:]:
            name = word.partition("=")[0]
            known = rf"\b{name} \?=|\$\({name}\)" if "=" in word else rf"^{name}:"
            assert re.search(known, makefile, re.MULTILINE), f"make has no {name}"
    elif words[0] in ("python", "sh") and words[1].endswith((".py", ".sh")):
        script = (ROOT / words[1]).read_text()
        for option in re.findall(r"^--[a-z-]+", "\n".join(words[2:]), re.MULTILINE):
            assert f'"{option}"' in script, f"{words[1]} has no {option}"
    elif words[0] == "pip":
        extras = set(metadata("ddnn").get_all("Provides-Extra"))
        for names in re.findall(r"\.\[(.*)\]", " ".join(words)):
            assert set(names.split(",")) <= extras, names


def problem(words: list[str]) -> str:
    """What is wrong with a command; empty: nothing."""
    try:
        check(words)
    except (AssertionError, click.ClickException, UserError) as error:
        return f"{' '.join(words)}: {error.format_message() if isinstance(error, click.ClickException) else error}"
    return ""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_cli: object) -> Path:
    """The current folder: it has the recipes, but no data. `run_cli` restores what --quiet changes."""
    monkeypatch.chdir(tmp_path)
    Path("recipes").symlink_to(ROOT / "recipes")
    monkeypatch.setattr(submit, "read_recipe", partial(submit.read_recipe, must_exist=False))
    return tmp_path


@pytest.mark.parametrize("page", SOURCES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_the_pages_are_accepted(page: Path, folder: Path) -> None:
    if page.suffix == ".md":
        write_recipes(page)
    wrong = [error for words in calls(shell_blocks(page), folder) if (error := problem(words))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "page", sorted({*PAGES} - {ROOT / "CHANGELOG.md"}), ids=lambda page: str(page.relative_to(ROOT))
)
def test_options_named_in_sentences_exist(page: Path) -> None:
    for name, words in re.findall(r"`ddnn ([a-z0-9-]+)((?:\s[^`|]*)?)`", page.read_text()):
        assert name in cli.commands, f"ddnn has no {name}"
        known = {option for parameter in cli.commands[name].params for option in parameter.opts} | {"--help"}
        assert set(re.findall(r"(?<=\s)--[a-z-]+", words)) <= known, f"ddnn {name}{words}"


def test_commands_of_the_help_are_accepted(folder: Path) -> None:
    Path("recipe.yaml").write_text(DEFAULT)
    epilogs = "\n".join(command.epilog or "" for command in (cli, *cli.commands.values()))
    lines = re.findall(r"^ +((?:cd .*)?ddnn (?:[^ \n]| (?! ))*)", epilogs, re.MULTILINE)
    found = calls("\n".join(re.sub(r"(&& )?ddnn [a-z-]+ \S+ \.\.\.", "", line) for line in lines), folder)
    assert len(found) > 25
    wrong = [error for words in found if (error := problem(words))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("ddnn evaluate exp/dnn --data test", "Missing option '--alignments'"),
        ("ddnn bench --network vgg", "'vgg' is not one of"),
        ("mpirun -n 4 ddnn train my.yaml --epoch 3", "No such option"),
        ("ddnn trian my.yaml", "ddnn has no trian"),
        ("twice ddnn train my.yaml", "what is twice"),
        ("ddnn train my.yaml --set schedule.nme=newbob", "schedule.nme"),
        ("run() { ddnn train my.yaml --set minibatch_size=$1 \\\n --set seed=1; }; run 0.5", "minibatch_size"),
        ("for net in dnn rnn; do ddnn train recipes/fsdd/$net.yaml; done", "there is no recipes/fsdd/rnn.yaml"),
        ("ddnn train my.yaml --workers 3 --set parallel.columns=2", "parallel.columns"),
        ("ddnn train my.yaml --nodes 2", "--nodes without --slurm"),
        ("cd elsewhere && make demos", "make has no demos"),
        ("make gpu DEVICES=cpu", "make has no DEVICES"),
        ("sh recipes/an4/study.sh", "there is no recipes/an4/study.sh"),
        ("python tests/compare.py --epoch 2", "tests/compare.py has no --epoch"),
        ("pip install -e '.[mpi,plots]'", "mpi,plots"),
    ],
)
def test_wrong_commands_are_noticed(command: str, expected: str, folder: Path) -> None:
    Path("recipe.yaml").write_text(DEFAULT)
    problems = [problem(words) for words in calls(command, folder)]
    assert expected in problems[-1]
