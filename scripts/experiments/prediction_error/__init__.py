"""How far predicted step times are from measured ones: raw data of runs, hosts of a network on one machine, the page.

Imports jaxdt, nothing of scripts. scripts/experiments/check_prediction.py is the command.
"""
