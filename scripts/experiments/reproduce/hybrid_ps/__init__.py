"""Targets of the hybrid parameter-server paper. Imports the shared modules of the folder above."""
