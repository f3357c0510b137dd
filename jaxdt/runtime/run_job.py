"""What a run is given, and the job that its coordinator and each of its peers make of it."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxdt.build import RunStart, fingerprint
from jaxdt.model.data import TokenFile
from jaxdt.protocol import events as ev
from jaxdt.run.config import RunConfig
from jaxdt.run.network import Network
from jaxdt.run.plan import Plan
from jaxdt.run.work import WorkKind
from jaxdt.runtime.identity.credential import Credential
from jaxdt.runtime.identity.credential import load as load_credential_file
from jaxdt.runtime.storage.checkpoint import about_run, check_resumable
from jaxdt.runtime.storage.checkpointer import Checkpointer
from jaxdt.runtime.storage.owed import Debtor, read_owed
from jaxdt.runtime.storage.parts import find_part, part_folders, read_manifest
from jaxdt.sim.stragglers.stalls import PeerStalls, Stalls
from jaxdt.sync.error_feedback import Slot


@dataclass(frozen=True)
class RunInputs:
    """What a run is given, checked (jaxdt.cli.run_inputs).

    data: the open token file.
    network: the links that the transport emulates, or None.
    forward_s_min: emulates a slower device: a forward takes at least this long, and a backward twice as long.
    stalls: emulated stragglers, or None.
    """

    config: RunConfig
    plan: Plan
    data: TokenFile
    network: Network | None = None
    forward_s_min: float = 0.0
    stalls: Stalls | None = None


@dataclass(frozen=True, kw_only=True)
class RunJob(RunInputs):
    """The inputs of a run, and what one of its processes is given beside them.

    run: the name of the run, equal on all its processes.
    credential: the credential file of this process; without one, only loopback addresses are allowed, unless
        `allow_plaintext`.
    resume: the folder of a complete checkpoint to resume from, or None.
    """

    run: str
    run_dir: Path
    credential: Path | None = None
    resume: Path | None = None
    allow_plaintext: bool = False

    @property
    def about(self) -> dict:
        """The fields in which a checkpoint must agree with this run."""
        return about_run(self.config, self.data.checksum)

    @property
    def connection_name(self) -> str:
        """The name that both ends of a connection must agree on: a process that runs something else is refused."""
        return f"{self.run}, {fingerprint(self.config, self.plan, self.data.checksum)}"

    @functools.cached_property
    def start(self) -> ev.Checkpoint:
        """The checkpoint with which the run starts."""
        return check_resumable(self.resume, self.about) if self.resume else ev.Checkpoint()

    @property
    def run_start(self) -> RunStart:
        """The start of the run, as `build` needs it."""
        return RunStart(self.run, self.start, self.data.checksum)

    def load_credential(self) -> Credential | None:
        return load_credential_file(self.credential) if self.credential else None

    def load_entries(self, version: int, parts: tuple[ev.Part, ...], names: list[str]) -> Iterator[tuple[str, dict]]:
        """Entries of these parts of the checkpoint of `version`, one by one: this run's own, or those that it resumed
        from."""
        from jaxdt.runtime.storage.entries import read_parts  # loads JAX, which only peers need

        return read_parts(parts, part_folders(self.run_dir, version, self.resume), names)

    def load_owed(self, version: int, parts: tuple[ev.Part, ...], debtor: Debtor) -> dict[Slot, np.ndarray]:
        """What a peer owes with the checkpoint of `version`, of which these parts are on this disk."""
        folders = part_folders(self.run_dir, version, self.resume)
        found = [path for part in parts if (path := find_part(folders, part.digest))]
        about = read_manifest(found[0])
        return read_owed(folders, debtor, about.run, about.generation)

    def work_s_min(self, stage: int) -> dict[str, float]:
        """The shortest time that each kind of Work takes on the emulated device. The last stage's backward contains
        its forward."""
        if stage == self.plan.n_stages - 1:
            forward_s = 0.0
            backward_s = 3 * self.forward_s_min
        else:
            forward_s = self.forward_s_min
            backward_s = 2 * self.forward_s_min
        return {WorkKind.FORWARD: forward_s, WorkKind.BACKWARD: backward_s, WorkKind.REGENERATE: backward_s}

    def stalls_of(self, peer: int) -> PeerStalls | None:
        """The stalls of a peer that is emulated as a straggler."""
        return PeerStalls(self.stalls, peer) if self.stalls else None

    def checkpointer(self, stage: int | None) -> Checkpointer:
        """The writer of a stage's part of each checkpoint; for `stage` None, one that marks checkpoints complete."""
        stages, keep = (self.plan.n_stages, stage), self.config.train.keep_checkpoints
        return Checkpointer(self.run_dir, self.run, self.about, keep, stages, self.resume)
