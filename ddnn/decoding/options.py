"""Options of a scoring, and the acoustic scale and word insertion penalty that an earlier scoring chose."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from ddnn.util.errors import DataError, UserError
from ddnn.util.files import read_bytes_limited

_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class ScaleChoice:
    """The best acoustic scale and word insertion penalty of an earlier scoring. `reference`: digest of its text."""

    source: Path
    acoustic_scale: float
    word_insertion_penalty: float
    reference: str


class _ScoreFile(BaseModel):
    """The part of score.json that another scoring can take."""

    model_config = ConfigDict(strict=True, extra="ignore")

    best: float
    best_word_insertion_penalty: float
    reference: str


@dataclass(frozen=True)
class DecodeOptions:
    """Options of the search; UserError for those that the decoder cannot work with."""

    acoustic_scales: tuple[float, ...] = (0.05, 0.07, 0.1, 0.143)  # of log-likelihoods, one decoding each
    beam: float = 13.0  # cost above the best token at which a token is dropped
    max_active: int = 7000  # tokens retained per frame, at most
    min_active: int = 200  # tokens retained per frame even where the beam would drop them
    word_insertion_penalties: tuple[float, ...] = (0.0,)  # cost of each word; all of them at each scale
    chosen_on: ScaleChoice | None = None  # what the only scale and penalty come from

    def __post_init__(self) -> None:
        scales = self.acoustic_scales
        if not scales or not all(0 < scale < 1e6 for scale in scales) or len(set(scales)) != len(scales):
            message = f"acoustic scales {', '.join(map(str, scales))}: expected different numbers above 0"
            raise UserError(message, hint="for example 0.05,0.07,0.1,0.143")
        penalties = self.word_insertion_penalties
        if not penalties or not all(0 <= p < 1e6 for p in penalties) or len(set(penalties)) != len(penalties):
            message = f"word insertion penalties {', '.join(map(str, penalties))}: expected different numbers from 0 on"
            raise UserError(message, hint="for example 0,0.5,1")
        if not 0 < self.beam < 1e6:
            raise UserError(f"beam {self.beam}: expected a number above 0", hint="13 to 15 is usual")
        if not 0 <= self.min_active < self.max_active < 2**31 or self.max_active < 2:
            message = f"min_active {self.min_active} and max_active {self.max_active}"
            raise UserError(f"{message}: expected 0 <= min_active < max_active", hint="200 and 7000 are usual")


def read_choice(path: Path) -> ScaleChoice:
    """The best scale and penalty from the output of `ddnn score --json`, or from the folder of `--out`. DataError: it is
    something else."""
    path = path / "score.json" if path.is_dir() else path
    hint = "give the score.json of `ddnn score DEV ... --out DIR`"
    try:
        scored = _ScoreFile.model_validate_json(read_bytes_limited(path, _MAX_BYTES))
    except OSError as error:
        raise DataError(f"cannot read: {error.strerror}", location=path, hint=hint) from error
    except ValidationError as error:
        raise DataError("expected the JSON of a scoring", location=path, hint=hint) from error
    return ScaleChoice(path, scored.best, scored.best_word_insertion_penalty, scored.reference)
