"""The vocabulary of the machines: events, messages, reports, ledger, participants of a round, schedules, trace.

No policy stands here: what happens when is decided in jaxdt.membership, jaxdt.wiring and jaxdt.sync. Imports jaxdt.run
only; standard library only.
"""
