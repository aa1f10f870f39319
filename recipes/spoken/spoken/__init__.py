"""A corpus of read speech from espeak-ng: `make.py` is the command."""
