"""The code that scripts share: flags, one-line errors, exit codes, runs as processes of this machine, pictures, tables.

May import everything else of jaxdt, and nothing of jaxdt imports it.
"""
