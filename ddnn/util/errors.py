"""Errors that a user can fix. The command line prints them without a traceback and ends with exit code 2."""

from __future__ import annotations

from os import PathLike


class UserError(Exception):
    """Something the user must fix. `message`: one sentence: what is wrong; names the utterance and the values found and
    expected where there are any. `location`: the file, directory or recipe key concerned. `hint`: what the user can do
    about it."""

    exit_code = 2
    """Of the command that it ends."""

    def __init__(self, message: str, *, location: str | PathLike[str] | None = None, hint: str | None = None) -> None:
        self.message = message
        self.location = None if location is None else str(location)
        self.hint = hint
        super().__init__(str(self))

    def __str__(self) -> str:
        below = (("location", self.location), ("hint", self.hint))
        return "\n".join([self.message, *(f"  {name}: {text}" for name, text in below if text is not None)])


class DataError(UserError):
    """An input file is missing, damaged, or does not fit the others."""


class RecipeError(UserError):
    """The recipe or a `--set` says something that cannot be done."""


class DivergedError(UserError):
    """A training or pretraining diverged: a loss or all workers' parameters are not finite."""

    exit_code = 3
