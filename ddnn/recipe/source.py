"""YAML as ddnn reads it: plain values, each with the file and line it comes from, checked by a model. Nothing is
constructed but numbers, true/false, text, lists and mappings; anchors, aliases and tags are refused. All that is wrong
with a file is gathered and reported at once, with the line and, of an unknown key, the nearest known one."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from ddnn.util.errors import DataError, UserError
from ddnn.util.files import open_regular

MAX_BYTES = 100_000
MAX_DEPTH = 40  # of a recipe 6, or 33 with networks within networks
MAX_VALUES = 4_000  # keys and values of one file: a recipe has 200, a list of copied columns thousands. 0.1 s
MAX_DIGITS = 40  # More than any key takes. Longer ones stay text: Python refuses to convert thousands.
MAX_PROBLEMS = 50  # where as many keys are unknown it is something else

Model = TypeVar("Model", bound=BaseModel)


class Problem(NamedTuple):
    """Something wrong with a file, in one line. `unread_keys`: it is only that nothing reads these keys."""

    text: str
    source: str
    unread_keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.text}  [{self.source}]"


@dataclass
class SourceTree:
    """Values by dotted key, of one file or merged from several, the later ones winning, and what is wrong with them.

    Attributes:
        sources: where each key, section and item of a list comes from ("swbd.yaml, line 3", "--set seed=3"), by names such
            as "model.layers[0].affine".
        incomplete: a file could not be read, so that keys may seem missing.
    """

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    incomplete: bool = False

    def add_problem(self, text: str, source: str, *, incomplete: bool = False) -> None:
        self.problems.append(Problem(text, source))
        self.incomplete |= incomplete

    def nested(self) -> dict[str, Any]:
        return nested(self.values)

    def source_of(self, name: str) -> str | None:
        """Where a key comes from, or what is around it."""
        while name and name not in self.sources:
            name = re.sub(r"(^|\.)[^.\[]*$|\[\d+\]$", "", name)
        return self.sources.get(name)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
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


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of mappings within mappings, by dotted key."""
    values = dict[str, Any]()
    for key, value in tree.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
    return values


def configs_folder() -> Path:
    """The folder of the fragments that come with ddnn: inside an installed package, else beside it in a checkout."""
    installed = Path(__file__).parents[1] / "configs"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "configs"


def shipped_fragments() -> list[str]:
    """Names of the fragments that come with ddnn, as `include` takes them: not cluster settings and measured times."""
    names = (path.relative_to(configs_folder()).as_posix() for path in configs_folder().rglob("*.yaml"))
    return sorted(name for name in names if not name.startswith(("cluster/", "measured/")))


exists = os.path.exists  # False too where one may not look, or where no file can have such a name: Path.exists raises


def similar_file(path: Path) -> str:
    """The hint where there is no such recipe: the file of its folder that has the most similar name."""
    names = [file.name for pattern in ("*.yaml", "*.yml") for file in path.parent.glob(pattern)]
    near = difflib.get_close_matches(path.name, names, n=1)
    return (
        f"did you mean {path.parent / near[0]}?"
        if near
        else "name a recipe, a YAML file as in docs/reference/recipe.md"
    )


def find_path(text: str, folder: Path, must_exist: bool) -> Path | str:
    """The absolute path that a recipe's path means, or what is wrong with it."""
    if not text or "\0" in text:
        return f"{format_value(text)} found, expected a path"
    tried = [Path(text)] if Path(text).is_absolute() else [Path.cwd() / text, folder.absolute() / text]
    for candidate in tried:
        if exists(candidate):
            return _tidy(candidate)
    if not must_exist:
        return _tidy(tried[0])
    places = list(dict.fromkeys(str(_tidy(candidate)) for candidate in tried))
    there_is_no = f"neither {' nor '.join(places)}" if len(places) > 1 else f"no {places[0]}"
    return f"{text!r} does not exist: there is {there_is_no}"


def _tidy(path: Path) -> Path:
    """Without `..`, unless that would name another file because of a symbolic link."""
    tidy = Path(os.path.normpath(path))
    return tidy if not exists(path) or (exists(tidy) and tidy.samefile(path)) else path


def read_yaml(path: Path) -> SourceTree:
    """The values of one file, and all that is wrong with it as YAML: unreadable, not UTF-8, far too large, no
    mapping."""
    try:
        with open_regular(path) as handle:
            raw = handle.read(min(os.fstat(handle.fileno()).st_size, MAX_BYTES + 1))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return _unreadable(f"cannot read the file: {reason}", str(path))
    return parse_file(raw, str(path))


def parse_file(raw: bytes, name: str) -> SourceTree:
    """The values of a file's content, and all that is wrong with it as YAML; `name` is that of the file in messages."""
    if len(raw) > MAX_BYTES:
        return _unreadable(f"more than {MAX_BYTES} bytes found, which no recipe needs; is it a recipe?", name)
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        message = f"byte 0x{raw[error.start]:02x} found, expected UTF-8 text; convert it with iconv"
        return _unreadable(message, f"{name}, line {line}")
    try:
        node = yaml.compose(text, _Loader)
    except yaml.YAMLError as error:
        return _not_yaml(error, text, name)
    if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == _NULL):
        return _unreadable("nothing found, expected `key: value` lines", name)
    if not isinstance(node, yaml.MappingNode):
        kind = "a list" if isinstance(node, yaml.SequenceNode) else "plain text"
        return _unreadable(f"{kind} found, expected `key: value` lines", f"{name}, line 1")
    tree = SourceTree()
    tree.values = flat(_plain(node, "", tree, lambda part: f"{name}, line {part.start_mark.line + 1}"))
    return tree


def parse_setting(setting: str) -> SourceTree:
    """The values of one `--set KEY=VALUE`; VALUE is YAML."""
    source = f"--set {setting if len(setting) <= 200 else setting[:200] + '...'}"
    key, equals, text = setting.partition("=")
    tree = SourceTree()
    if not equals or not key.strip():
        tree.add_problem("no KEY=VALUE found, expected for example schedule.initial_learning_rate=0.004", source)
        return tree
    try:
        node = yaml.compose(text, _Loader)
    except yaml.YAMLError as error:
        return _not_yaml(error, text, source)
    parts = [part.strip() for part in key.split(".")]
    tree.sources = dict.fromkeys(accumulate(parts, "{}.{}".format), source)
    name = ".".join(parts)
    tree.values = flat({name: None if node is None else _plain(node, name, tree, lambda part: source)})
    return tree


def validate(
    model: type[Model], tree: SourceTree, location: Path, *, hint: str, error: type[UserError] = DataError
) -> Model:
    """A `model` without inner ones, of what a file says; "3" is no number. UserError: of the class `error`, at
    `location`: all that is wrong, one a line."""
    problems: list[object] = [*tree.problems]
    if not tree.incomplete:
        try:
            validated = model.model_validate(tree.nested(), strict=True)
            if not problems:
                return validated
        except ValidationError as failure:
            problems += _describe(failure, model, tree)
    raise error(format_problems(problems), location=location, hint=hint)


def first_error(error: ValidationError) -> str:
    """The first thing that is wrong with a file without lines, and its key."""
    detail = error.errors(include_url=False, include_context=False)[0]
    return f"{'.'.join(map(str, detail['loc'])) or 'the file'}: {detail['msg'].removeprefix('Value error, ')}"


def format_problems(problems: Iterable[object], what: str = "problems", most: int | None = None) -> str:
    """One problem as it is; several, at most so many of them, under a line that counts them."""
    lines = list(dict.fromkeys(map(str, problems)))
    if len(lines) == 1:
        return lines[0]
    further = [] if most is None or len(lines) <= most else [f"and {len(lines) - most} more"]
    return f"{len(lines)} {what}:" + "".join(f"\n  - {line}" for line in (*lines[:most], *further))


def format_value(value: Any) -> str:
    """A value as its writer would recognise it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return f".{value}".replace(".-", "-.")
    if isinstance(value, str):
        return f"the text {value if len(value) <= 200 else f'{value[:200]}...'!r}"
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    return str(value)


def format_key(name: str) -> str:
    return name if name.isprintable() and name else repr(name)


def _describe(error: ValidationError, model: type[BaseModel], tree: SourceTree) -> list[str]:
    """A sentence for each thing that pydantic found wrong: "KEY: VALUE found: why", with the source where it is
    known."""
    lines = []
    for number, detail in enumerate(error.errors(include_url=False, include_context=False)):
        name = ".".join(str(part) for part in detail["loc"] if part != "[key]")
        if detail["type"] == "missing":
            text = f"{name}: missing"
        elif detail["type"] == "extra_forbidden":
            near = difflib.get_close_matches(name, model.model_fields, n=1)
            meant = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(model.model_fields)}"
            text = f"{format_key(name)}: unknown key{f'; {meant}' if number < MAX_PROBLEMS else ''}"
        else:
            why = detail["msg"].removeprefix("Value error, ")
            text = f"{name}: {format_value(detail['input'])} found: {why}" if name else why
        source = tree.source_of(name) if name else None
        lines.append(text if source is None else str(Problem(text, source)))
    return lines


class _Refused(yaml.MarkedYAMLError):
    """YAML, but nothing that a recipe may hold."""


class _Loader(yaml.SafeLoader):
    """Scalars after YAML 1.2's core schema (so 1e-3 is a number and 1:30 is not), and yes/no/on/off."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 (PyYAML's interface)
    depth = 0
    values = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: yaml.Event = self.peek_event()  # type: ignore[no-untyped-call]
        refused = None
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            refused = "anchors (&) and aliases (*) are not allowed"
        elif getattr(event, "tag", None):
            refused = "tags (!) are not allowed"
        elif self.depth > MAX_DEPTH:
            refused = f"more than {MAX_DEPTH} levels"
        elif self.values >= MAX_VALUES:
            refused = f"more than {MAX_VALUES} keys and values, which no recipe needs"
        if refused:
            raise _Refused(problem=refused, problem_mark=event.start_mark)  # type: ignore[arg-type]
        self.depth += 1
        self.values += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


_NULL = "tag:yaml.org,2002:null"
_SCALARS: dict[str, tuple[str, Callable[[str], Any]]] = {
    _NULL: (r"(?:~|null|Null|NULL|)", lambda text: None),
    "tag:yaml.org,2002:bool": (r"(?i:true|false|yes|no|on|off)", lambda text: text.lower() in ("true", "yes", "on")),
    "tag:yaml.org,2002:int": (r"[-+]?[0-9]+", lambda text: int(text) if len(text) <= MAX_DIGITS else text),
    "tag:yaml.org,2002:float": (
        r"(?:[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))",
        lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    ),
}
"""Patterns of what is not text, in the order in which they are tried, and how it is converted."""
for _tag, (_pattern, _) in _SCALARS.items():
    _Loader.add_implicit_resolver(_tag, re.compile(f"^{_pattern}$"), None)


def _plain(node: yaml.Node, name: str, tree: SourceTree, place: Callable[[yaml.Node], str]) -> Any:
    """The value of a node, the dotted key of which is `name`. Adds to `tree` where everything in it comes from, by `place`,
    and keys that cannot be, as problems."""
    if isinstance(node, yaml.ScalarNode):
        _, convert = _SCALARS.get(node.tag, ("", str))
        return convert(node.value)
    if isinstance(node, yaml.SequenceNode):
        items = {f"{name}[{n}]": item for n, item in enumerate(node.value)}
        tree.sources |= {item_name: place(item) for item_name, item in items.items()}
        return [_plain(item, item_name, tree, place) for item_name, item in items.items()]
    values, lines = dict[str, Any](), dict[str, int]()
    for key, value in node.value:
        source = place(key)
        if not isinstance(key, yaml.ScalarNode):
            tree.add_problem("a key that is a list or a mapping found, expected a word", source)
            continue
        if "." in key.value:
            braces = key.value.replace(".", ": {") + ": ..." + "}" * key.value.count(".")
            tree.add_problem(f"{key.value!r}: names with dots are for --set; here write {braces}", source)
            continue
        inner = f"{name}.{key.value}" if name else key.value
        first = lines.setdefault(key.value, key.start_mark.line + 1)
        if key.value in values:
            tree.add_problem(f"{inner}: given twice, first in line {first}", source)
        tree.sources[inner] = source
        values[key.value] = _plain(value, inner, tree, place)
    return values


def _unreadable(text: str, source: str) -> SourceTree:
    return SourceTree(problems=[Problem(text, source)], incomplete=True)


def _not_yaml(error: yaml.YAMLError, text: str, name: str) -> SourceTree:
    mark = getattr(error, "problem_mark", None)
    if mark is None:  # a byte that YAML does not allow at all
        place = getattr(error, "position", 0)
        line = text[:place].count("\n") + 1
        return _unreadable(
            f"character {text[place : place + 1]!r} found, which YAML does not allow", f"{name}, line {line}"
        )
    location = f"{name}, line {mark.line + 1}, column {mark.column + 1}"
    if text[mark.index : mark.index + 1] == "\t":
        return _unreadable("a tab found; use spaces", location)
    if isinstance(error, _Refused):
        return _unreadable(str(error.problem), location)
    problem = ", ".join(part for part in (getattr(error, "context", None), getattr(error, "problem", None)) if part)
    return _unreadable(f"not YAML: {problem}", location)
