"""The fuzzer of a pool's task table: one server and workers that crash, pause and come back, over a network that
delays, repeats and reorders what they say. In virtual time, without tensors.

task_runs.py (the runs, and as a script many of them), reissue_only.py (the control: a server that issues again only
what was unfinished).

Imports what jaxdt.sim.fuzz may import.
"""
