"""`ddnn convert idx`: images as frames, labels as pdf-ids, in a Kaldi data dir."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ddnn.convert.idx import IdxImages, open_images, read_labels
from ddnn.kaldi.archive import write_int_vectors, write_matrices
from ddnn.util.errors import UserError
from ddnn.util.files import atomic_directory, write_text

ALIGNMENTS = "pdfs.ark"
"""The archive of labels in a converted data dir."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
_MAX_SPEAKERS = 99_999
_BLOCK_BYTES = 64 << 20  # of an utterance, in float32


@dataclass(frozen=True)
class ConvertOptions:
    """How images become utterances.

    Attributes:
        name: what the ids of speakers and utterances begin with.
        speakers: equal runs of images in the file's order, each a speaker: what cross-validation holds out.
        images_per_utterance: images in an utterance, at most; fewer where so many would take more than 64 MiB.
    """

    name: str = "image"
    speakers: int = 100
    images_per_utterance: int = 100

    def check(self) -> None:
        """Raises UserError, with all problems, where an option is out of range."""
        errors = []
        if not _NAME.fullmatch(self.name):
            errors.append(f"name {self.name[:100]!r}: expected 1 to 100 of letters, digits, '.', '_' and '-'")
        if not 1 <= self.speakers <= _MAX_SPEAKERS:
            errors.append(f"speakers {self.speakers}: expected 1 to {_MAX_SPEAKERS}")
        if self.images_per_utterance < 1:
            errors.append(f"images per utterance {self.images_per_utterance}: expected 1 or more")
        if errors:
            raise UserError("; ".join(errors), hint="ddnn convert idx --help has the defaults")


@dataclass(frozen=True)
class ConvertSummary:
    """What was written. `pdfs`: the largest label + 1."""

    images: int
    rows: int
    columns: int
    pdfs: int
    speakers: int
    utterances: int

    def __str__(self) -> str:
        frames = f"{self.images} frames of {self.rows * self.columns} dims ({self.rows} x {self.columns} pixels)"
        return f"{frames}, {self.pdfs} pdfs, {self.speakers} speakers, {self.utterances} utterances"


def convert_idx(images: Path, labels: Path, out: Path, options: ConvertOptions) -> ConvertSummary:
    """Makes a data dir of two IDX files: a frame of each image, its label as pdf-id.

    Pixels are divided by 255, in float32. `out` gets `feats.ark`, `feats.scp` (relative), `utt2spk`, `spk2utt`, and the
    labels in `pdfs.ark`, an archive of pdf-ids. All appears at the end, or nothing does. The images are never in memory
    together.

    Args:
        images, labels: IDX files, plain or gzip, of as many images as labels.
        out: must not exist, or be an empty directory.

    Raises:
        DataError: a file is missing, damaged, or does not fit the other. UserError: `out` is not empty or cannot be
            written, an option is out of range.
    """
    options.check()
    with atomic_directory(out) as folder, open_images(images) as opened:
        pdfs = read_labels(labels, opened.count)
        if opened.count < options.speakers:
            message = f"expected an image or more of each of {options.speakers} speakers, found {opened.count} images"
            raise UserError(message, location=images, hint=f"--speakers {max(1, opened.count // 10)}, for example")
        utterances = _split_utterances(opened, options)
        _write(folder, opened, pdfs, utterances)
    return ConvertSummary(
        opened.count, opened.rows, opened.columns, int(pdfs.max()) + 1, options.speakers, len(utterances)
    )


@dataclass(frozen=True)
class _Utterance:
    name: str
    speaker: str
    first: int
    end: int


def _split_utterances(images: IdxImages, options: ConvertOptions) -> list[_Utterance]:
    """The utterances, in the order of the images."""
    size = max(1, min(options.images_per_utterance, _BLOCK_BYTES // (4 * images.rows * images.columns)))
    bounds = [images.count * n // options.speakers for n in range(options.speakers + 1)]
    utterances = []
    for number, (first, end) in enumerate(pairwise(bounds), 1):
        speaker = f"{options.name}-{number:05d}"
        for part, start in enumerate(range(first, end, size), 1):
            utterances.append(_Utterance(f"{speaker}-{part:07d}", speaker, start, min(start + size, end)))
    return utterances


def _write(folder: Path, images: IdxImages, pdfs: NDArray[np.uint8], utterances: list[_Utterance]) -> None:
    def features() -> Iterator[tuple[str, NDArray[np.float32]]]:
        for utterance in utterances:
            yield utterance.name, images.read(utterance.end - utterance.first).astype(np.float32) / np.float32(255)
        images.finish()

    write_matrices(folder / "feats.ark", folder / "feats.scp", features(), relative=True)
    labels = ((utterance.name, pdfs[utterance.first : utterance.end].astype(np.int32)) for utterance in utterances)
    write_int_vectors(folder / ALIGNMENTS, labels)
    write_text(folder / "utt2spk", "".join(f"{utterance.name} {utterance.speaker}\n" for utterance in utterances))
    spoken: dict[str, list[str]] = {}
    for utterance in utterances:
        spoken.setdefault(utterance.speaker, []).append(utterance.name)
    write_text(folder / "spk2utt", "".join(f"{' '.join([speaker, *names])}\n" for speaker, names in spoken.items()))
