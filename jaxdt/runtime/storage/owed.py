"""What a peer owes with the state of a checkpoint (jaxdt.sync.error_feedback): a file of each member beside the parts.

All replicas of a stage have the same state, so one of them writes it. What each owes differs: each writes its own, on
its own disk, and reads it when it goes back to this checkpoint or is resumed from it. Without the file, or with that of
another stage, it owes nothing, and the run goes on: less than one rounding of one step is lost."""

import io
import json
import re
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxdt.runtime.storage.durable import write_durably
from jaxdt.sync.error_feedback import Slot

OWED = re.compile(r"owed_\d+\.npz(\.\d+\.\d+\.tmp)?")
ABOUT = "about"


@dataclass(frozen=True)
class Debtor:
    """Who owes: a peer with the layers lo..hi-1, at which so many steps may be under way."""

    peer: int
    lo: int
    hi: int
    n_under_way: int


def write_owed(folder: Path, debtor: Debtor, run: str, generation: int, owed: Mapping[Slot, np.ndarray]) -> None:
    """Write what is owed with the state of a checkpoint of this generation of a run. An OSError names the file."""
    content = io.BytesIO()
    vectors: dict[str, Any] = {f"{stage} {series}": vector for (stage, series), vector in owed.items()}
    np.savez(content, **{ABOUT: np.array(_about(debtor, run, generation))}, **vectors)
    folder.mkdir(parents=True, exist_ok=True)
    write_durably(_path(folder, debtor.peer), content.getvalue())


def read_owed(folders: Iterable[Path], debtor: Debtor, run: str, generation: int) -> dict[Slot, np.ndarray]:
    """What is owed with the state of the checkpoint of this generation of a run, whose files are in these folders;
    nothing if no file says so. A file that is damaged is named in a line."""
    for path in (_path(folder, debtor.peer) for folder in folders):
        if not path.exists():
            continue
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as found:
                if str(found[ABOUT]) == _about(debtor, run, generation):
                    return {_slot(name): found[name] for name in found.files if name != ABOUT}
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            print(f"{path}: damaged ({error}); what codecs lost before this checkpoint is not made up for", flush=True)
    return {}


def _path(folder: Path, peer: int) -> Path:
    return folder / f"owed_{peer}.npz"


def _about(debtor: Debtor, run: str, generation: int) -> str:
    return json.dumps(asdict(debtor) | {"run": run, "generation": generation}, sort_keys=True)


def _slot(name: str) -> Slot:
    stage, series = map(int, name.split())
    return stage, series
