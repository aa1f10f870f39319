"""Errors that a user can mend. The command line prints them without a traceback and ends with exit code 2."""

from __future__ import annotations

from os import PathLike


class UserError(Exception):
    """Something the user must mend: what is wrong (the value found, the one expected), where, and how to mend it.

    Args:
        what: one sentence; names the utterance and the values found and expected where there are any.
        where: the file, directory or recipe key concerned.
        mend: what the user can do about it.
    """

    def __init__(self, what: str, *, where: str | PathLike[str] | None = None, mend: str | None = None) -> None:
        self.what = what
        self.where = None if where is None else str(where)
        self.mend = mend
        super().__init__(str(self))

    def __str__(self) -> str:
        lines = [self.what]
        if self.where is not None:
            lines.append(f"  where: {self.where}")
        if self.mend is not None:
            lines.append(f"  mend:  {self.mend}")
        return "\n".join(lines)


class DataError(UserError):
    """An input file is missing, damaged, or does not fit the others."""


class RecipeError(UserError):
    """The recipe or a `--set` says something that cannot be done."""


DIVERGED = "the training diverged"
"""How an error begins that says so, by which the programs that start trainings know it."""
