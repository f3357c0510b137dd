"""The machines of membership, which decide who is in the run: a peer's side and the coordinator's side.

member.py and peer.py run in every peer, all other files in the coordinator. How members agree that a step is done, and
which stage needs a peer, are parts that jaxdt.build gives to the coordinator (agreement.py, rebalance_api.py). Imports
jaxdt.protocol and jaxdt.run only; pure state machines, standard library only.
"""
