"""The data of a planning problem: networks from a seed, cuts of a model, byte counts, the problem and its solution.

May import jaxdt.run and numpy, and nothing else of the planner.
"""
