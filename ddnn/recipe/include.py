"""A recipe's files: the fragments that it includes, found and merged; nearer files win."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ddnn.recipe.yaml_tree import Dotted, Given, Problem, parse_file, read_file, shown

MOST_FILES = 20


@dataclass
class Gathered:
    """Values by dotted key from all sources, the later and nearer one winning, and what was wrong on the way."""

    values: dict[str, Given] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    files: int = 0

    def take(self, values: dict[Dotted, Given]) -> None:
        for path, given in values.items():
            self.values[".".join(path)] = given


def configs_folder() -> Path:
    """The folder of the fragments that come with ddnn: inside an installed package, else beside it in a checkout."""
    installed = Path(__file__).parents[1] / "configs"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "configs"


def fragments() -> list[str]:
    """Names of the fragments that come with ddnn, as `include` takes them: not cluster settings and measured times."""
    names = (path.relative_to(configs_folder()).as_posix() for path in configs_folder().rglob("*.yaml"))
    return sorted(name for name in names if not name.startswith(("cluster/", "measured/")))


def gather_file(path: Path, name: str, into: Gathered, including: tuple[Path, ...] = ()) -> None:
    """Reads a recipe or fragment, called `name` in messages, after the files it includes, `into` what is gathered.

    `including` are the files, resolved, that led here. Problems are gathered, not raised.
    """
    into.files += 1
    text, problems = read_file(path, name)
    into.problems += problems
    if text is None:
        return
    values, problems = parse_file(text, name)
    into.problems += problems
    include = values.pop(("include",), None)
    for path_in_include in [p for p in values if p[0] == "include"]:
        include = Given({}, values.pop(path_in_include).source)
    if include is not None:
        _gather_includes(include, path.parent, into, (*including, path.resolve()))
    into.take(values)


def _gather_includes(include: Given, folder: Path, into: Gathered, chain: tuple[Path, ...]) -> None:
    for wanted in _included(include, into):
        if into.files >= MOST_FILES:
            into.problems.append(Problem(f"include: more than {MOST_FILES} files in all", include.source, unread=True))
            return
        found = _find_fragment(wanted, folder, include.source, into)
        if found is None:
            continue
        if found.resolve() in chain:
            text = f"include: {wanted} includes itself, by way of {' -> '.join(p.name for p in chain)}"
            into.problems.append(Problem(text, include.source, unread=True))
            continue
        gather_file(found, str(found), into, chain)


def _included(include: Given, into: Gathered) -> list[str]:
    if include.value is None:
        return []
    wanted = include.value if isinstance(include.value, list) else [include.value]
    if all(isinstance(name, str) and name and "\0" not in name for name in wanted):
        return wanted
    text = f"include: {shown(include.value)} found, expected a file name or a list of them"
    into.problems.append(Problem(text, include.source, unread=True))
    return []


def _find_fragment(wanted: str, folder: Path, source: str, into: Gathered) -> Path | None:
    tried = [folder / wanted, configs_folder() / wanted]
    for candidate in tried:
        if exists(candidate):
            return candidate
    text = f"include: {wanted} is neither {tried[0]} nor {tried[1]}; ddnn comes with {', '.join(fragments()) or 'none'}"
    into.problems.append(Problem(text, source, unread=True))
    return None


def exists(path: Path) -> bool:
    """Whether there is something at `path`; False too where one may not look, or where no file can have such a name."""
    try:
        path.stat()
    except (OSError, ValueError):
        return False
    return True
