"""Converts images and labels in IDX files (MNIST, Fashion-MNIST) to a Kaldi data dir: an image is a frame, its label a pdf.

    python recipes/images/idx.py --images train-images-idx3-ubyte.gz --labels train-labels-idx1-ubyte.gz --out train

An IDX file (Yann LeCun's format), plain or gzip, has a magic number (two zero bytes, the type of a value, the number of
dims), each dim as a big-endian unsigned integer of 32 bits, then the values, the last dim fastest. Images are unsigned
bytes of three dims, labels of one."""

from __future__ import annotations

import argparse
import gzip
import math
import re
import struct
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ddnn.kaldi.archive import write_int_vectors, write_matrices
from ddnn.kaldi.basic_types import HINT_REMAKE, BasicTypeReader, MalformedRecordError, locating_errors, open_stream
from ddnn.util.errors import DataError, UserError, exit_code, user_message
from ddnn.util.files import atomic_directory, atomic_write, write_text
from ddnn.util.text import printable

MAX_PIXELS = 1 << 16  # Of an image: 256 x 256. Each is an input of the network.
_TYPES = {
    8: "unsigned bytes",
    9: "signed bytes",
    11: "16-bit integers",
    12: "32-bit integers",
    13: "floats",
    14: "doubles",
}
_UNSIGNED_BYTES = 8
ALIGNMENTS = "pdfs.ark"  # the archive of labels in a converted data dir
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}")
_MAX_SPEAKERS = 99_999
_BLOCK_BYTES = 64 << 20  # of an utterance, in float32


@dataclass(frozen=True)
class IdxImages:
    """The images of an open IDX file, read from the first to the last."""

    path: Path  # the file
    count: int  # images that its header promises, 1 or more
    # pixels of each image, 1 or more
    rows: int
    columns: int
    source: BasicTypeReader

    def read(self, count: int) -> NDArray[np.uint8]:
        """The next `count` images, uint8 (count, rows * columns), row by row. DataError: the file is damaged or cut
        short."""
        size = count * self.rows * self.columns
        with locating_errors(self.path):
            data = self.source.read_exact(size, f"a block of {count} images")
        return np.frombuffer(data, np.uint8).reshape(count, self.rows * self.columns)

    def finish(self) -> None:
        """To be called after the last image: DataError where more follows, or a gzip's checksum does not match."""
        _finish(self.source, self.path, "images")


@contextmanager
def open_images(path: Path) -> Iterator[IdxImages]:
    """An IDX file of images, its header checked against its size. DataError: the file is missing, damaged, or no IDX
    file of images (unsigned bytes, images x rows x columns); an image has no pixel, or more than `MAX_PIXELS`."""
    source = open_stream(path)
    with source.stream:
        count, rows, columns = _read_header(source, path, "images", 3)
        if not 0 < rows * columns <= MAX_PIXELS:
            message = f"expected images of 1 to {MAX_PIXELS} pixels, found {rows} x {columns}"
            raise DataError(message, location=path, hint="scale the images down" if rows * columns else HINT_REMAKE)
        yield IdxImages(path, count, rows, columns, source)


def read_labels(path: Path, expected: int) -> NDArray[np.uint8]:
    """The `expected` labels of an IDX file, uint8 (expected,). DataError: the file is missing, damaged, no IDX file of
    labels (unsigned bytes, one dim), or has more or fewer."""
    source = open_stream(path)
    with source.stream:
        (count,) = _read_header(source, path, "labels", 1)
        if count != expected:
            message = f"expected a label for each of {expected} images, found {count} labels"
            raise DataError(message, location=path, hint="give the images and the labels that belong to each other")
        with locating_errors(path):
            data = source.read_exact(count, f"a block of {count} labels")
        _finish(source, path, "labels")
    return np.frombuffer(data, np.uint8)


def write_idx(path: Path, values: NDArray[np.uint8]) -> None:
    """Writes unsigned bytes of 1 to 3 dims, each below 2^32, as an IDX file; as gzip where `path` ends in .gz.
    UserError: the file cannot be written."""
    header = bytes((0, 0, _UNSIGNED_BYTES, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
    with atomic_write(path) as handle:
        if path.suffix == ".gz":
            with gzip.GzipFile("", "wb", 6, handle, 0) as packed:
                packed.write(header + values.tobytes())
        else:
            handle.write(header + values.tobytes())


def _read_header(source: BasicTypeReader, path: Path, kind: str, dims: int) -> tuple[int, ...]:
    """The dims. DataError where the type is another, there is nothing, or more is promised than can be there."""
    with locating_errors(path):
        magic = source.read_exact(4, "the magic number")
        if magic[:2] != b"\0\0" or magic[2] not in _TYPES or not magic[3]:
            begins = f"begins with {bytes((0, 0, _UNSIGNED_BYTES, dims)).hex(' ')}, found {magic.hex(' ')}"
            raise MalformedRecordError(f"expected an IDX file of {kind}, which {begins}")
        if (magic[2], magic[3]) != (_UNSIGNED_BYTES, dims):
            found = f"{_TYPES[magic[2]]} of {magic[3]} dims"
            swapped = magic[2] == _UNSIGNED_BYTES and magic[3] == 4 - dims
            hint = "give --images and --labels the other way round" if swapped else f"give the file of the {kind}"
            message = f"expected an IDX file of {kind}, {_TYPES[_UNSIGNED_BYTES]} of {dims} dims, found {found}"
            raise DataError(message, location=path, hint=hint)
        shape = struct.unpack(f">{dims}I", source.read_exact(4 * dims, "the header"))
        promised, remaining = math.prod(shape), source.remaining
        if promised > remaining:
            dims_text = " x ".join(map(str, shape))
            raise MalformedRecordError(f"cut short: the header promises {dims_text} bytes, at most {remaining} remain")
    if not shape[0]:
        raise DataError(f"expected {kind}, found none", location=path, hint=HINT_REMAKE)
    return shape


def _finish(source: BasicTypeReader, path: Path, kind: str) -> None:
    """DataError where more follows. Of a gzip this also reads the checksum."""
    with locating_errors(path):
        if source.stream.read(1):
            raise MalformedRecordError(f"more bytes follow than the header promises {kind}")


@dataclass(frozen=True)
class ConvertOptions:
    """How images become utterances."""

    name: str = "image"  # what the ids of speakers and utterances begin with
    # Each speaker is an equal run of images in the file's order, so that cross-validation can hold some out.
    speakers: int = 100
    images_per_utterance: int = 100  # images in an utterance, at most; fewer where so many would take more than 64 MiB

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
            raise UserError("; ".join(errors), hint="idx.py --help has the defaults")


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
    """Makes a data dir from two IDX files, plain or gzip: each image is a frame, its label the pdf-id. DataError: a file
    is missing, damaged, or does not fit the other. UserError: `out` is not empty or cannot be written, an option is out
    of range.

    Pixels are divided by 255, in float32. `out` gets `feats.ark`, `feats.scp` (relative), `utt2spk`, `spk2utt`, and the
    labels in `pdfs.ark`, an archive of pdf-ids. All appears at the end, or nothing does. The images are never in memory
    together.
    """
    options.check()
    with atomic_directory(out) as folder, open_images(images) as opened:
        pdfs = read_labels(labels, opened.count)
        if opened.count < options.speakers:
            message = f"need at least one image per speaker ({options.speakers}), found {opened.count} images"
            raise UserError(message, location=images, hint=f"--speakers {max(1, opened.count // 10)}, for example")
        utterances = _split_utterances(opened, options)
        _write(folder, opened, pdfs, utterances)
    num_pdfs = int(pdfs.max()) + 1
    return ConvertSummary(opened.count, opened.rows, opened.columns, num_pdfs, options.speakers, len(utterances))


def _split_utterances(images: IdxImages, options: ConvertOptions) -> list[tuple[str, str, slice]]:
    """Name, speaker and images of each utterance, in the order of the images."""
    size = max(1, min(options.images_per_utterance, _BLOCK_BYTES // (4 * images.rows * images.columns)))
    bounds = [images.count * n // options.speakers for n in range(options.speakers + 1)]
    utterances = []
    for number, (first, end) in enumerate(pairwise(bounds), 1):
        speaker = f"{options.name}-{number:05d}"
        for part, start in enumerate(range(first, end, size), 1):
            utterances.append((f"{speaker}-{part:07d}", speaker, slice(start, min(start + size, end))))
    return utterances


def _write(folder: Path, images: IdxImages, pdfs: NDArray[np.uint8], utterances: list[tuple[str, str, slice]]) -> None:
    def features() -> Iterator[tuple[str, NDArray[np.float32]]]:
        for name, _, part in utterances:
            yield name, images.read(part.stop - part.start).astype(np.float32) / np.float32(255)
        images.finish()

    write_matrices(folder / "feats.ark", folder / "feats.scp", features(), relative=True)
    write_int_vectors(folder / ALIGNMENTS, ((name, pdfs[part].astype(np.int32)) for name, _, part in utterances))
    write_text(folder / "utt2spk", "".join(f"{name} {speaker}\n" for name, speaker, _ in utterances))
    utterances_of: dict[str, list[str]] = {}
    for name, speaker, _ in utterances:
        utterances_of.setdefault(speaker, []).append(name)
    lines = [" ".join([speaker, *names]) for speaker, names in utterances_of.items()]
    write_text(folder / "spk2utt", "".join(f"{line}\n" for line in lines))


def main(arguments: Sequence[str] | None = None) -> int:
    """Converts the files that the command line names; returns the exit code, 2 for a mistake of the user."""
    defaults = ConvertOptions()
    parser = argparse.ArgumentParser(
        description="Convert IDX images to a Kaldi data dir: one frame per image, labels as pdf-ids. Train on it with data.splice: 0."
    )
    parser.add_argument("--images", type=Path, required=True, help="IDX file of images (unsigned bytes), plain or gzip")
    parser.add_argument("--labels", type=Path, required=True, help="IDX file of their labels")
    parser.add_argument("--out", type=Path, required=True, help="data dir to create; its pdfs.ark has the labels")
    parser.add_argument("--name", default=defaults.name, help="prefix of the utterance ids (%(default)s)")
    parser.add_argument(
        "--speakers",
        type=int,
        default=defaults.speakers,
        help="number of speakers, so that some can be held out (%(default)s)",
    )
    parser.add_argument(
        "--images-per-utterance", type=int, default=defaults.images_per_utterance, help="at most (%(default)s)"
    )
    given = parser.parse_args(arguments)
    options = ConvertOptions(given.name, given.speakers, given.images_per_utterance)
    try:
        summary = convert_idx(given.images, given.labels, given.out, options)
    except (UserError, OSError) as error:
        print(f"idx.py: error: {user_message(error)}", file=sys.stderr)
        return exit_code(error)
    print(f"{printable(str(given.out), '')}: {summary}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
