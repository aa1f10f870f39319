"""YAML and JSON as ddnn reads them: plain values, each with the file and line it comes from, checked by a model.

Nothing is constructed but numbers, true/false, text, lists and mappings; anchors, aliases and tags are refused. All that
is wrong with a file is gathered and said at once, with the line and, of an unknown key, the nearest known one.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from ddnn.recipe.yaml_parser import KeyPath, Problem, SourceValue, format_value, parse_file
from ddnn.util.errors import DataError, UserError
from ddnn.util.files import open_regular, read_bytes_limited

MOST_BYTES = 100_000
MOST_FILES = 20
"""That a recipe may include, directly or not."""
MOST_SUGGESTIONS = 50
"""Of keys: where more are unknown, it is something else."""

Model = TypeVar("Model", bound=BaseModel)


@dataclass
class SourceTree:
    """Values by dotted key, of one file or merged from several, the later ones winning, and what was wrong with them."""

    values: dict[str, SourceValue] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    files: int = 0

    def update(self, values: Mapping[KeyPath, SourceValue]) -> None:
        """Takes further values, which win over those that are there."""
        for path, value in values.items():
            self.values[".".join(path)] = value

    def nested(self) -> dict[str, Any]:
        """The plain values as nested dicts."""
        return nested({name: given.value for name, given in self.values.items()})

    def source_of(self, name: str) -> str | None:
        """Where a key comes from: its own value, the first below it, or the one around it."""
        if name in self.values:
            return self.values[name].source
        below = (given.source for other, given in self.values.items() if other.startswith(f"{name}."))
        around = name.rpartition(".")[0]
        return next(below, self.source_of(around) if around else None)

    @property
    def unread(self) -> bool:
        """Whether some of it was not read."""
        return any(problem.unread for problem in self.problems)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by dotted key as nested dicts. Where a key is both a value and a mapping, the mapping wins."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *above, last = name.split(".")
        place = tree
        for part in above:
            if not isinstance(place.get(part), dict):
                place[part] = {}
            place = place[part]
        place[last] = value
    return tree


def read_yaml(path: Path, max_bytes: int = MOST_BYTES) -> SourceTree:
    """The values of one file, and all that is wrong with it as YAML, for `validate`."""
    tree = SourceTree(files=1)
    text, tree.problems = read_file(path, str(path), max_bytes)
    if text is not None:
        values, problems = parse_file(text, str(path))
        tree.update(values)
        tree.problems += problems
    return tree


def read_json(
    model: type[Model], path: Path, max_bytes: int, *, error: type[UserError] = DataError, hint: str | None = None
) -> Model:
    """A JSON file as a model.

    Raises:
        UserError: of the class `error`: it cannot be read, is larger than `max_bytes`, is not JSON, or not of this form.
    """
    try:
        text = read_bytes_limited(path, max_bytes)
    except OSError as failure:
        raise error(f"cannot read: {failure.strerror}", location=path, hint=hint) from failure
    return validate(model, text, path, error=error, hint=hint)


def validate(
    model: type[Model],
    tree: SourceTree | Mapping[str, Any] | str | bytes,
    location: str | os.PathLike[str],
    *,
    error: type[UserError] = DataError,
    hint: str | None = None,
    strict: bool | None = None,
) -> Model:
    """A model of what a file says: of a SourceTree, of plain values, or of JSON text.

    `strict`: whether "3" is no number; None: as the model is configured.

    Raises:
        UserError: of the class `error`, at `location`: all that is wrong, one a line.
    """
    problems = [str(problem) for problem in tree.problems] if isinstance(tree, SourceTree) else []
    if not (isinstance(tree, SourceTree) and tree.unread):
        try:
            if isinstance(tree, (str, bytes)):
                return model.model_validate_json(tree, strict=strict)
            found = model.model_validate(tree.nested() if isinstance(tree, SourceTree) else tree, strict=strict)
            if not problems:
                return found
        except ValidationError as failure:
            problems += describe(failure, model, tree if isinstance(tree, SourceTree) else None)
    raise error(listed(problems), location=location, hint=hint)


def listed(problems: Sequence[str], what: str = "problems") -> str:
    """One problem as it is; several under a line that counts them."""
    lines = list(dict.fromkeys(problems))
    return lines[0] if len(lines) == 1 else f"{len(lines)} {what}:" + "".join(f"\n  - {line}" for line in lines)


def describe(error: ValidationError, model: type[BaseModel], tree: SourceTree | None = None) -> list[str]:
    """A sentence for each thing that pydantic found wrong: "KEY: VALUE found: why", with the source where it is known."""
    lines = []
    for number, detail in enumerate(error.errors(include_url=False, include_context=False)):
        place = [part for part in detail["loc"] if part != "[key]"]
        name = ".".join(map(str, place))
        if detail["type"] == "missing":
            text = f"{name}: missing"
        elif detail["type"] == "extra_forbidden":
            meant = f"; {_nearest(str(place[-1]), model, place[:-1])}" if number < MOST_SUGGESTIONS else ""
            text = f"{name if name.isprintable() else repr(name)}: unknown key{meant}"
        elif detail["type"] == "json_invalid":
            text = f"not JSON: {detail['msg'].removeprefix('Invalid JSON: ')}"
        else:
            why = detail["msg"].removeprefix("Value error, ")
            text = f"{name}: {format_value(detail['input'])} found: {why}" if name else why
        source = None if tree is None or not name else tree.source_of(name)
        lines.append(text if source is None else str(Problem(text, source)))
    return lines


def _nearest(unknown: str, model: type[BaseModel], above: Sequence[int | str]) -> str:
    for part in above:
        inner = model.model_fields[part].annotation if isinstance(part, str) and part in model.model_fields else None
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            return "it is not known here"
        model = inner
    near = difflib.get_close_matches(unknown, model.model_fields, n=1)
    return f"did you mean {near[0]}?" if near else f"the keys are {', '.join(model.model_fields)}"


def read_file(path: Path, name: str, max_bytes: int = MOST_BYTES) -> tuple[str | None, list[Problem]]:
    """The text of a YAML file; None and a problem where it cannot be read, is not UTF-8, or far too large."""
    try:
        with open_regular(path) as handle:
            raw = handle.read(min(os.fstat(handle.fileno()).st_size, max_bytes + 1))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return None, [Problem(f"cannot read the file: {reason}", name, unread=True)]
    if len(raw) > max_bytes:
        text = f"more than {max_bytes} bytes found, which no recipe needs; is it a recipe?"
        return None, [Problem(text, name, unread=True)]
    try:
        return raw.decode("utf-8-sig"), []
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        text = f"byte 0x{raw[error.start]:02x} found, expected UTF-8 text; convert it with iconv"
        return None, [Problem(text, f"{name}, line {line}", unread=True)]


def configs_folder() -> Path:
    """The folder of the fragments that come with ddnn: inside an installed package, else beside it in a checkout."""
    installed = Path(__file__).parents[1] / "configs"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "configs"


def shipped_fragments() -> list[str]:
    """Names of the fragments that come with ddnn, as `include` takes them: not cluster settings and measured times."""
    names = (path.relative_to(configs_folder()).as_posix() for path in configs_folder().rglob("*.yaml"))
    return sorted(name for name in names if not name.startswith(("cluster/", "measured/")))


def read_with_includes(path: Path, name: str, into: SourceTree, including: tuple[Path, ...] = ()) -> None:
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
        include = SourceValue({}, values.pop(path_in_include).source)
    if include is not None:
        _read_includes(include, path.parent, into, (*including, path.resolve()))
    into.update(values)


def _read_includes(include: SourceValue, folder: Path, into: SourceTree, chain: tuple[Path, ...]) -> None:
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
        read_with_includes(found, str(found), into, chain)


def _included(include: SourceValue, into: SourceTree) -> list[str]:
    if include.value is None:
        return []
    wanted = include.value if isinstance(include.value, list) else [include.value]
    if all(isinstance(name, str) and name and "\0" not in name for name in wanted):
        return wanted
    text = f"include: {format_value(include.value)} found, expected a file name or a list of them"
    into.problems.append(Problem(text, include.source, unread=True))
    return []


def _find_fragment(wanted: str, folder: Path, source: str, into: SourceTree) -> Path | None:
    tried = [folder / wanted, configs_folder() / wanted]
    for candidate in tried:
        if exists(candidate):
            return candidate
    text = f"include: {wanted} is neither {tried[0]} nor {tried[1]}; ddnn comes with {', '.join(shipped_fragments()) or 'none'}"
    into.problems.append(Problem(text, source, unread=True))
    return None


def exists(path: Path) -> bool:
    """Whether there is something at `path`; False too where one may not look, or where no file can have such a name."""
    try:
        path.stat()
    except (OSError, ValueError):
        return False
    return True
