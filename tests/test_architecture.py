"""The structure of the code: imports point downward, nothing grows unnoticed, and retired words do not come back."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from mutants import read_mutants

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ddnn"
FILES = sorted(PACKAGE.rglob("*.py"))

TOKENS = {
    "top": 3_350,
    "averaging": 10_515,
    "bench": 4_970,
    "cli": 6_650,
    "data": 16_150,
    "decoding": 17_540,
    "distributed": 13_550,
    "inspection": 6_550,
    "kaldi": 24_300,
    "lattices": 4_000,
    "nn": 31_800,
    "optim": 12_800,
    "recipe": 13_450,
    "report": 17_800,
    "reproduce": 18_750,
    "runs": 13_050,
    "slurm": 6_640,
    "synth": 5_250,
    "training": 41_865,
    "util": 7_500,
}
"""Tokens of the Python code of each folder of ddnn/ at most, without docstrings and comments; "top" is `ddnn/*.py`. Lines can be
made longer, tokens cannot. A feature states what it may take before it is begun: a commit of its own raises the folder's number and
gives the reason. What has become smaller is lowered."""

BUDGETS = {
    "modules over 400 lines": 16,
    "longest file": 660,
    "longest function": 55,
    "most imports of ddnn in a file": 38,
    "modules with one importer": 34,
    "modules that training.trainer imports, directly or not": 70,
}
"""What the code may be at most, by the same rule."""


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_name(path): path for path in FILES}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports_of(module: str) -> frozenset[str]:
    """Modules of ddnn that `module` imports: also inside functions and under TYPE_CHECKING."""
    found = set()
    for name, _ in imported(tree_of(MODULES[module]), module, MODULES[module].name == "__init__.py"):
        while name not in MODULES and "." in name:
            name = name.rpartition(".")[0]
        if name not in (module, "ddnn"):
            found.add(name)
    return frozenset(found)


def top_level_imports_of(module: str) -> set[str]:
    """As `imports_of`, without those inside functions."""
    tree = tree_of(MODULES[module])
    body = ast.Module([n for n in tree.body if not isinstance(n, ast.FunctionDef | ast.ClassDef)], [])
    names = {name for name, _ in imported(body, module, MODULES[module].name == "__init__.py")}
    return {name if name in MODULES else name.rpartition(".")[0] for name in names} & set(MODULES) - {module}


def imported(tree: ast.Module, module: str, is_package: bool) -> Iterator[tuple[str, int]]:
    """What a module imports of ddnn, also inside functions, with the line. `from ddnn import x` imports ddnn.x."""
    here = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = (
                ".".join([*here[: len(here) - node.level + 1], *filter(None, [node.module])])
                if node.level
                else node.module
            )
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "import_module",
            "importlib.import_module",
            "__import__",
        ):
            names = [node.args[0].value if isinstance(node.args[0], ast.Constant) else "ddnn.?"]
        yield from ((name, node.lineno) for name in names if name.startswith("ddnn."))


def levels(design: str) -> dict[str, int]:
    """Folder under ddnn -> level, from the line "`cli`, `api` > `reproduce` > ... > `util`" of docs/development/design.md."""
    line = next(line for line in design.splitlines() if line.startswith("`cli`, "))
    groups = line.rstrip(".").split(" > ")
    return {name: len(groups) - n for n, group in enumerate(groups) for name in re.findall(r"`(\w+)`", group)}


LEVELS = levels((ROOT / "docs" / "development" / "design.md").read_text())


def violations(source: str, module: str, is_package: bool = False) -> list[str]:
    """The imports of `module` that do not point downward."""
    own = module.split(".")[1]
    found = []
    for name, line in imported(ast.parse(source), module, is_package):
        other = name.split(".")[1]
        if other in (own, "__version__"):
            continue
        if other not in LEVELS:
            found.append(
                f"{module}:{line} imports {other}, which has no place in the order of docs/development/design.md"
            )
        elif LEVELS[other] >= LEVELS[own]:
            found.append(f"{module}:{line} imports {other}, which is not below {own}")
    return found


def test_imports_point_downward() -> None:
    tops = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES} - {"__init__", "__main__"}
    assert tops <= set(LEVELS), "docs/development/design.md has the order of the folders: name the new one there"
    found = [
        line
        for module, path in MODULES.items()
        if module != "ddnn" and module.split(".")[1] in LEVELS
        for line in violations(path.read_text(), module, path.name == "__init__.py")
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import ddnn.training.trainer",
        "from ddnn import training",
        "def f():\n    from ddnn.decoding.score import score",
        "from ..training import trainer",
        "import importlib\nimportlib.import_module('ddnn.training.trainer')",
        "from ddnn.nowhere import x",
    ],
)
def test_upward_imports_are_found(source: str) -> None:
    assert len(violations(source, "ddnn.kaldi.archive")) == 1


def test_downward_imports_are_allowed() -> None:
    source = "from ddnn.util.errors import UserError\nfrom .scp import x\nimport numpy\nfrom ddnn import __version__"
    assert violations(source, "ddnn.kaldi.archive") == []


def test_no_import_circle_among_files() -> None:
    """Counts every import, those under TYPE_CHECKING and inside functions too."""
    state: dict[str, int] = {}
    circles: list[list[str]] = []

    def visit(module: str, path: list[str]) -> None:
        if state.get(module) == 2:
            return
        if state.get(module) == 1:
            circles.append([*path[path.index(module) :], module])
            return
        state[module] = 1
        for other in sorted(imports_of(module)):
            if not other.startswith(module + ".") and MODULES[other].name != "__init__.py":
                visit(other, [*path, module])
        state[module] = 2

    for module in MODULES:
        visit(module, [])
    assert circles == []


def functions() -> Iterator[tuple[int, str]]:
    for module, path in MODULES.items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield (node.end_lineno or 0) - node.lineno + 1, f"{module}.{node.name}"


def num_tokens(source: str) -> int:
    """Tokens of Python source, without docstrings, comments and white space."""
    docstrings = {
        node.value.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    return sum(
        token.type not in ignored and not (token.type == tokenize.STRING and token.start[0] in docstrings)
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
    )


@cache
def tokens_of_folders() -> dict[str, int]:
    tokens: dict[str, int] = defaultdict(int)
    for path in FILES:
        folder = path.relative_to(PACKAGE).parts[0]
        tokens["top" if folder.endswith(".py") else folder] += num_tokens(path.read_text())
    return tokens


def test_tokens_count_code_alone() -> None:
    source = '"""Doc."""\n\n# why\ndef f(x: int) -> str:\n    """Doc of\n    two lines."""\n    return "x" * x  # why\n'
    assert num_tokens(source) == len(
        ["def", "f", "(", "x", ":", "int", ")", "->", "str", ":", "return", "'x'", "*", "x"]
    )


def test_every_folder_has_a_budget() -> None:
    assert set(tokens_of_folders()) == set(TOKENS)


@pytest.mark.parametrize("folder", TOKENS)
def test_tokens(folder: str) -> None:
    figure, budget = tokens_of_folders()[folder], TOKENS[folder]
    assert figure <= budget, (
        f"ddnn/{folder} has {figure} tokens, its budget is {budget}: make it smaller. If a feature needs more, raise the "
        "number in TOKENS in a commit of its own that says which feature, how many tokens it takes and why not fewer"
    )


@pytest.mark.parametrize("folder", TOKENS)
def test_token_budgets_are_tight(folder: str) -> None:
    """What has become smaller stays smaller."""
    figure, budget = tokens_of_folders()[folder], TOKENS[folder]
    assert figure >= 0.95 * budget, f"ddnn/{folder} has {figure} tokens, so lower its budget of {budget}"


def measured() -> dict[str, tuple[int, str]]:
    """The figures of `BUDGETS` as they are, and where the largest is."""
    lines = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}
    plain = [module for module, path in MODULES.items() if path.name != "__init__.py"]
    importers = defaultdict(set)
    for module in MODULES:
        for other in imports_of(module):
            importers[other].add(module)
    reached, todo = set(), ["ddnn.training.trainer"]
    while todo:
        new = top_level_imports_of(todo.pop()) - reached
        reached |= new
        todo += new
    longest_file = max(plain, key=lambda module: lines[module])
    widest = max(plain, key=lambda module: len(imports_of(module)))
    return {
        "modules over 400 lines": (sum(lines[module] > 400 for module in plain), ""),
        "longest file": (lines[longest_file], longest_file),
        "longest function": max(functions()),
        "most imports of ddnn in a file": (len(imports_of(widest)), widest),
        "modules with one importer": (sum(len(importers[module]) == 1 for module in plain), ""),
        "modules that training.trainer imports, directly or not": (len(reached), ""),
    }


@pytest.mark.parametrize("name", BUDGETS)
def test_budgets(name: str) -> None:
    figure, where = measured()[name]
    assert figure <= BUDGETS[name], f"{name}: {figure} {where}, budget {BUDGETS[name]}: make it smaller"


RETIRED = (
    r"mend(s|ed|ing)?",
    r"go(es|ing|ne)? on (with|from|by|where|to|in)",
    r"went on",
    r"broken off",
    r"wish(es)?",
    r"laps?",
    r"meets?",
    r"judg(e|es|ed|ing)",
    r"left out",
    r"in a glance",
    r"at a glance",
    r"anew",
    r"last[_ ]words",
    r"survivors?",
    r"patience",
    r"sum_in_place",
    r"written_whole",
    r"Exchange",
    r"Mixing",
    r"of_gradients",
)
"""Words that docs, messages and code used in a private sense, as regular expressions of whole words."""

EXEMPT = ("docs/results/",)


def texts() -> Iterator[tuple[str, str]]:
    for pattern in (
        "ddnn/**/*.py",
        "ddnn/**/*.j2",
        "ddnn/**/*.c",
        "docs/**/*.md",
        "README.md",
        "configs/**/*",
        "recipes/**/*.md",
        "recipes/**/*.py",
        "recipes/**/*.yaml",
    ):
        for path in sorted(ROOT.glob(pattern)):
            name = str(path.relative_to(ROOT))
            if path.is_file() and not name.startswith(EXEMPT):
                yield name, path.read_text(errors="replace")


@pytest.mark.parametrize("word", RETIRED)
def test_retired_words_do_not_come_back(word: str) -> None:
    pattern = re.compile(rf"\b{word}\b", re.IGNORECASE if word.islower() else 0)
    found = [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()}"
        for name, text in texts()
        for match in pattern.finditer(text)
    ]
    assert found == []


CHOSEN_ONCE = (r"\bkernels is (not )?None", r"\.size == 1\b", r"\.world_size == 1\b", r"\bof_gradients\b", r"\.alone\b")
"""Decisions that belong to objects chosen at the start."""


def test_the_training_loop_decides_nothing() -> None:
    """Its functions have no `if` at all but on what the schedule and the averager return, and fit on a screen."""
    tree = tree_of(PACKAGE / "training" / "loop.py")
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert [function.name for function in functions] == ["train_epoch", "warm_up", "train"]
    tests = [
        ast.unparse(node.test)
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.If | ast.IfExp | ast.While)
    ]
    assert sorted(tests) == [
        "accepted",
        "not t.progress.started",
        "not t.schedule.finished",
        "t.averager.after_minibatch(batch.num_frames)",
        "trainer.warmup != 'none'",
    ]
    assert (functions[-1].end_lineno or 0) - functions[0].lineno < 60


@pytest.mark.parametrize("folder", ["training", "optim", "averaging"])
@pytest.mark.parametrize("pattern", CHOSEN_ONCE)
def test_choices_are_made_once(folder: str, pattern: str) -> None:
    # Where an object is chosen, or one worker has nothing to send.
    allowed = {"choice.py": 2, "strategies.py": 1, "strategy.py": 2, "job.py": 1, "options.py": 1, "pretraining.py": 1}
    for path in sorted((PACKAGE / folder).glob("*.py")):
        assert len(re.findall(pattern, path.read_text())) <= allowed.get(path.name, 0), path.name


def test_the_package_itself_imports_nothing() -> None:
    """Until something of `ddnn.api` is used; but for type checkers."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    imports = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert imports == ["from typing import TYPE_CHECKING, Any"]
    assert [ast.unparse(node.test) for node in tree.body if isinstance(node, ast.If)] == ["TYPE_CHECKING"]


def test_every_mistake_of_mutants_yaml_can_still_be_made() -> None:
    """`make mutants` takes too long for each change; that its texts follow the code is seen at once."""
    mistakes = read_mutants()
    rows = [mistake.row for mistake in mistakes]
    assert len(set(rows)) == len(rows) >= 60
    for mistake in mistakes:
        assert mistake.applied((ROOT / mistake.file).read_text()) != (ROOT / mistake.file).read_text(), mistake.row
        for test in mistake.tests:
            file, _, function = test.partition("::")
            assert f"def {function.partition('[')[0]}" in (ROOT / file).read_text(), f"row {mistake.row}: {test}"
