"""The output of the planner, printed, drawn and read back: plan.json, tables, `explain`, `compare` and `plot`.

A module with run(flags) is a command of `python -m planner`. May import planner.search and the layers below it; reading
and explaining a plan needs neither numba nor OR-Tools, and so stays out of the search.
"""
