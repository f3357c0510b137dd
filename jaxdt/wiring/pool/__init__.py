"""A pool: servers of a stage, which are members of the run, and workers outside of the views that compute for them and
may vanish at any moment (hybrid parameter servers).

even_transfer.py (which microbatches go from which peer of a stage to which of the next), task_table.py (a server's
tasks of one step, as data), worker_roster.py (which workers, and which of their processes, a server has admitted),
contributions.py (their gradients: asked for, checked and added), server.py (who does what), worker.py, entry.py.

Imports what jaxdt.wiring may import.
"""
