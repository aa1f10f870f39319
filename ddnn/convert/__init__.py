"""Kaldi data dirs from other formats."""
