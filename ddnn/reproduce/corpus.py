"""`reproduce.yaml` beside the recipes of a corpus: its sizes and seeds, and what its models are tested on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

import ddnn
from ddnn.errors import DataError, UserError
from ddnn.recipe.yaml_tree import parse_file, read_file

FILE = "reproduce.yaml"
README = "README.md"
"""Beside it, where there is one: says where the data come from."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.' -]{1,60}$")]


class Part(BaseModel):
    """A mapping of the file: immutable, no keys but its own."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TestSet(Part):
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
    graphs: dict[Name, Path] = {}
    """Name of a language model -> Kaldi graph dir, decoded by `ddnn score`. None: word error rates come from Kaldi."""
    model: Path | None = None
    """The `final.mdl` that the graphs were made with."""
    acoustic_scales: tuple[Annotated[float, Field(gt=0.0, lt=100.0)], ...] = (0.07, 0.1, 0.143)
    """The best one counts, for each run by itself."""


class CorpusPlan(Part):
    """What to run on a corpus."""

    name: Name
    """What the tables call it."""
    recipes: str = "tables/{setting}.yaml"
    """Where the recipe of a setting lies, beside this file; `{workers}` where each size has one of its own."""
    stack: str = "tables/base.yaml"
    """The recipe of the RBMs, of which each seed has one stack for all its runs."""
    same: dict[Name, Name] = {}
    """Setting -> the setting that it is on this corpus, and with which it shares its runs: minibatch-256: base."""
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = (1, 2, 3)
    workers: tuple[Annotated[int, Field(ge=1, le=10_000)], ...]
    """Sizes, smallest first."""
    many: Annotated[int, Field(ge=2, le=10_000)]
    """The size of "many" in tables that contrast one worker with many."""
    notes: dict[Name, Annotated[str, Field(max_length=4000)]] = {}
    """Name of a table -> what a reader has to know of it on this corpus; `all` stands at the top."""
    tests: tuple[TestSet, ...] = ()
    """By name in the file."""


def find_corpus(name: str) -> Path:
    """The folder of a corpus: `recipes/NAME` in the working directory, a folder with a reproduce.yaml, that file, or
    `recipes/NAME` in ddnn's checkout.

    Raises:
        UserError: there is none.
    """
    if Path(name).name == FILE and Path(name).is_file():
        return Path(name).parent
    tried = [Path("recipes", name), Path(name)]
    if Path(name).name == name:  # in an installed package there are no recipes
        tried.append(Path(ddnn.__file__).parents[1] / "recipes" / name)
    for folder in tried:
        if (folder / FILE).is_file():
            return folder
    raise UserError(
        f"no corpus {name!r}: neither {' nor '.join(str(folder / FILE) for folder in tried)}",
        where=Path.cwd(),
        mend=f"name a folder with a {FILE}, as DDNN/recipes/{Path(name).name or 'NAME'} where DDNN is ddnn's checkout",
    )


def load_corpus_plan(folder: Path) -> CorpusPlan:
    """Reads reproduce.yaml and finds its paths.

    Raises:
        DataError: it cannot be read, is no YAML or says what cannot be, or a path does not exist.
    """
    path = folder / FILE
    try:
        plan = CorpusPlan.model_validate(_tree(path))
    except ValidationError as error:
        detail = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, detail["loc"])) or "the file"
        raise DataError(f"{place}: {detail['msg']}", where=path, mend="docs/reproduce.md says what it holds") from error
    if not plan.seeds or len(set(plan.seeds)) < len(plan.seeds):
        raise DataError(f"seeds: {list(plan.seeds)} found, expected one or more, each once", where=path)
    if 1 not in plan.workers or plan.many not in plan.workers or list(plan.workers) != sorted(set(plan.workers)):
        raise DataError(
            f"workers: {list(plan.workers)} found, expected rising sizes with 1 and {plan.many} (`many`) among them",
            where=path,
        )
    return plan.model_copy(update={"tests": tuple(_found(test, folder) for test in plan.tests)})


def _tree(path: Path) -> dict[str, Any]:
    """What the file says, nested; anchors, tags and the like are refused as in recipes."""
    text, problems = read_file(path, str(path))
    values, more = ({}, []) if text is None else parse_file(text, str(path))
    for problem in [*problems, *more]:
        raise DataError(problem.text, where=problem.source, mend="docs/reproduce.md says what it holds")
    tree: dict[str, Any] = {}
    for (*above, last), given in values.items():
        place = tree
        for part in above:
            place = place.setdefault(part, {})
        place[last] = given.value
    tests = tree.get("tests")
    if isinstance(tests, dict):  # by their names, so that no two have the same
        tree["tests"] = [{"name": name, **test} if isinstance(test, dict) else test for name, test in tests.items()]
    return tree


def judged_by(tests: Sequence[TestSet]) -> str:
    """SHA-256 of what models are tested on and how: names and sizes of files, not the folders that they lie in."""
    facts = [
        [t.name, list(t.acoustic_scales), [named(p) for p in (t.data, t.alignments, t.text, t.model)]]
        + [[name, named(path)] for name, path in sorted(t.graphs.items())]
        for t in tests
    ]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def named(path: Path | None) -> list[object]:
    """By what a file or folder is known wherever it lies: its name, and the size of it or of the files right in it, but
    of scripts, which hold paths."""
    if path is None:
        return []
    files = list(path.iterdir()) if path.is_dir() else [path]
    return [path.name, sum(file.stat().st_size for file in files if file.is_file() and file.suffix != ".scp")]


def _found(test: TestSet, folder: Path) -> TestSet:
    """With absolute paths."""
    if test.graphs and (test.model is None or test.text is None):
        raise DataError(f"test {test.name}: graphs need `model` and `text`", where=folder / FILE)

    def find(key: str, path: Path) -> Path:
        tried = list(dict.fromkeys((Path.cwd() / path, folder.absolute() / path)))
        for candidate in tried:
            if candidate.exists():
                return candidate.resolve()
        said = f"; {folder / README} says where they come from" if (folder / README).is_file() else ""
        raise DataError(
            f"tests.{test.name}.{key}: {path} does not exist: there is no {' and no '.join(map(str, tried))}",
            where=folder / FILE,
            mend=f"run it in the folder from which this path leads to the data, or put the data there{said}",
        )

    keys = ("data", "alignments", "text", "model")
    changes = {key: find(key, value) for key in keys if (value := getattr(test, key)) is not None}
    graphs = {name: find(f"graphs.{name}", path) for name, path in test.graphs.items()}
    return test.model_copy(update={**changes, "graphs": graphs})
