"""The machines on real hosts: sockets, jitted stage functions, checkpoints."""
