"""Where the files of one run are: in one folder, or in two where launch.py --emit has written the job of the run."""

from dataclasses import dataclass
from pathlib import Path

EMITTED_RUN_DIR = "run_dir"  # in a folder that launch.py --emit has written: where the processes of the run write
ADDRESS = "coordinator_address"
COORDINATOR_FLAGS = "coordinator.flags"  # only an emitted job has this file


@dataclass(frozen=True)
class RunFolders:
    """The two folders of a run. They are the same one if the run was launched on this machine.

    job: config, plan and credentials.
    run_dir: what the processes of the run write."""

    job: Path
    run_dir: Path

    @classmethod
    def of(cls, folder: Path) -> "RunFolders":
        """The folders of the run of which `folder` is either one."""
        if (folder / COORDINATOR_FLAGS).exists():
            return cls(folder, folder / EMITTED_RUN_DIR)
        if folder.name == EMITTED_RUN_DIR and (folder.parent / COORDINATOR_FLAGS).exists():
            return cls(folder.parent, folder)
        return cls(folder, folder)
