"""The planner decides which device of a network holds which stage of a model. `python -m planner` is its command line.

Folders, from the bottom up: model (data), cost (Eq. 1-4), search (plans by cost), step_time (plans by simulated step),
report (what is printed and drawn), commands (what `solve` and `network` run). A folder may import those before it, and
all may import jaxdt.spec; step_time also imports jaxdt.sim. Nothing here imports jax or the runtime.
"""
