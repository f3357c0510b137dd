"""Who gets a microbatch next: the wirings, and the parts that they are built from.

base.py has the interface and the table of kinds; fixed.py and swarm.py are the kinds. Parts that several kinds use:
routed.py (microbatches along routes), recovery.py (what is done again after a view in mid-step), retention.py (which
tensors are kept for that), delayed_update.py (several steps under way), load_report.py and rebalance.py (which peers
change stages). Imports jaxdt.membership, jaxdt.protocol and jaxdt.spec; pure state machines, standard library only.
"""
