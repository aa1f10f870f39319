"""Word error rates that Kaldi's `local/score_sclite.sh` (egs/swbd) leaves in a decode dir: the summaries of sclite.

    score_LMWT/NAME.ctm[.SUBSET].filt.{sys,raw}             s5b
    score_LMWT_PENALTY/NAME.ctm[.SUBSET].filt.{sys,raw}     s5c, with a word insertion penalty

NAME is that of the data dir; eval2000 has the subsets `swbd` and `callhm`, rt03 `swbd` and `fsh`. `.sys` has
percentages with one decimal, `.raw` counts of words. The best weight counts for each subset by itself, as in
`utils/best_wer.sh`.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ddnn.util.errors import DataError
from ddnn.util.files import read_bytes_limited

PAPER_NAMES = {("eval2000", "swbd"): "SWB", ("eval2000", "callhm"): "CH"}
"""Kaldi's data dir and subset -> the paper's name. Other test sets have a `swbd` too: it is not the paper's SWB."""
MAX_BYTES = 1 << 20
"""Of a summary, which has a line of some hundred bytes for each speaker."""
MAX_ENTRIES = 10_000
"""Of a folder: a decode dir has some sixty score_*, each of them some sixty files."""

_FOLDER = re.compile(r"score_([0-9]{1,4})(?:_([0-9]{1,4}(?:\.[0-9]{1,4})?))?")
_SUMMARY = re.compile(r"([A-Za-z0-9_-]{1,60})\.ctm(?:\.([A-Za-z0-9_-]{1,60}))?\.filt\.(sys|raw)")
_N = r"[0-9]{1,9}(?:\.[0-9]{1,4})?"
_TOTALS_LINE = re.compile(r"[ \t]*\|?[ \t]*(Sum/Avg|Sum)[ \t]*(?:\|.*)?")
_TOTALS = re.compile(
    rf"[ \t]*\|?[ \t]*(Sum/Avg|Sum)[ \t]*\|[ \t]*{_N}[ \t]+({_N})[ \t]*"
    rf"\|[ \t]*{_N}(?:[ \t]+{_N}){{3}}[ \t]+({_N})[ \t]+{_N}[ \t]*(?:\|.*)?"
)
"""sentences and words | correct, sub, del, ins, all errors, sentence errors: in `.sys` (Sum/Avg) percentages."""
_HINT = "score again with Kaldi's local/score.sh, or remove the file"


@dataclass(frozen=True)
class ScliteScore:
    """The best word error rate of a test set.

    Attributes:
        wer: percent of the words.
        lm_weight: at which it was reached.
        penalty: word insertion penalty at which it was reached; 0 in s5b, which has none.
        summary: sclite's file.
    """

    wer: float
    lm_weight: int
    penalty: float
    summary: Path


def best_scores(decode_dir: Path) -> dict[str, ScliteScore]:
    """The lowest word error rate of each test set; of equal ones that of the lowest weight, then penalty.

    Names: that of the data dir for the whole of it, SWB and CH for the subsets of eval2000, "NAME SUBSET" for those of
    others. Of a summary in both forms the counts are read. Empty where nothing has been scored, or there is no such
    directory.

    Raises:
        DataError: a directory or a summary cannot be read, a summary is malformed, or two data dirs have been scored
            into one directory.
    """
    scores: dict[str, list[ScliteScore]] = {}
    owner = ""
    for folder in _entries(decode_dir):
        settings = _FOLDER.fullmatch(folder.name)
        if settings is None:
            continue
        for (data, subset), summary in sorted(_summaries(folder).items()):
            owner = owner or data
            if data != owner:
                message = f"two data dirs have been scored here, {owner} and {data}"
                raise DataError(message, location=decode_dir, hint="decode each into a directory of its own")
            name = PAPER_NAMES.get((data, subset), f"{data} {subset}".rstrip())
            score = ScliteScore(read_summary(summary), int(settings[1]), float(settings[2] or 0.0), summary)
            scores.setdefault(name, []).append(score)
    return {name: min(found, key=lambda s: (s.wer, s.lm_weight, s.penalty)) for name, found in sorted(scores.items())}


def read_summary(path: Path) -> float:
    """The word error rate of a `.sys` or `.raw`, in percent.

    Raises:
        DataError: it cannot be read, or does not have one line of totals as sclite writes it.
    """
    try:
        text = read_bytes_limited(path, MAX_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise DataError(f"cannot read sclite's summary: {error.strerror}", location=path, hint=_HINT) from error
    lines = [line for line in text.splitlines() if _TOTALS_LINE.fullmatch(line)]
    totals = _TOTALS.fullmatch(lines[0]) if len(lines) == 1 else None
    if totals is None:
        shown = f"the totals {lines[0].strip()[:200]!r}" if len(lines) == 1 else f"{len(lines)} lines of totals"
        expected = "expected 2 and then 6 numbers" if len(lines) == 1 else "expected one (Sum/Avg or Sum)"
        raise DataError(f"not a summary of sclite: {shown} found, {expected}", location=path, hint=_HINT)
    words, errors = float(totals[2]), float(totals[3])
    if words < 1:
        raise DataError("the reference has no words", location=path, hint="check the stm file that was scored against")
    return 100.0 * errors / words if totals[1] == "Sum" else errors


def _summaries(folder: Path) -> dict[tuple[str, str], Path]:
    """Data dir and subset ("" for all of it) -> its summary, with counts where both forms exist."""
    summaries: dict[tuple[str, str], Path] = {}
    for path in _entries(folder):
        match = _SUMMARY.fullmatch(path.name)
        if match is not None and (match[3] == "raw" or (match[1], match[2] or "") not in summaries):
            summaries[match[1], match[2] or ""] = path
    return summaries


def _entries(folder: Path) -> list[Path]:
    """What is in a folder, sorted; nothing if it does not exist."""
    try:
        with os.scandir(folder) as entries:
            paths = sorted(Path(entry.path) for entry in islice(entries, MAX_ENTRIES + 1))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise DataError(f"cannot list it: {error.strerror}", location=folder) from error
    if len(paths) > MAX_ENTRIES:
        raise DataError(f"more than {MAX_ENTRIES} entries found, expected Kaldi's decode dir", location=folder)
    return paths
