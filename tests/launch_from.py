"""launch.py with other variants of train.py and coordinate.py: launch_from.py FOLDER FLAGS, with the folder of both."""

import sys
from pathlib import Path

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    sys.argv = [sys.argv[0], *sys.argv[2:]]
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "scripts"))
    import launch

    from jaxdt.api import launch as api
    from jaxdt.cli import run_flags

    api.SCRIPTS = folder
    run_flags.run(launch.main)
