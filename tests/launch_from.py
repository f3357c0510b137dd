"""launch.py whose processes are forks: launch_from.py FOLDER BYTES FLAGS, with the folder of their train.py and
coordinate.py, and how far a file may grow. Started as a fork_server.Forked."""

import resource
import runpy
import sys
from pathlib import Path

import fork_server

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"

if __name__ == "__main__":
    folder, file_bytes_max = Path(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes_max, file_bytes_max))
    script = fork_server.divide()
    if not script:
        from jaxdt.runtime import fleet

        fleet.subprocess = fork_server.FORKS
        script = str(SCRIPTS / "launch.py")
        sys.argv[:3] = [script]
        sys.path.insert(0, str(SCRIPTS))
        from jaxdt.api import launch

        launch.SCRIPTS = folder
    runpy.run_path(script, run_name="__main__")
