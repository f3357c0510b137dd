"""Plans by cost (Eq. 1-4): the table of solvers (base.py), the solvers, and what they share (incumbent.py).

A new solver is one file with an ENTRY and one line in the table of base.py. May import planner.cost and planner.model.
"""
