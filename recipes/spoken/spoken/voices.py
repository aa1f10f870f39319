"""Speech of espeak-ng in invented voices: samples, and when each phoneme and each word begins.

Calls libespeak-ng by ctypes, as `speak_lib.h` declares it. What one utterance leaves behind in espeak (flutter, breath, the phase of
its waves, `rand()`) changes the next: only a new process for each speaker, with a fixed order of utterances, repeats its bytes.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ddnn.util.errors import UserError

RATE = 22050  # of espeak's samples
ACCENTS = ("en", "en-US", "en-GB-scotland", "en-GB-x-gbclan", "en-GB-x-rp", "en-GB-x-gbcwmd", "en-029", "en-US-nyc")
_INSTALL = "apt-get install libespeak-ng1 espeak-ng-data bible-kjv"
_SYNCHRONOUS, _PHONEME_EVENTS, _DO_NOT_EXIT = 2, 1, 1 << 15
_UTF8, _SSML = 1, 0x10
_WORD, _PHONEME = 1, 7


class _Id(ctypes.Union):
    _fields_ = (("number", ctypes.c_int), ("name", ctypes.c_char_p), ("string", ctypes.c_char * 8))


class _Event(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_int),
        ("unique_identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", _Id),
    )


_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event))


@dataclass
class Speech:
    """What espeak made of one text: `samples` (float64, [-1, 1], 22,050 Hz), and events in the order of time."""

    samples: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    phonemes: list[tuple[int, str]] = field(default_factory=list)  # sample at which it begins, name; "" is silence
    words: list[tuple[int, int]] = field(
        default_factory=list
    )  # number of phonemes before it, position in the text, from 0


def data_folder() -> Path:
    """The folder `espeak-ng-data` of the system. UserError: it is not installed."""
    for folder in (
        *Path("/usr/lib").glob("*/espeak-ng-data"),
        *Path("/usr").glob("*/share/espeak-ng-data"),
        Path("/usr/share/espeak-ng-data"),
    ):
        if (folder / "phontab").exists():
            return folder
    raise UserError("espeak-ng's data are not installed", location="espeak-ng-data", hint=_INSTALL)


def link_data(folder: Path) -> None:
    """Makes `folder`/espeak-ng-data: espeak's data by symbolic links, with an empty folder for voices of our own."""
    source, own = data_folder(), folder / "espeak-ng-data"
    (own / "voices" / "!v").mkdir(parents=True)
    for path in source.iterdir():
        if path.name != "voices" and (path.name == "en_dict" or not path.name.endswith("_dict")):
            (own / path.name).symlink_to(path)


def draw_variant(rng: np.random.Generator) -> str:
    """A voice variant of espeak as a text: length of the vocal tract, formants, pitch, flutter, roughness, breath, ... Without
    espeak's Klatt synthesizer, which reads outside its memory with some texts."""
    female = rng.random() < 0.5
    tract = rng.normal(1.14 if female else 1.0, 0.05)
    pitch = (190 if female else 105) * rng.normal(1, 0.15)
    spread = 1 + rng.uniform(0.15, 0.6)
    lines = [
        "language variant",
        f"pitch {max(50, pitch):.0f} {max(60, pitch * spread):.0f}",
        f"flutter {rng.integers(0, 10)}",
        f"roughness {rng.integers(0, 5)}",
        f"voicing {rng.integers(70, 130)}",
        f"consonants {rng.integers(70, 140)} {rng.integers(70, 140)}",
    ]
    for number in range(9):
        frequency = 100 * tract * rng.uniform(0.95, 1.05)
        lines.append(f"formant {number} {frequency:.0f} {rng.integers(70, 125)} {rng.integers(80, 150)}")
    lines.append("tone " + " ".join(f"{hz} {rng.integers(80, 255)}" for hz in (250, 900, 2000, 3400)))
    if rng.random() < 0.3:
        lines.append("breath " + " ".join(str(rng.integers(0, 8)) for _ in range(8)))
    return "\n".join(lines) + "\n"


class Espeak:
    """One voice of espeak, in a process that has not spoken before."""

    def __init__(self, folder: Path, accent: str, variant: str, seed: int) -> None:
        name = ctypes.util.find_library("espeak-ng")
        if name is None:
            raise UserError("libespeak-ng is not installed", location="libespeak-ng.so.1", hint=_INSTALL)
        self._library = ctypes.CDLL(name)
        rate = self._library.espeak_Initialize(_SYNCHRONOUS, 0, str(folder).encode(), _PHONEME_EVENTS | _DO_NOT_EXIT)
        if rate != RATE:
            raise UserError(f"espeak-ng speaks at {rate} Hz, expected {RATE}", location=name, hint=_INSTALL)
        self._callback = _CALLBACK(self._receive)
        self._library.espeak_SetSynthCallback(self._callback)
        if self._library.espeak_SetVoiceByName(f"gmw/{accent}+{variant}".encode()):
            raise UserError(f"espeak-ng has no voice gmw/{accent}+{variant}", location=str(folder), hint=_INSTALL)
        ctypes.CDLL(None).srand(seed)
        self._blocks: list[NDArray[np.int16]] = []
        self._speech = Speech()

    def _receive(self, samples: ctypes._Pointer[ctypes.c_short], count: int, events: ctypes._Pointer[_Event]) -> int:
        if count > 0:
            self._blocks.append(np.ctypeslib.as_array(samples, (count,)).copy())
        number = 0
        while events[number].type:
            event = events[number]
            if event.type == _WORD:
                self._speech.words.append((len(self._speech.phonemes), event.text_position - 1))
            elif event.type == _PHONEME:
                position = event.sample
                self._speech.phonemes.append((position, event.id.string.decode(errors="replace")))
            number += 1
        return 0

    def speak(self, ssml: str) -> Speech:
        """Speaks a text with SSML marks."""
        self._blocks, self._speech = [], Speech()
        text = ssml.encode()
        self._library.espeak_Synth(text, ctypes.c_size_t(len(text) + 1), 0, 1, 0, _UTF8 | _SSML, None, None)
        if self._blocks:
            self._speech.samples = np.concatenate(self._blocks) / 32768
        return self._speech
