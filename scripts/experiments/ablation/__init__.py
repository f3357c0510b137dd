"""The ablation of what crosses a boundary (SWARM Tables 7, 8): grid, training in one process, measurements, report.

grid.py, report.py and results.py need no jax; scripts/ablate.py is the command.
"""
