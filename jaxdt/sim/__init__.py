"""The machines under a virtual clock: standard library only."""
