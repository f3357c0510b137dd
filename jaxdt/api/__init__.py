"""Runs and simulations as functions: what `from jaxdt import launch, simulate` gives, and what the scripts call.

May import everything else of jaxdt but the modules of jaxdt.cli that define flags; only scripts import it.
"""
