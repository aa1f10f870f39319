"""Benchmarks of the trainer itself."""
