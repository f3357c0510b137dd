"""Machines that are slow at times, and what it costs: stalls.py (which Work is held up, in simulations and in real runs
alike), group_timing.py (throughput of pipelines whose replicas average in groups, without network or arithmetic),
server_line.py (the same where they push to servers behind one line).
"""
