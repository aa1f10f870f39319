"""The clauses that speakers read: the King James Bible of Debian's bible-kjv, cut at punctuation."""

from __future__ import annotations

import re
import subprocess
from collections import Counter

import numpy as np

from ddnn.util.errors import UserError

LENGTHS = range(4, 19)  # words of a clause
_CUT_AFTER = 6  # words: shorter pieces are joined to the next


def read_verses() -> list[str]:
    """The 31,102 verses, without their numbers. UserError: Debian's `bible-kjv` is not installed."""
    try:
        done = subprocess.run(["bible", "-f", "gen1:1-rev22:21"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        hint = "apt-get install bible-kjv bible-kjv-text"
        raise UserError(f"cannot read the text: {error}", location="bible", hint=hint) from error
    return [line.partition(" ")[2] for line in done.stdout.splitlines()]


def clauses_of(verse: str) -> list[tuple[str, ...]]:
    """Pieces between punctuation marks, each of at least six words or up to the full stop, in lower case."""
    clauses, words = list[tuple[str, ...]](), list[str]()
    for piece in re.findall(r"[^,;:.!?()]+[,;:.!?()]*", verse):
        words += re.findall(r"[a-z][a-z']*", piece.lower())
        if words and (len(words) >= _CUT_AFTER or re.search(r"[.!?]\s*$", piece)):
            clauses.append(tuple(words))
            words = []
    return [*clauses, tuple(words)] if words else clauses


def choose_clauses(verses: list[str], vocabulary: int, rng: np.random.Generator) -> list[tuple[str, ...]]:
    """The different clauses of 4 to 18 of the `vocabulary` most frequent words, in random order."""
    counts = Counter(word for verse in verses for word in re.findall(r"[a-z][a-z']*", verse.lower()))
    known = {word for word, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:vocabulary]}
    clauses = {clause: None for verse in verses for clause in clauses_of(verse) if len(clause) in LENGTHS}
    chosen = [clause for clause in clauses if known.issuperset(clause)]
    return [chosen[index] for index in rng.permutation(len(chosen))]
