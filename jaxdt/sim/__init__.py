"""The discrete-event simulator: the protocol machines of a run under a virtual clock, with modelled links and hosts.

It predicts step times and plays faults, deterministically: equal inputs give equal traces. May import `jaxdt.build` and
what lies below it, and the standard library only: neither jax nor numpy.
"""
