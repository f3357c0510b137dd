"""Independent pipelines, whose replicas may differ, in averaging groups or with servers.

It shares no code with the machines that it checks. `residues`: the numbers that stand for parameters; `tensors`: those
that a peer holds; `group_rules`: which groups may form; `invariants`: what is checked at every event and at the end.
"""
