"""What the coordinator of a run is told when it starts, and what it knows of an earlier one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxdt.core import plain
from jaxdt.core.events import Hello, Record, View, Welcome


@dataclass(frozen=True)
class Terms:
    """What the coordinator of one run has to know. `stage_of` maps each peer of the plan to its stage; `job` is what a
    newcomer is told: config and plan as JSON. `waits`: a stage that has lost all its peers waits for another."""

    run: str
    fingerprint: str
    stage_of: Mapping[int, int]
    n_stages: int
    start_version: int
    start_lineage: int
    n_steps: int
    tokens_per_sample: int
    on_nonfinite: str
    heartbeat_s: float
    deadline_floor_s: float
    waits: bool = False
    job: Mapping[str, str] = field(default_factory=dict)

    def refusal(self, src: int, stage: int, hello: Hello) -> str:
        """'' if the peer is who it should be and runs what it should."""
        if (hello.peer, hello.stage, hello.fingerprint) == (src, stage, self.fingerprint):
            return ""
        return (
            f"peer {src}: refused, it runs stage {hello.stage} of {hello.fingerprint}, "
            f"expected stage {stage} of {self.fingerprint}"
        )

    def answer(self, peer: int, stage: int) -> Welcome:
        """What a newcomer is told."""
        return Welcome(self.run, peer, stage, self.fingerprint, dict(self.job))


@dataclass(frozen=True)
class Memory:
    """What an earlier coordinator of the run made durable: its number of starts, its last view and record, and the
    version of the newest complete checkpoint."""

    reign: int
    view: View
    records: tuple[Record, ...]
    checkpoint: int


def remembered(disk: Mapping[str, Any], checkpoint: int) -> Memory | None:
    """From what was persisted under the names "reign", "view" and "record", as plain data; None if there was no view
    yet. A record of an earlier lineage does not count any more. BadInput for anything else than what was written."""
    if disk.get("view") is None:
        return None
    view = plain.read(View, disk["view"], "view")
    records = [plain.read(Record, disk["record"], "record")] if disk.get("record") else []
    reign = plain.read(int, disk.get("reign"), "reign")
    return Memory(reign, view, tuple(r for r in records if r.lineage == view.lineage), checkpoint)
