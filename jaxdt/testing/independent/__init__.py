"""The fuzzer of independent pipelines: replicas that may differ, in averaging groups or with servers.

It shares no code with the machines that it checks. `residues` and `tensors`: the numbers that stand for parameters;
`log_replay`: a run again from its reports; `group_rules`: which groups may form; `invariants`: what is checked at every
event and at the end; `cases`: runs from a seed.
"""
