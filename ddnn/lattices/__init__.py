"""Lattices in training: forward-backward, criteria over utterances, and where lattices come from."""
