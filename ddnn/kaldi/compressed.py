"""Kaldi's compressed matrices (tokens CM, CM2, CM3), decoded and encoded to Kaldi's digits.

Follows kaldi `matrix/compressed-matrix.{h,cc}`:

    CM    two-byte percentiles (0, 25, 75, 100) per column, then one byte per value, column after column;
          piecewise linear: byte 0 at p0, 64 at p25, 192 at p75, 255 at p100 (methods 1 and 2)
    CM2   two bytes per value, row after row: minimum + range * value / 65535 (methods 3 and 4)
    CM3   one byte per value, row after row: minimum + range * value / 255 (methods 5, 6 and 7)

kaldiio 2.18.1 rounds in another order (a fifth of its values differ from Kaldi's in the 7th digit), and wraps around
where it compresses a matrix of fewer than 5 rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddnn.util.arrays import Float32Array, Float64Array


class MatrixHeader(NamedTuple):
    """What a binary matrix claims; `minimum` and `span` are of the values of a compressed one."""

    token: str
    rows: int
    columns: int
    minimum: float = 0.0
    span: float = 0.0

    @property
    def data_size(self) -> int:
        """Bytes behind the header."""
        size = _VALUE_BYTES[self.token] * self.rows * self.columns
        return size + 8 * self.columns if self.token == "CM" else size


_VALUE_BYTES = {"FM": 4, "DM": 8, "CM": 1, "CM2": 2, "CM3": 1}
TOKENS = ("CM", "CM2", "CM3")
METHODS = (1, 2, 3, 5)
"""Kaldi's numbers of the methods that `encode` knows: kAutomaticMethod, kSpeechFeature, kTwoByteAuto, kOneByteAuto. The
others are for integers and for values from 0 to 1."""
# Kaldi's own constant for 1/65535, single precision.
_PER_STEP = np.float32(1.52590218966964e-05)
# The table of what 256 bytes mean takes a thousand bytes a column: columns are decoded so many at a time.
_COLUMNS = 4096
_BYTES = np.arange(129, dtype=np.float32)
_SEGMENTS = ((0, _BYTES[:65], 64), (65, _BYTES[1:129], 128), (193, _BYTES[1:64], 63))
"""The bytes between two percentiles of a column: the first, at which step above the lower percentile each is, steps in all."""


def decode(header: MatrixHeader, data: bytes | bytearray) -> Float32Array:
    """The matrix, float32 (rows, columns); `data` are the `data_size` bytes behind the header."""
    token, rows, columns = header.token, header.rows, header.columns
    low, width = np.float32(header.minimum), np.float32(header.span)
    with np.errstate(over="ignore", invalid="ignore"):  # a damaged header gives NaN or Inf, which the corpus refuses
        if token != "CM":
            dtype, steps = ("<u2", 65535.0) if token == "CM2" else ("u1", 255.0)
            values = np.frombuffer(data, dtype).reshape(rows, columns).astype(np.float32)
            values *= np.float32(header.span * (1.0 / steps))
            values += low
            return values
        percentiles = _to_float(low, width, np.frombuffer(data, "<u2", 4 * columns).reshape(columns, 4))
        coded = np.frombuffer(data, "u1", offset=8 * columns).reshape(columns, rows)
        values = np.empty((rows, columns), np.float32)
        for first in range(0, columns, _COLUMNS):
            block = slice(first, first + _COLUMNS)
            _decode_columns(percentiles[block], coded[block].T, values[:, block])
        return values


def _decode_columns(percentiles: Float32Array, coded: NDArray[np.uint8], out: Float32Array) -> None:
    """Fills `out` (rows, columns) from `percentiles` (columns, 4) and `coded` (rows, columns)."""
    rows, columns = out.shape
    # What each of the 256 bytes means, column by column: between two percentiles in steps, which are doubles in Kaldi.
    table = np.empty((columns, 256), np.float32)
    for n, (first, at, steps) in enumerate(_SEGMENTS):
        low, high = percentiles[:, n : n + 1], percentiles[:, n + 1 : n + 2]
        table[:, first : first + len(at)] = np.multiply((high - low) * at, 1 / steps, dtype=np.float64) + low
    flat = table.reshape(-1)
    starts = np.arange(0, 256 * columns, 256)
    # The indices are 8 bytes each: a block at a time fits the cache, and malloc keeps it; otherwise 1000 frames of 40
    # dims took three times as long. Bytes are put into the order of `out` before they are indices.
    step = max(1, (1 << 14) // columns)
    for first in range(0, rows, step):
        # No index can be out of range; "wrap" is merely the fastest way to say so.
        indices = np.ascontiguousarray(coded[first : first + step]) + starts
        flat.take(indices, mode="wrap", out=out[first : first + step])


def _to_float(minimum: np.float32, span: np.float32, value: NDArray[np.integer]) -> Float32Array:
    result: Float32Array = minimum + (span * _PER_STEP) * value.astype(np.float32)
    return result


def encode(matrix: Float32Array, method: int = 1) -> bytes:
    """A record's bytes behind `\\0B`, as `copy-feats --compress --compression-method=METHOD` writes them. Method 1: CM
    above 8 rows, else CM2; 2: CM; 3: CM2; 5: CM3. `matrix`: finite float32 (rows, columns), at least one row and
    column."""
    rows, columns = matrix.shape
    minimum, maximum = matrix.min(), matrix.max()
    if maximum == minimum:
        maximum = np.float32(float(minimum) + (1.0 + abs(float(minimum))))  # in double precision, as in Kaldi
    span = maximum - minimum
    header = np.array([minimum, span], "<f4").tobytes() + np.array([rows, columns], "<i4").tobytes()
    if method == 3 or (method == 1 and rows <= 8):
        return b"CM2 " + header + _to_steps(minimum, span, matrix).tobytes()
    if method == 5:
        return b"CM3 " + header + _to_steps(minimum, span, matrix, 255).astype(np.uint8).tobytes()
    percentiles = _percentiles(minimum, span, matrix)
    coded = _to_bytes(_to_float(minimum, span, percentiles), matrix.T)
    return b"CM " + header + percentiles.tobytes() + coded.tobytes()


def _to_steps(minimum: np.float32, span: np.float32, value: Float32Array, most: int = 65535) -> NDArray[np.uint16]:
    share = np.clip((value - minimum) / span, np.float32(0), np.float32(1))
    # Kaldi adds the double 0.499: the sum is a double, and the conversion cuts off.
    steps: NDArray[np.uint16] = ((share * np.float32(most)).astype(np.float64) + 0.499).astype("<u2")
    return steps


def _percentiles(minimum: np.float32, span: np.float32, matrix: Float32Array) -> NDArray[np.uint16]:
    """(columns, 4) percentiles 0, 25, 75, 100 of each column, strictly increasing; the values themselves of fewer than
    5 rows."""
    rows, quarter = len(matrix), len(matrix) // 4
    ranks = [0, quarter, 3 * quarter, rows - 1] if rows > 4 else list(range(rows))
    steps = np.zeros((4, matrix.shape[1]), np.int64)
    steps[: len(ranks)] = _to_steps(minimum, span, np.partition(matrix, ranks, axis=0)[ranks])
    steps[0] = np.minimum(steps[0], 65532)
    steps[1] = np.minimum(np.maximum(steps[1], steps[0] + 1), 65533)
    steps[2] = np.minimum(np.maximum(steps[2], steps[1] + 1), 65534)
    steps[3] = np.maximum(steps[3], steps[2] + 1)
    return np.ascontiguousarray(steps.T.astype("<u2"))


def _to_bytes(percentiles: Float32Array, values: Float32Array) -> NDArray[np.uint8]:
    """`values` (columns, rows) as bytes between the columns' percentiles (columns, 4)."""
    p0, p25, p75, p100 = (percentiles[:, i : i + 1] for i in range(4))

    def part(low: Float32Array, high: Float32Array, first: int, last: int) -> Float64Array:
        share = (values - low) / (high - low) * np.float32(last - first)
        # 0/0 where a column's percentiles are one float, as its values then are: any byte decodes to it.
        coded: Float64Array = np.floor(np.nan_to_num(share.astype(np.float64)) + (first + 0.5))
        return coded.clip(first, last)

    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        coded = np.where(values < p25, part(p0, p25, 0, 64), part(p25, p75, 64, 192))
        return np.where(values < p75, coded, part(p75, p100, 192, 255)).astype(np.uint8)
