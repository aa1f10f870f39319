"""The text of a YAML file as plain values, each with the file and line it comes from.

Nothing is constructed but numbers, true/false, text, lists and mappings; anchors, aliases and tags are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

DEEPEST = 12
MOST_VALUES = 3000
"""Keys and values of one file: a recipe has 200, and a tenth of a second goes into reading so many."""
MOST_DIGITS = 40
"""More than any key takes. Longer ones stay text: Python refuses to convert thousands."""

KeyPath = tuple[str, ...]


@dataclass(frozen=True)
class SourceValue:
    """A value and where it comes from: "swbd.yaml, line 3" or "--set seed=3"."""

    value: Any
    source: str


@dataclass(frozen=True)
class Problem:
    """Something wrong with a file, in one line. `unread`: a source was not read, so that keys may seem missing."""

    text: str
    source: str
    unread: bool = False

    def __str__(self) -> str:
        return f"{self.text}  [{self.source}]"


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
        elif self.depth > DEEPEST:
            refused = f"more than {DEEPEST} levels"
        elif self.values >= MOST_VALUES:
            refused = f"more than {MOST_VALUES} keys and values, which no recipe needs"
        if refused:
            raise _Refused(problem=refused, problem_mark=event.start_mark)  # type: ignore[arg-type]
        self.depth += 1
        self.values += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


_NULL, _BOOL, _INT, _FLOAT = (f"tag:yaml.org,2002:{name}" for name in ("null", "bool", "int", "float"))
_NUMBERS = list("-+.0123456789")
_Loader.add_implicit_resolver(_NULL, re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(_BOOL, re.compile(r"^(?:true|false|yes|no|on|off)$", re.IGNORECASE), list("tfynoTFYNO"))
_Loader.add_implicit_resolver(_INT, re.compile(r"^[-+]?[0-9]+$"), _NUMBERS)
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"^(?:[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    _NUMBERS,
)

_CONVERT: dict[str, Callable[[str], Any]] = {
    _NULL: lambda text: None,
    _BOOL: lambda text: text.lower() in ("true", "yes", "on"),
    _INT: lambda text: int(text) if len(text) <= MOST_DIGITS else text,
    _FLOAT: lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
}


def parse_file(text: str, name: str) -> tuple[dict[KeyPath, SourceValue], list[Problem]]:
    """The values of a recipe or fragment by their path of keys, and all that is wrong with its YAML."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and "\t" in line[: len(line) - len(line.lstrip())]:
            location = f"{name}, line {number}, column {line.index(chr(9)) + 1}"
            return {}, [Problem("a tab found in the indentation; use spaces", location, unread=True)]
    try:
        node = _compose(text)
    except yaml.YAMLError as error:
        return {}, [_explain(error, text, name)]
    if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == _NULL):
        return {}, [Problem("nothing found, expected `key: value` lines", name, unread=True)]
    if not isinstance(node, yaml.MappingNode):
        kind = "a list" if isinstance(node, yaml.SequenceNode) else "plain text"
        return {}, [Problem(f"{kind} found, expected `key: value` lines", f"{name}, line 1", unread=True)]
    return _flatten(node, lambda line: f"{name}, line {line}")


def parse_setting(setting: str) -> tuple[dict[KeyPath, SourceValue], list[Problem]]:
    """The values of one `--set KEY=VALUE`; VALUE is YAML."""
    source = f"--set {setting if len(setting) <= 200 else setting[:200] + '...'}"
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        return {}, [Problem("no KEY=VALUE found, expected for example schedule.initial_learning_rate=0.004", source)]
    try:
        node = _compose(text)
    except yaml.YAMLError as error:
        return {}, [_explain(error, text, source)]
    prefix = tuple(part.strip() for part in key.split("."))
    if isinstance(node, yaml.MappingNode) and node.value:
        values, problems = _flatten(node, lambda line: source)
        return {prefix + path: given for path, given in values.items()}, problems
    return {prefix: SourceValue(None if node is None else _plain(node), source)}, []


def format_value(value: Any) -> str:
    """A value as its writer would recognise it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and not math.isfinite(value):
        return f".{value}".replace(".-", "-.")
    if isinstance(value, str):
        short = value if len(value) <= 200 else f"{value[:200]}..."
        return f"the text {short!r}"
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    return str(value)


def _compose(text: str) -> yaml.Node | None:
    loader = _Loader(text)
    try:
        return loader.get_single_node()
    finally:
        loader.dispose()


def _explain(error: yaml.YAMLError, text: str, name: str) -> Problem:
    mark = getattr(error, "problem_mark", None)
    if mark is None:  # a byte that YAML does not allow at all
        place = getattr(error, "position", 0)
        line = text[:place].count("\n") + 1
        said = f"character {text[place : place + 1]!r} found, which YAML does not allow"
        return Problem(said, f"{name}, line {line}", unread=True)
    location = f"{name}, line {mark.line + 1}, column {mark.column + 1}"
    if text[mark.index : mark.index + 1] == "\t":
        return Problem("a tab found; use spaces", location, unread=True)
    if isinstance(error, _Refused):
        return Problem(str(error.problem), location, unread=True)
    said = ", ".join(part for part in (getattr(error, "context", None), getattr(error, "problem", None)) if part)
    return Problem(f"not YAML: {said}", location, unread=True)


def _plain(node: yaml.Node) -> Any:
    """The value of a node. A mapping inside a list, which no recipe needs, is only seen to be one."""
    if isinstance(node, yaml.ScalarNode):
        return _CONVERT.get(node.tag, str)(node.value)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item) for item in node.value]
    return {}


def _flatten(
    mapping: yaml.MappingNode, source: Callable[[int], str]
) -> tuple[dict[KeyPath, SourceValue], list[Problem]]:
    values: dict[KeyPath, SourceValue] = {}
    problems: list[Problem] = []

    def visit(prefix: KeyPath, node: yaml.MappingNode) -> None:
        lines: dict[str, int] = {}
        for key, value in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode):
                problems.append(Problem("a key that is a list or a mapping found, expected a word", source(line)))
                continue
            path = (*prefix, key.value)
            if "." in key.value:
                nested = key.value.replace(".", ": {") + ": ..." + "}" * key.value.count(".")
                text = f"{key.value!r}: names with dots are for --set; here write {nested}"
                problems.append(Problem(text, source(line)))
                continue
            if key.value in lines:
                dotted = ".".join(path)
                problems.append(Problem(f"{dotted}: given twice, first in line {lines[key.value]}", source(line)))
            lines.setdefault(key.value, line)
            if isinstance(value, yaml.MappingNode) and value.value:
                visit(path, value)
            else:
                values[path] = SourceValue(_plain(value), source(line))

    visit((), mapping)
    return values, problems
