"""The ablation of what crosses a boundary (SWARM Tables 7, 8): grid, training in one process, measurements, report.

May import jaxdt.sim, jaxdt.build, jaxdt.model, jaxdt.codec and what is below them; grid.py, predict.py, report.py and
results.py need no jax.
"""
