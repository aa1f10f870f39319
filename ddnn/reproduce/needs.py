"""The optional packages that a reproduction needs, looked for before hours of training."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from ddnn.errors import UserError
from ddnn.reproduce.corpus import TestSet

DECODING = ("kaldi_decoder", "kaldifst", "kaldialign")


def check_packages(tests: Sequence[TestSet]) -> None:
    """UserError where decoding or drawing would fail at the end for want of a package."""
    decoding = DECODING if any(test.graphs for test in tests) else ()
    absent = [name for name in (*decoding, "matplotlib") if find_spec(name) is None]
    if absent:
        raise UserError(
            f"not installed: {', '.join(absent)}: the models could not be decoded, or the plots not drawn",
            mend="pip install 'ddnn[decode,report]'",
        )
