"""The structure of the code: imports point downward, nothing grows unnoticed, and retired words do not come back."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from mutants import read_mutants

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ddnn"
FILES = sorted(PACKAGE.rglob("*.py"))

TOKENS = {
    "top": 3_300,
    "averaging": 6_200,
    "bench": 4_950,
    "cli": 5_350,
    "data": 15_650,
    "decoding": 9_100,
    "distributed": 13_100,
    "inspection": 6_500,
    "kaldi": 20_500,
    "nn": 31_750,
    "optim": 10_650,
    "recipe": 12_350,
    "report": 14_450,
    "reproduce": 16_050,
    "runs": 12_750,
    "slurm": 6_600,
    "synth": 5_250,
