"""Trials with real processes, which scripts/experiments/trial.py plays: a file each, with a docstring and TRIAL."""
