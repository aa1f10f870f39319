"""What the recipe's mappings are made of: `Section`, and the types of their values."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

Fraction = Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Size = Annotated[int, Field(ge=1, le=1_000_000)]
NotNegativeCount = Annotated[int, Field(ge=0)]
# YAML reads a bare `off` as false.
AutoOrOff = Annotated[Literal["auto", "off"], BeforeValidator(lambda value: "off" if value is False else value)]

# A list of one path is that path: the same recipe.
Paths = Annotated[
    Path | Annotated[list[Path], Field(min_length=1)],
    AfterValidator(lambda value: value[0] if isinstance(value, list) and len(value) == 1 else value),
]


OptionalPaths = Path | list[Path] | None


def as_list(paths: OptionalPaths) -> list[Path]:
    """Of a key that takes a path or a list of paths."""
    return paths if isinstance(paths, list) else [] if paths is None else [paths]


class Section(BaseModel):
    """A mapping of a recipe: immutable, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


AnySection = TypeVar("AnySection", bound=Section)


def get_value(recipe: Section, name: str) -> Any:
    """The value of a dotted key; None where the chosen variant of its section does not have it, or where a key that
    takes a value or a mapping has a value."""
    value: Any = recipe
    for part in name.split("."):
        value = getattr(value, part, None) if isinstance(value, Section) else None
    return value


def is_given(recipe: Section, name: str) -> bool:
    """Whether a key of a section without variants was given, and is not only at its default."""
    section, _, last = name.rpartition(".")
    return last in getattr(recipe, section).model_fields_set


def with_defaults(recipe: AnySection, values: Mapping[str, Any]) -> AnySection:
    """The recipe with these values, by dotted key, of the keys that it does not give."""
    for name, value in values.items():
        section, _, last = name.rpartition(".")
        if not is_given(recipe, name):
            recipe = recipe.model_copy(update={section: getattr(recipe, section).model_copy(update={last: value})})
    return recipe


# A key that takes a single value or a mapping: Annotated[Annotated[int, VALUE] | Annotated[SomeSection, MAPPING], VALUE_OR_MAPPING].
VALUE, MAPPING = Tag("(value)"), Tag("(mapping)")
VALUE_OR_MAPPING = Discriminator(lambda given: MAPPING.tag if isinstance(given, dict | Section) else VALUE.tag)
