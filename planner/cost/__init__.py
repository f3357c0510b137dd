"""The cost of a plan by Eq. 1-4: the reference evaluator, the compiled one, bounds, and placements by OR-Tools.

reference.py shares no code with the others, because it checks what they claim. May import planner.model.
"""
