"""Comparisons of measured runs, which scripts/experiments/compare.py makes: a file each, docstring and COMPARISON."""
