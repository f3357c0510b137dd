"""What tests and scripts check runs with: small simulated runs drawn from a seed, their faults, and the invariants that
they must keep.

May import all of `jaxdt` that imports the standard library only. No other package of `jaxdt` imports it.
"""
