"""Errors that a user can fix. They end a command with a message and their `exit_code`, without a traceback: with one
worker in `ddnn.cli.main`, with several in `ddnn.distributed.failures`."""

from __future__ import annotations

import re
from os import PathLike

from ddnn.util.text import printable


class UserError(Exception):
    """Something the user must fix. `message`: one sentence: what is wrong; names the utterance and the values found and
    expected where there are any; it may end in a list. `location`: the file, directory or recipe key concerned. `hint`:
    what the user can do about it. All without control characters, and without line breaks but for those of the list, so
    that names in them stay within the line."""

    exit_code = 2
    """Of the command that it ends."""

    def __init__(self, message: str, *, location: str | PathLike[str] | None = None, hint: str | None = None) -> None:
        self.message = printable(re.sub(r"\n(?!  - )", r"\\n", message))
        self.location = None if location is None else printable(str(location), "")
        self.hint = None if hint is None else printable(hint, "")
        super().__init__(str(self))

    def __str__(self) -> str:
        below = (("location", self.location), ("hint", self.hint))
        return "\n".join([self.message, *(f"  {name}: {text}" for name, text in below if text is not None)])


class DataError(UserError):
    """An input file is missing, damaged, or does not fit the others."""


class RecipeError(UserError):
    """The recipe or a `--set` says something that cannot be done."""


class DivergedError(UserError):
    """A training or pretraining diverged: a loss or all workers' parameters are not finite, or the model is not better
    than the one it began with."""

    exit_code = 3


def user_message(error: BaseException) -> str | None:
    """What the user is told of an error; None of one that is a bug of ddnn."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):  # a full disk behind stdout, a folder that may not be entered
        location = "" if error.filename is None else f"\n  location: {printable(str(error.filename), '')}"
        return f"cannot read or write: {error.strerror or error}{location}"
    if isinstance(error, UnicodeEncodeError):  # a name from the file system in another encoding
        context = error.object[max(error.start - 100, 0) : error.end + 20]
        hint = "rename the file or folder, with convmv for example"
        return f"a name is not UTF-8\n  location: {context!r}\n  hint: {hint}"
    if isinstance(error, MemoryError):
        return "out of memory\n  hint: use a larger machine, a smaller network, or data.feature_dtype: float16"
    # torch's way to say it, on CPU and GPU
    if isinstance(error, RuntimeError) and re.search("can't allocate memory|out of memory", str(error)):
        return f"{str(error).splitlines()[0]}\n  hint: a smaller network or minibatch"
    return None


def exit_code(error: BaseException) -> int:
    """Of the command that `error` ends: 2, 3 where a training diverged, 1 for a bug of ddnn."""
    if isinstance(error, UserError):
        return error.exit_code
    return 1 if user_message(error) is None else 2
