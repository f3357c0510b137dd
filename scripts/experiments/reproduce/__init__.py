"""The figures and tables of papers that scripts/reproduce.py reproduces, one module each, and what they share.

May import jaxdt and planner. Needs no jax, but for what training/ computes.
"""
