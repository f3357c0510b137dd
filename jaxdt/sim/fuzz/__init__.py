"""Random small runs under faults, and the invariants that they must keep."""
