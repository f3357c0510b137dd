"""The rules by which replicas of a stage average together, where they may differ: base.py (the interface, the table),
and a file for each rule. A rule is a pure state machine; it may import jaxdt.run and this folder, and nothing else.
"""
