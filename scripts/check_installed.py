"""Importing this first ends a script with one line, and code 2, where the project is not installed for the Python that
runs it. Standard library only."""

import importlib.util
import sys

if importlib.util.find_spec("jaxdt") is None:
    print(
        f"jaxdt is not installed for {sys.executable}: in a checkout, source .venv/bin/activate "
        "(./scripts/quickstart.sh makes it)",
        file=sys.stderr,
    )
    sys.exit(2)
