"""Damage done to valid files at random, with a seed: the same seed gives the same bytes."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from random import Random

LARGEST = 64 << 10
"""Bytes of a mutated input at most: what a reader does wrong it does wrong with few."""

INTEGERS = (
    *(0, 1, -1, 2, 7, 8, 9, 10, 127, 128, 255, 256, 4096, 32767, 32768, 65535, 65536, 1_000_000, 2**24, 2**30),
    *(2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, -2, -(2**31), -(2**31) + 1, -(2**63)),
)
BYTES = b"\0\1\2\3\4\5\7\x08\x09\n\x0b\r\x1f !\"#%&'()*,-./0159:;<=>?@B[\\]_`{|}~\x7f\x80\xbf\xc0\xe2\xf0\xfe\xff"
NUMBERS = (
    *(b"0", b"-0", b"-1", b"1", b"1e999", b"-1e999", b"nan", b"inf", b"-inf", b".inf", b"1_000", b"0x10", b"1e-400"),
    *(b"2147483647", b"2147483648", b"-2147483649", b"4294967296", b"9223372036854775808", b"1e308", b"0.1", b"1:30"),
    *(
        b"9" * 30,
        b"1" * 400,
        b"1" * 5000,
        b"1" * 3000 + b"x",
        b"0." + b"1" * 3000 + b"e",
        b"+",
        b".",
        b"e",
        b"1e",
        b"-",
    ),
)
FLOATS = (float("nan"), float("inf"), -float("inf"), 3.4e38, -3.4e38, 1e-45, 1e308, -0.0, 0.5, -1.0)
PATHS = (b"../../x", b"/dev/zero", b"/etc/passwd", b"|", b"cat /etc/passwd |", b"| cat", b"-", b"..", b"x:0", b"x:-1")
ODD = (
    b"\xff\xfe",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\xe2\x80\xa8",
    b"\xef\xbb\xbf",
    b"\xc2\xa0",
    b"\0",
    b"\r\n",
    b"\x85",
    b"\x1b[2J",
)
_DIGITS = re.compile(rb"-?\d+(?:\.\d+)?(?:e-?\d+)?")

Mutation = Callable[[Random, bytearray, Sequence[bytes], Sequence[bytes]], None]


def place(rng: Random, data: bytearray) -> int:
    """A position in `data`, or behind its end; headers, which come first, more often than the rest."""
    if rng.random() < 0.4:
        return min(len(data), int(rng.expovariate(1 / 24)))
    return rng.randint(0, len(data))


def _flip(rng: Random, data: bytearray, tokens: Sequence[bytes], others: Sequence[bytes]) -> None:
    if data:
        data[min(place(rng, data), len(data) - 1)] ^= 1 << rng.randrange(8)


def _set_byte(rng: Random, data: bytearray, tokens: Sequence[bytes], others: Sequence[bytes]) -> None:
    if data:
        data[min(place(rng, data), len(data) - 1)] = rng.choice(BYTES) if rng.random() < 0.7 else rng.randrange(256)


def _set_number(rng: Random, data: bytearray, tokens: Sequence[bytes], others: Sequence[bytes]) -> None:
    if rng.random() < 0.2:
        raw = (
            struct.pack(rng.choice("<>") + "f", rng.choice(FLOATS[:6]))
            if rng.random() < 0.7
            else struct.pack("<d", rng.choice(FLOATS))
        )
    else:
        size = rng.choice((2, 4, 4, 4, 8, 8))
        value = rng.choice(INTEGERS) + rng.choice((0, 0, 0, 1, -1))
        raw = (value % (1 << 8 * size)).to_bytes(size, "little" if rng.random() < 0.9 else "big")
    at = place(rng, data)
    data[at : at + len(raw)] = raw


def _add_to_number(rng: Random, data: bytearray, tokens: Sequence[bytes], others: Sequence[bytes]) -> None:
    at, size = place(rng, data), rng.choice((1, 2, 4, 8))
    value = int.from_bytes(data[at : at + size], "little") + rng.choice((1, -1, 2, -2, 16, -16, 256))
    data[at : at + size] = (value % (1 << 8 * size)).to_bytes(size, "little")


def _truncate(rng: Random, data: bytearray, tokens: Sequence[bytes], others: Sequence[bytes]) -> None:
    del data[place(rng, data) :]


def _delete(rng: Random, data: bytearray, tokens: Sequence[bytes], others: Sequence[bytes]) -> None:
    at = place(rng, data)
    del data[at : at + 1 + int(rng.expovariate(1 / 8))]


def _duplicate(rng: Random, data: bytearray, tokens: Sequence[bytes], others: Sequence[bytes]) -> None:
    at = place(rng, data)
    piece = bytes(data[at : at + 1 + int(rng.expovariate(1 / 30))])
    data[at:at] = piece * (1 if rng.random() < 0.8 else rng.choice((2, 13, 100, 1000)))


def _insert_token(rng: Random, data: bytearray, tokens: Sequence[bytes], others: Sequence[bytes]) -> None:
    word = rng.choice(tokens) if tokens and rng.random() < 0.6 else rng.choice(rng.choice((NUMBERS, PATHS, ODD)))
    at = place(rng, data)
    data[at : at + (len(word) if rng.random() < 0.4 else 0)] = word


def _insert_run(rng: Random, data: bytearray, tokens: Sequence[bytes], others: Sequence[bytes]) -> None:
    at = place(rng, data)
    word = rng.choice(
        (
            bytes([rng.choice(BYTES)]),
            rng.choice(BYTES[-30:]).to_bytes(1, "little"),
            b"[",
            b"{",
            b"[1,",
            b"- ",
            b"a: ",
            b'{"a":',
            b" 1",
            b"\n",
            b" ",
        )
    )
    data[at:at] = word * rng.choice((2, 8, 16, 60, 300, 900, 990, 1000, 3000, 10_000))


def _replace_number(rng: Random, data: bytearray, tokens: Sequence[bytes], others: Sequence[bytes]) -> None:
    start = max(0, place(rng, data) - 100)
    found = list(_DIGITS.finditer(data, start, start + 300))
    if found:
        match = rng.choice(found)
        text = rng.choice(NUMBERS) if rng.random() < 0.5 else b"%d" % (rng.choice(INTEGERS) + rng.choice((0, 1, -1)))
        data[match.start() : match.end()] = text


def _lines(rng: Random, data: bytearray, tokens: Sequence[bytes], others: Sequence[bytes]) -> None:
    lines = data.split(b"\n")[:2000]
    one, two = rng.randrange(len(lines)), rng.randrange(len(lines))
    message = rng.randrange(5)
    if message == 0:
        del lines[one]
    elif message == 1:
        lines.insert(two, lines[one])
    elif message == 2:
        lines[one], lines[two] = lines[two], lines[one]
    elif message == 3:
        lines[one] = bytearray(b" " * rng.choice((1, 2, 4)) + lines[one])
    else:
        words = lines[one].split(b" ")
        rng.shuffle(words)
        lines[one] = bytearray(b" ".join(words))
    data[:] = b"\n".join(lines)


def _splice(rng: Random, data: bytearray, tokens: Sequence[bytes], others: Sequence[bytes]) -> None:
    other = rng.choice(others)
    if rng.random() < 0.5:
        data[place(rng, data) :] = other[rng.randint(0, len(other)) :]
    else:
        at = place(rng, data)
        start = rng.randint(0, len(other))
        data[at:at] = other[start : start + rng.choice((4, 20, 100, 1000))]


_MUTATIONS: tuple[Mutation, ...] = (
    *(_flip, _flip, _set_byte, _set_byte, _set_number, _set_number, _set_number, _add_to_number, _truncate, _delete),
    *(_duplicate, _insert_token, _insert_token, _insert_run, _replace_number, _replace_number, _lines, _splice),
)


def mutate(rng: Random, inputs: Sequence[bytes], tokens: Sequence[bytes]) -> bytes:
    """One of `inputs`, damaged once or some times; `tokens` are words of the format."""
    data = bytearray(rng.choice(inputs))
    for _ in range(1 + int(rng.expovariate(0.7))):
        rng.choice(_MUTATIONS)(rng, data, tokens, inputs)
    return bytes(data[:LARGEST])
