"""The reports of a run to people: the console and the live table, the journal, metrics and summary, the predicted step,
and the means of several runs with their intervals.

The modules here may import what `jaxdt.runtime` may.
"""
