"""Planners to compare with, as solvers of the table in planner/search/base.py.

Each searches by its own rules and is scored by Eq. 1-4. `solve` gives their best partition the best matchings and, if
shorter, the best stage order, as it does for every solver. May import what planner.search may.
"""
