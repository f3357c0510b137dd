"""The runs that study.py compares: what they have in common, one run, its results, the page of ten seeds."""
