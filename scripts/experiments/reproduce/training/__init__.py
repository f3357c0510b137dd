"""Training in one process for the pages that show losses: whole models in plain jax, without stages and machines.

The other files of experiments.reproduce need no jax; they import this folder inside the functions that compute.
"""
