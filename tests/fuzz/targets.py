"""All readers of bytes from the disk."""

from __future__ import annotations

from functools import cache

from fuzz.child import Target
from fuzz.targets_align import align_targets
from fuzz.targets_checkpoints import checkpoint_targets
from fuzz.targets_convert import convert_targets
from fuzz.targets_kaldi import kaldi_targets
from fuzz.targets_models import model_targets
from fuzz.targets_runs import run_targets
from fuzz.targets_tables import table_targets
from fuzz.targets_text import text_targets


@cache
def all_targets() -> tuple[Target, ...]:
    """Every target, by name each once."""
    found = (
        *table_targets(),
        *kaldi_targets(),
        *align_targets(),
        *text_targets(),
        *run_targets(),
        *model_targets(),
        *checkpoint_targets(),
        *convert_targets(),
    )
    assert len({target.name for target in found}) == len(found)
    return found
