"""The syncs, by which the replicas of a stage agree, and the parts that they are built from.

base.py has the interface and the table of kinds. engine.py has the life of all rounds, over exchange.py, which averages
one round among the participants that it is given; a policy for each kind of sync says what its rounds are for.
transfer.py has the life of all state that moves, with a policy for each kind: state_transfer.py, donor_transfer.py,
worker_parameters.py, part_transfer.py. Imports jaxdt.membership, jaxdt.protocol and jaxdt.run; pure state machines,
standard library only.
"""
