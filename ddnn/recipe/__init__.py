"""Recipes: what to train, on what, how."""
