"""The fuzzer: small simulated runs drawn from a seed, their faults, and the invariants that they must keep.

May import the rest of `jaxdt.sim`, which does not import it.
"""
