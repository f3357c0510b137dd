"""The requests of an operator to a live run, and their lasting effects: a pause, a wanted checkpoint, revoked peers.

A request is refused in one line or accepted; the coordinator then carries it out. Every request leaves the losses as
they are: a pause holds back the record of a step whose results all members hold already, a checkpoint is one more mark
on a record, and peers go as they do by themselves or by a failure.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxdt.membership.coordinator_config import OperatorState, WantedCheckpoint
from jaxdt.membership.roster import Roster
from jaxdt.protocol import events as ev

FOR_A_PEER = ("drain", "evict", "revoke")
STOPPED = "stopped by an operator"
COMMANDS = ("status", "pause", "resume", "checkpoint", "stop", *FOR_A_PEER)


@dataclass(frozen=True)
class Progress:
    """The progress of the run: committed steps, steps in all, and the version of the newest complete checkpoint."""

    n_committed: int
    n_steps: int
    checkpoint: int


class Operations:
    """`state` is what has to be durable. `stops_at`: the run ends when the checkpoint of this version is complete; None
    until somebody has asked for it and its step is committed. `silences`: for how many seconds each peer has been
    silent; `workers`: a pool's, as rows of the status."""

    def __init__(self, state: OperatorState):
        self.state = state
        self.stops_at: int | None = None
        self.silences: Mapping[int, float] = {}
        self.workers: Sequence[Mapping[str, Any]] = ()
        self.workers_coming: Sequence[int] = ()
        self._stop: tuple[int, str] | None = None  # exit code of a run that is to stop, and who has asked for it
        self._wants_checkpoint = False

    @property
    def holds_steps(self) -> bool:
        """Whether no further step may be committed now."""
        return self.state.paused or self.stops_at is not None

    def is_revoked(self, peer: int) -> bool:
        """Whether a peer is evicted for good, also under a temporary id."""
        return peer < ev.OPERATOR_IDS and peer % ev.PEER_IDS in self.state.revoked

    def refusal(self, request: ev.OperatorRequest, roster: Roster, progress: Progress) -> str:
        """'' for a request that can be carried out, else the reason."""
        command, peer = request.command, request.peer
        if command not in COMMANDS:
            return f"command: got {command!r:.40}, expected one of {', '.join(COMMANDS)}"
        if (peer is not None) != (command in FOR_A_PEER):
            return f"{command}: got {'no peer' if peer is None else f'peer {peer}'}, expected {_expected_peer(command)}"
        if command == "revoke":
            return f"revoke: peer {peer} is revoked already" if peer in self.state.revoked else ""
        if command == "status":
            return ""
        if roster.view is None:
            waits = "it waits for the peers of the plan; Ctrl-C at its coordinator ends it"
            return f"{command}: the run has not begun, {waits}"
        if command in FOR_A_PEER and peer not in roster.members:
            return f"{command}: peer {peer} is no member, expected one of {', '.join(map(str, sorted(roster.members)))}"
        if self.state.paused == (command == "pause") and command in ("pause", "resume"):
            return f"{command}: the run is {'paused already' if self.state.paused else 'not paused'}"
        if command == "evict" and peer is not None and roster.is_last_of_stage(peer):
            return f"evict: {roster.name(peer)} is the last replica of its stage, whose state would be lost"
        if command in ("checkpoint", "stop") and progress.n_committed >= progress.n_steps:
            return f"{command}: all {progress.n_steps} steps are done, and their checkpoint is being written"
        return ""

    def accept(self, request: ev.OperatorRequest, roster: Roster, progress: Progress) -> str:
        """Take a request on; the answer for people."""
        peer = request.peer
        match request.command:
            case "pause":
                self.state = replace(self.state, paused=True)
                return f"pauses: step {progress.n_committed + 1} is computed, and committed when the run is resumed"
            case "resume":
                self.state = replace(self.state, paused=False)
                return f"continues with step {progress.n_committed + 1}"
            case "checkpoint":
                self._wants_checkpoint = True
                once = ", once the run is resumed" if self.state.paused else ""
                return f"makes a checkpoint of {progress.n_committed + 1} steps{once}"
            case "stop":
                return self.stop(0, STOPPED, progress)
            case "revoke":
                assert peer is not None
                self.state = replace(self.state, revoked=(*self.state.revoked, peer))
                return f"{roster.name(peer)} is revoked, and will not be admitted again"
            case "evict":
                assert peer is not None
                roster.refuse(peer, ev.Ended(3, f"peer {peer}: evicted by an operator"))
                return f"{roster.name(peer)} is evicted; its process ends, and may be started again"
            case "drain":
                assert peer is not None
                return f"{roster.name(peer)} is asked to leave{_last_of_stage(peer, roster)}"
            case _:
                return json.dumps(self._status(roster, progress))

    def stop(self, code: int, by: str, progress: Progress) -> str:
        """End the run with this exit code once the next step has a checkpoint; the answer for people."""
        self._wants_checkpoint = True
        self._stop = code, by
        self.state = replace(self.state, paused=False)
        return f"stops when the checkpoint of {progress.n_committed + 1} steps is complete"

    def ending(self, progress: Progress) -> tuple[int, str] | None:
        """Exit code and reason of a run that is stopped, once its last checkpoint is complete."""
        if self._stop is None or self.stops_at is None or progress.checkpoint < self.stops_at:
            return None
        code, by = self._stop
        return code, f"{by} after {progress.checkpoint} steps, of which there is a checkpoint"

    def on_promised(self, version: int) -> None:
        """There will be a checkpoint of this version without any record."""
        self._wants_checkpoint = False
        code, by = self._stop or (None, "")
        if self._stop:
            self.stops_at = version
        self.state = replace(self.state, wanted=WantedCheckpoint(version, code, by))

    def restore(self, checkpoint: int) -> int:
        """An earlier coordinator has had this state, and the last complete checkpoint is of this version. The version
        of one that it has promised and not made, 0 if there is none."""
        wanted = self.state.wanted
        if wanted is None:
            return 0
        if wanted.stop_code is not None:
            self._stop = wanted.stop_code, wanted.stopped_by
            self.stops_at = wanted.version
        return wanted.version if checkpoint < wanted.version else 0

    def record(self, record: ev.Record) -> ev.Record:
        """A record that is about to be made durable, with the checkpoint that an operator wants after it."""
        return replace(record, checkpoint=True) if self._wants_checkpoint else record

    def on_committed(self, record: ev.Record) -> None:
        if record.checkpoint and self._wants_checkpoint:
            self._wants_checkpoint = False
            if self._stop:
                self.stops_at = record.step + 1

    def on_rolled_back(self) -> None:
        """The run goes back: a stop waits for the next step again."""
        if self.stops_at is not None:
            self.stops_at = None
            self._wants_checkpoint = True

    def _status(self, roster: Roster, progress: Progress) -> Mapping[str, Any]:
        view = roster.view
        members = [
            {
                "peer": member.peer,
                "stage": member.stage,
                "address": member.address,
                "state": roster.state_in_words(member.peer),
                "silent_s": self.silences.get(member.peer),
            }
            for member in (view.members if view else ())
        ]
        return {
            "view": view.number if view else 0,
            "coordinator_term": view.coordinator_term if view else 0,
            "generation": view.generation if view else 0,
            "steps": progress.n_committed,
            "of_steps": progress.n_steps,
            "checkpoint": progress.checkpoint,
            "paused": self.state.paused,
            "stopping": self._stop is not None,
            "members": members,
            "workers": list(self.workers),
            "workers_coming": list(self.workers_coming),
            "candidates": sorted(roster.candidates),
            "coming": sorted(roster.coming),
            "revoked": sorted(self.state.revoked),
        }


def _expected_peer(command: str) -> str:
    return "a peer" if command in FOR_A_PEER else "none"


def _last_of_stage(peer: int, roster: Roster) -> str:
    return "; it is the last of its stage, and stays until another joins" if roster.is_last_of_stage(peer) else ""
