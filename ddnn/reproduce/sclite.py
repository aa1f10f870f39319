"""Word error rates that Kaldi's `local/score_sclite.sh` (egs/swbd) leaves under a decode dir: the summaries of sclite.

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

from ddnn.errors import DataError
from ddnn.files import read_regular

PAPER_NAMES = {("eval2000", "swbd"): "SWB", ("eval2000", "callhm"): "CH"}
"""Data dir and subset of Kaldi's -> the paper's name. Other test sets have a `swbd` too: not the paper's SWB."""
MOST_BYTES = 1 << 20
"""Of a summary, which has a line of some hundred bytes for each speaker."""
MOST_ENTRIES = 10_000
"""Of a folder: a decode dir has some sixty score_*, each of them some sixty files."""

_FOLDER = re.compile(r"score_([0-9]{1,4})(?:_([0-9]{1,4}(?:\.[0-9]{1,4})?))?")
_SUMMARY = re.compile(r"([A-Za-z0-9_-]{1,60})\.ctm(?:\.([A-Za-z0-9_-]{1,60}))?\.filt\.(sys|raw)")
_NUMBER = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,4})?")
_TOTALS = {"Sum/Avg": "sys", "Sum": "raw"}
_MEND = "score again with Kaldi's local/score.sh, or remove the file"


@dataclass(frozen=True)
class Score:
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


def read_sclite(decode_dir: Path) -> dict[str, float]:
    """Name -> word error rate in percent, of `best_scores`."""
    return {name: score.wer for name, score in best_scores(decode_dir).items()}


def best_scores(decode_dir: Path) -> dict[str, Score]:
    """The lowest word error rate of each test set; of equal ones that of the lowest weight, then penalty.

    Names: that of the data dir for the whole of it, SWB and CH for the subsets of eval2000, "NAME SUBSET" for those of
    others. Of a summary in both forms the counts are read. Empty where nothing has been scored, or there is no such
    directory.

    Raises:
        DataError: a directory or a summary cannot be read, a summary is none, or two data dirs have been scored into
            one directory.
    """
    found: dict[str, list[Score]] = {}
    owner = ""
    for folder in _entries(decode_dir):
        settings = _FOLDER.fullmatch(folder.name)
        if settings is None:
            continue
        for (data, subset), summary in sorted(_summaries(folder).items()):
            owner = owner or data
            if data != owner:
                raise DataError(
                    f"two data dirs have been scored here, {owner} and {data}",
                    where=decode_dir,
                    mend="decode each into a directory of its own",
                )
            name = PAPER_NAMES.get((data, subset), f"{data} {subset}".rstrip())
            score = Score(read_summary(summary), int(settings[1]), float(settings[2] or 0.0), summary)
            found.setdefault(name, []).append(score)
    return {name: min(scores, key=lambda s: (s.wer, s.lm_weight, s.penalty)) for name, scores in sorted(found.items())}


def read_summary(path: Path) -> float:
    """The word error rate of a `.sys` or `.raw`, in percent.

    Raises:
        DataError: it cannot be read, or has not one line of totals as sclite writes it.
    """
    try:
        text = read_regular(path, MOST_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise DataError(f"cannot read a summary of sclite's: {error.strerror}", where=path, mend=_MEND) from error
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines()]
    totals = [row for row in rows if row[0] in _TOTALS]
    if len(totals) != 1:
        raise DataError(
            f"no summary of sclite's: {len(totals)} lines of totals found, expected one (Sum/Avg or Sum)",
            where=path,
            mend=_MEND,
        )
    return _error_rate(totals[0], path)


def _error_rate(row: list[str], path: Path) -> float:
    """From the cells of the totals: name; sentences, words; correct, sub, del, ins, all errors, sentence errors."""
    columns = [cell.split() for cell in row[1:3]]
    shape = [len(column) for column in columns]
    if shape != [2, 6] or not all(_NUMBER.fullmatch(number) for column in columns for number in column):
        raise DataError(
            f"no summary of sclite's: totals {' | '.join(row)[:200]!r} found, expected 2 and then 6 numbers",
            where=path,
            mend=_MEND,
        )
    words, errors = float(columns[0][1]), float(columns[1][4])
    if words < 1:
        raise DataError("the reference has no words", where=path, mend="look at the stm file that was scored against")
    return 100.0 * errors / words if _TOTALS[row[0]] == "raw" else errors


def _summaries(folder: Path) -> dict[tuple[str, str], Path]:
    """Data dir and subset ("" for all of it) -> its summary, with counts where there are such."""
    found: dict[tuple[str, str], Path] = {}
    for path in _entries(folder):
        match = _SUMMARY.fullmatch(path.name)
        if match is not None and (match[3] == "raw" or (match[1], match[2] or "") not in found):
            found[match[1], match[2] or ""] = path
    return found


def _entries(folder: Path) -> list[Path]:
    """What is in a folder, sorted; nothing where there is none."""
    try:
        with os.scandir(folder) as entries:
            paths = sorted(Path(entry.path) for entry in islice(entries, MOST_ENTRIES + 1))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise DataError(f"cannot list it: {error.strerror}", where=folder) from error
    if len(paths) > MOST_ENTRIES:
        raise DataError(f"more than {MOST_ENTRIES} entries found, expected a decode dir of Kaldi's", where=folder)
    return paths
