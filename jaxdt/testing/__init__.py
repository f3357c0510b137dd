"""What tests and scripts check runs with: small simulated runs, their faults, and the invariants that they must keep.

`cases` draws a run from a seed, `case` plays it under its invariants. `held_tensors`: what peers hold in place of
arrays (`symbolic_tensors`: counts of microbatches; `independent`: residues). `replay`: a run again from its log, with
residues or with the functions of a real run.

May import all of `jaxdt` that imports the standard library only. No other package of `jaxdt` imports it.
"""
