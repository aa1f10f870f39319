"""The phones of the spoken corpus, and which of them each phoneme name of espeak's English accents is."""

from __future__ import annotations

from spoken.tree import SILENCE

PHONES = [
    "SIL",
    "i:",
    "I",
    "E",
    "a",
    "A:",
    "0",
    "O:",
    "U",
    "u:",
    "V",
    "@",
    "3",
    "3:",
    "eI",
    "aI",
    "OI",
    "aU",
    "oU",
    "e@",
    "i@",
    "O@",
    "p",
    "b",
    "t",
    "d",
    "k",
    "g",
    "f",
    "v",
    "T",
    "D",
    "s",
    "z",
    "S",
    "Z",
    "tS",
    "dZ",
    "h",
    "m",
    "n",
    "N",
    "l",
    "r",
    "w",
    "j",
]
_MERGE = {
    **dict.fromkeys(["", "_", "_:", "_!", "_|"], "SIL"),
    **{"I#": "I", "I2": "I", "i": "i:", "@2": "@", "@5": "@", "@-": "@", "a#": "@", "aa": "A:", "A@": "A:", "O2": "O:"},
    **{"o@": "O@", "i@3": "i@", "U@": "U", "IR": "3:", "VR": "3:", "aI2": "aI", "aI3": "aI", "aI@": "aI"},
    **{"t#": "t", "t2": "t", "t[": "t", "?": "t", "n-": "n", "r-": "r", "w#": "w", "@L": "l", ";": "j"},
}
_IDS = {name: index for index, name in enumerate(PHONES, start=SILENCE)}


def phone_of(name: str) -> int:
    """Phone-id, from 1, of a phoneme of espeak. An unknown one is what its first letter is; else it is a schwa."""
    return _IDS.get(_MERGE.get(name, name)) or _IDS.get(name[:1]) or _IDS["@"]
