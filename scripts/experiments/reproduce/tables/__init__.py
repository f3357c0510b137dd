"""Targets of single tables, which share no code of their own. They import the modules of the folder above."""
