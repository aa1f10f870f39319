"""The code imports only downward, in the order that docs/design.md gives."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ddnn"


def layers(design: str) -> dict[str, int]:
    """Module or package under ddnn -> height, from the line "`cli` > `info`, `bench` > ... > `errors`."."""
    line = next(line for line in design.splitlines() if line.startswith("`cli` > "))
    groups = line.rstrip(".").split(" > ")
    return {name: len(groups) - n for n, group in enumerate(groups) for name in re.findall(r"`(\w+)`", group)}


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


def violations(source: str, module: str, heights: dict[str, int], is_package: bool = False) -> list[str]:
    """What `module` imports that does not stand below it."""
    own = module.split(".")[1]
    found = []
    for name, line in imported(ast.parse(source), module, is_package):
        other = name.split(".")[1]
        if other == own or other == "__version__":
            continue
        if other not in heights:
            found.append(f"{module}:{line} imports {other}, which docs/design.md does not place")
        elif heights[other] >= heights[own]:
            found.append(f"{module}:{line} imports {other}, which does not stand below {own}")
    return found


HEIGHTS = layers((ROOT / "docs" / "design.md").read_text())
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def test_order_is_read_from_the_design() -> None:
    assert (
        HEIGHTS["cli"] > HEIGHTS["info"] == HEIGHTS["bench"] > HEIGHTS["decode"] > HEIGHTS["train"] > HEIGHTS["kaldi"]
    )
    assert min(HEIGHTS, key=HEIGHTS.__getitem__) == "errors"


def test_every_module_has_its_place() -> None:
    tops = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in MODULES}
    assert tops <= set(HEIGHTS), "name it in the order of docs/design.md"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downward(path: Path) -> None:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    assert violations(path.read_text(), module, HEIGHTS, path.name == "__init__.py") == []


def test_the_package_itself_imports_nothing() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]


@pytest.mark.parametrize(
    "source",
    [
        "import ddnn.train.loop",
        "from ddnn.train import loop",
        "from ddnn import train",
        "def f():\n    from ddnn.decode.score import score",
        "from ..train import loop",
        "from .. import train",
        "import importlib\nimportlib.import_module('ddnn.train.loop')",
        "from ddnn.nowhere import x",
    ],
)
def test_upward_imports_are_found(source: str) -> None:
    assert len(violations(source, "ddnn.kaldi.tables", HEIGHTS)) == 1


@pytest.mark.parametrize(
    "source",
    ["from ddnn.errors import UserError", "from .basic_io import x", "import numpy", "from ddnn import __version__"],
)
def test_downward_imports_are_allowed(source: str) -> None:
    assert violations(source, "ddnn.kaldi.tables", HEIGHTS) == []
