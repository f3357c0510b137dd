"""The wirings, which decide which peer gets a microbatch next, and the parts that they are built from.

base.py has the interface and the table of kinds; fixed.py and swarm.py are the kinds. Parts that several kinds use:
routed.py (microbatches along routes), recovery.py (Work that is done again after a view in mid-step, and the tensors
that are kept for it), delayed_update.py (several steps under way), load_report.py and rebalance.py (moves of peers to
other stages). Imports jaxdt.membership, jaxdt.protocol and jaxdt.run; pure state machines, standard library only.
"""
