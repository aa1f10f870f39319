"""Lattices for sequence-discriminative training."""
