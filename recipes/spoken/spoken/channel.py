"""From a synthesizer's samples to what a recognizer would get of a telephone call: tape, room, noise, line, filter banks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray
from scipy import signal

from ddnn.util.arrays import Float32Array

RATE = 8000
BANDS = 40
SHIFT, WINDOW, _FFT = 80, 200, 256  # samples: 10 ms, 25 ms
_KNOT = 3000  # samples between two speeds of the tape
_NOISES = {"colored": 0.0, "voice": 4.0, "babble": 2.0}  # how much weaker than colored noise, in dB
Samples = NDArray[np.float64]


@dataclass(frozen=True)
class Settings:
    """How hard a channel is; 0 of `warp`, `reverb` and `tilt`, and an infinite `snr`, leave the speech as it is."""

    snr: float = 24.0  # mean, in dB
    reverb: float = 0.3  # upper end of the energy of the room's tail, relative to the direct sound
    tilt: float = 4.0  # dB: standard deviation of the gains of a speaker's equalizer
    warp: float = 0.06  # standard deviation of the logarithm of the tape's speed


@cache
def _below_3600(rate: int) -> NDArray[np.float64]:
    return np.asarray(signal.butter(6, 3600, fs=rate, output="sos"))


def play_tape(samples: Samples, rate: int, warp: float, rng: np.random.Generator) -> tuple[Samples, Samples]:
    """The samples at 8 kHz, read at a speed that drifts, and for each of them its position among `samples`, ascending."""
    narrow = signal.sosfilt(_below_3600(rate), samples)
    count = int(len(samples) * RATE / rate * 1.3) + 2 * _KNOT
    knots = np.exp(rng.normal(0, warp, count // _KNOT + 2))
    speeds = np.interp(np.arange(count) / _KNOT, np.arange(len(knots)), knots)
    positions = np.cumsum(speeds) * rate / RATE
    positions = positions[: np.searchsorted(positions, len(samples) - 1)]
    return np.interp(positions, np.arange(len(samples)), narrow), positions


class Channel:
    """Room, noise, equalizer and band of one speaker."""

    def __init__(self, settings: Settings, pool: Sequence[NDArray[np.floating]], rng: np.random.Generator) -> None:
        """`pool`: speech of others, at 8 kHz, of which voices and babble in the background are made."""
        self._pool = pool
        self._noise = list(_NOISES)[rng.integers(len(_NOISES))]
        self._snr = rng.normal(settings.snr, 4) + _NOISES[self._noise]
        decay = rng.uniform(0.08, 0.6)  # T60 in seconds
        tail = rng.standard_normal(int(decay * RATE)) * 10 ** (-3 * np.arange(int(decay * RATE)) / (decay * RATE))
        tail[: int(0.003 * RATE)] = 0
        tail *= np.sqrt(rng.uniform(0, settings.reverb) / max(1e-12, float(tail @ tail)))
        self._room = np.concatenate([[1.0], tail])
        band = [rng.uniform(80, 350), rng.uniform(3000, 3700)]
        self._band = signal.butter(2, band, btype="bandpass", fs=RATE, output="sos")
        gains = 10 ** (rng.normal(0, settings.tilt, 6) / 20)
        self._equalizer = signal.firwin2(65, [0, 300, 800, 1500, 2400, 4000], gains, fs=RATE)

    def transmit(self, speech: Samples, rng: np.random.Generator) -> Samples:
        """What comes out at the other end, of the same length: 8-bit mu-law, as float64."""
        sound = signal.fftconvolve(speech, self._room)[: len(speech)]
        noise = self._draw_noise(len(sound), rng)
        power = float(np.mean(sound**2)) / max(1e-12, float(np.mean(noise**2)))
        sound = sound + noise * np.sqrt(power * 10 ** (-rng.normal(self._snr, 3) / 10))
        sound = signal.sosfilt(self._band, signal.lfilter(self._equalizer, [1.0], sound))
        sound *= 0.08 / max(1e-9, float(np.sqrt(np.mean(sound**2))))
        companded = np.sign(sound) * np.log1p(255 * np.minimum(np.abs(sound), 1)) / np.log(256)
        rounded = np.round(companded * 127) / 127
        return np.asarray(np.sign(rounded) * np.expm1(np.abs(rounded) * np.log(256)) / 255)

    def _draw_noise(self, length: int, rng: np.random.Generator) -> Samples:
        """Noise of any power: colored and fluctuating, one other voice, or five."""
        if self._noise == "colored":
            white = signal.lfilter([1.0], [1.0, -rng.uniform(0.5, 0.98)], rng.standard_normal(length))
            knots = rng.normal(0, 4, length // 2000 + 2)  # dB, every quarter of a second
            return np.asarray(white * 10 ** (np.interp(np.arange(length) / 2000, np.arange(len(knots)), knots) / 20))
        voices = rng.choice(len(self._pool), 1 if self._noise == "voice" else 5, replace=False)
        others = [self._pool[voice] for voice in voices]
        parts = [np.take(other, np.arange(length) + rng.integers(len(other)), mode="wrap") for other in others]
        return np.asarray(np.sum(parts, axis=0))


def _filter_banks() -> NDArray[np.float64]:
    """Kaldi's triangular mel bins, 100 to 3800 Hz: float64 [129, 40] (kaldi `feat/mel-computations.cc`)."""

    def mel(hertz: NDArray[np.float64]) -> NDArray[np.float64]:
        return 1127 * np.log1p(hertz / 700)

    low, high = mel(np.array([100.0, 3800.0]))
    edges = low + (high - low) / (BANDS + 1) * np.arange(BANDS + 2)
    frequencies = mel(np.arange(_FFT // 2 + 1) * RATE / _FFT)[:, None]
    rising = (frequencies - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - frequencies) / (edges[2:] - edges[1:-1])
    return np.asarray(np.maximum(0, np.minimum(rising, falling)))


_MEL = _filter_banks()
_POVEY = np.hanning(WINDOW) ** 0.85


def num_frames(samples: int) -> int:
    """As with Kaldi's --snip-edges=true."""
    return max(0, 1 + (samples - WINDOW) // SHIFT)


def filter_banks(samples: Samples) -> Float32Array:
    """Log mel energies, float32 [frames, 40], as Kaldi's compute-fbank-feats without dither and energy: DC removed,
    preemphasis 0.97, Povey window (kaldi `feat/feature-fbank.cc`)."""
    frames = np.lib.stride_tricks.sliding_window_view(samples * 32768, WINDOW)[::SHIFT]
    frames = frames - frames.mean(axis=1, keepdims=True)
    previous = np.concatenate([frames[:, :1], frames[:, :-1]], axis=1)
    power = np.abs(np.fft.rfft((frames - 0.97 * previous) * _POVEY, _FFT)) ** 2
    return np.asarray(np.log(np.maximum(power @ _MEL, np.finfo(np.float32).eps)), np.float32)
