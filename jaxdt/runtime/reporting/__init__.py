"""What a run tells people: the console and the live table, the journal, metrics and summary, and the predicted step.

The modules here may import what `jaxdt.runtime` may.
"""
