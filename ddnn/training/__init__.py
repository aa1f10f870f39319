"""Training: the loop, evaluation, the run dir."""
