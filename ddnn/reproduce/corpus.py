"""`reproduce.yaml` beside the recipes of a corpus: its numbers of workers and seeds, and what its models are tested on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

import ddnn
from ddnn.recipe.source import read_yaml
from ddnn.reproduce.tables import FrozenModel, Name
from ddnn.util.errors import DataError, UserError

FILE = "reproduce.yaml"
README = "README.md"
"""Beside it, where there is one: says where the data come from."""
RENAMED = {"stack": "dbn_recipe", "same": "aliases", "many": "max_workers"}
_HINT = "docs/reproduce.md describes its keys"


class TestSet(FrozenModel):
    """What every model is tested on. Paths are relative to the working directory, then to the file."""

    __test__ = False  # not one of pytest's

    name: Name
    """What the tables call it."""
    data: Path
    """A Kaldi data dir."""
    alignments: Path | None = None
    """Its alignments: for the frame accuracy."""
    text: Path | None = None
    """The reference; with `graphs`."""
    graphs: dict[Name, Path] = Field(default={})
    """Name of a language model -> Kaldi graph dir, decoded by `ddnn score`. None: word error rates come from Kaldi."""
    model: Path | None = None
    """The `final.mdl` that the graphs were made with."""
    acoustic_scales: tuple[Annotated[float, Field(gt=0.0, lt=100.0)], ...] = (0.07, 0.1, 0.143)
    """The best one counts, for each run by itself."""


class ReproduceConfig(FrozenModel):
    """What to run on a corpus."""

    name: Name
    """What the tables call it."""
    recipes: str = "tables/{condition}.yaml"
    """The recipe of a condition, relative to this file; `{workers}` where each size has one of its own."""
    dbn_recipe: str = "tables/base.yaml"
    """The recipe of the RBMs; the runs of a seed share one DBN."""
    aliases: dict[Name, Name] = Field(default={})
    """Condition -> the condition that it equals on this corpus, and whose runs it shares: minibatch-256: base."""
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = (1, 2, 3)
    workers: tuple[Annotated[int, Field(ge=1, le=10_000)], ...]
    """Numbers of workers, smallest first."""
    max_workers: Annotated[int, Field(ge=2, le=10_000)]
    """The size of "many" in tables that compare one worker with many."""
    notes: dict[Name, Annotated[str, Field(max_length=4000)]] = Field(default={})
    """Name of a table -> what a reader has to know of it on this corpus; `all` comes at the top."""
    tests: tuple[TestSet, ...] = ()
    """By name in the file."""

    def recipe_name(self, condition: str) -> str:
        """The condition whose recipe and runs count for this one."""
        return self.aliases.get(condition, condition)


def find_corpus(name: str) -> Path:
    """The folder of a corpus: `recipes/NAME` in the working directory, a folder with a reproduce.yaml, that file, or
    `recipes/NAME` in ddnn's checkout.

    Raises:
        UserError: there is none.
    """
    if Path(name).name == FILE and Path(name).is_file():
        return Path(name).parent
    candidates = [Path("recipes", name), Path(name)]
    if Path(name).name == name:  # in an installed package there are no recipes
        candidates.append(Path(ddnn.__file__).parents[1] / "recipes" / name)
    for folder in candidates:
        if (folder / FILE).is_file():
            return folder
    raise UserError(
        f"no corpus {name!r}: neither {' nor '.join(str(folder / FILE) for folder in candidates)}",
        location=Path.cwd(),
        hint=f"name a folder with a {FILE}, as DDNN/recipes/{Path(name).name or 'NAME'} where DDNN is ddnn's checkout",
    )


def load_config(folder: Path) -> ReproduceConfig:
    """Reads reproduce.yaml and resolves its paths.

    Raises:
        DataError: it cannot be read, is not YAML, has an invalid value, or a path does not exist.
    """
    path = folder / FILE
    tree = _read_tree(path)
    for old in RENAMED.keys() & tree.keys():
        raise DataError(f"unknown key {old!r}", location=path, hint=f"the key is now called {RENAMED[old]!r}")
    try:
        config = ReproduceConfig.model_validate(tree)
    except ValidationError as error:
        detail = error.errors(include_url=False, include_context=False)[0]
        key = ".".join(map(str, detail["loc"])) or "the file"
        raise DataError(f"{key}: {detail['msg']}", location=path, hint=_HINT) from error
    if not config.seeds or len(set(config.seeds)) < len(config.seeds):
        raise DataError(f"seeds: {list(config.seeds)} found, expected one or more, each once", location=path)
    if "{condition}" not in config.recipes:
        raise DataError(f"recipes: expected {{condition}} in {config.recipes!r}", location=path, hint=_HINT)
    sizes = list(config.workers)
    if 1 not in sizes or config.max_workers not in sizes or sizes != sorted(set(sizes)):
        expected = f"rising sizes with 1 and {config.max_workers} (`max_workers`) among them"
        raise DataError(f"workers: {sizes} found, expected {expected}", location=path)
    return config.model_copy(update={"tests": tuple(_with_absolute_paths(test, folder) for test in config.tests)})


def _read_tree(path: Path) -> dict[str, Any]:
    """The file's values, nested; anchors, tags and the like are refused as in recipes."""
    read = read_yaml(path)
    for problem in read.problems:
        raise DataError(problem.text, location=problem.source, hint=_HINT)
    tree = read.nested()
    tests = tree.get("tests")
    if isinstance(tests, dict):  # by their names, so that no two have the same
        tree["tests"] = [{"name": name, **test} if isinstance(test, dict) else test for name, test in tests.items()]
    return tree


def test_digest(tests: Sequence[TestSet]) -> str:
    """SHA-256 of what models are tested on and how: names and sizes of files, not the folders that hold them."""
    fields = [
        [t.name, list(t.acoustic_scales), [file_fingerprint(p) for p in (t.data, t.alignments, t.text, t.model)]]
        + [[name, file_fingerprint(path)] for name, path in sorted(t.graphs.items())]
        for t in tests
    ]
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


def file_fingerprint(path: Path | None) -> list[object]:
    """What identifies a file or folder wherever it is: its name, and the size of it or of the files directly in it.

    Scripts (.scp) do not count: they hold paths.
    """
    if path is None:
        return []
    files = list(path.iterdir()) if path.is_dir() else [path]
    return [path.name, sum(file.stat().st_size for file in files if file.is_file() and file.suffix != ".scp")]


def _with_absolute_paths(test: TestSet, folder: Path) -> TestSet:
    if test.graphs and (test.model is None or test.text is None):
        raise DataError(f"test {test.name}: graphs need `model` and `text`", location=folder / FILE)

    def resolve(key: str, path: Path) -> Path:
        candidates = list(dict.fromkeys((Path.cwd() / path, folder.absolute() / path)))
        for candidate in candidates:
            if candidate.exists():
                return candidate.resolve()
        source = f"; {folder / README} says where they come from" if (folder / README).is_file() else ""
        raise DataError(
            f"tests.{test.name}.{key}: {path} does not exist: there is no {' and no '.join(map(str, candidates))}",
            location=folder / FILE,
            hint=f"run it in the folder from which this path leads to the data, or put the data there{source}",
        )

    keys = ("data", "alignments", "text", "model")
    changes = {key: resolve(key, value) for key in keys if (value := getattr(test, key)) is not None}
    graphs = {name: resolve(f"graphs.{name}", path) for name, path in test.graphs.items()}
    return test.model_copy(update={**changes, "graphs": graphs})
