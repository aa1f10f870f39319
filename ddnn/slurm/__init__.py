"""Trainings as Slurm jobs."""
