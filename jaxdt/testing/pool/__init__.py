"""The fuzzer of pools, in two sizes.

Whole runs: invariants.py (what must hold besides the step protocol's invariants).

One server's task table, without machines, in virtual time: task_runs.py (workers that crash, pause and come back
over a network that delays, repeats and reorders; as a script many runs), reissue_only.py (the control: a server that
issues again only what was unfinished).

Imports what jaxdt.testing may import.
"""
