"""The syncs, by which the replicas of a stage agree, and the parts that they are built from.

base.py has the interface and the table of kinds; allreduce.py is the kind that exists. exchange.py averages one round
among the participants that it is given, rounds.py keeps the rounds of equal replicas, state_transfer.py brings a
newcomer its stage's state. Imports jaxdt.membership, jaxdt.protocol and jaxdt.run; pure state machines, standard
library only.
"""
