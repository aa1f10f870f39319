"""Frames in memory: the corpus, what is held out of it, splicing, normalization, frame order."""
