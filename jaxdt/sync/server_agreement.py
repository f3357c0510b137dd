"""The coordinator's part where servers hold the parameters: rows of the metrics, held-out losses and checkpoints, and
the end of the run.

Workers and servers agree among themselves on what is pushed and pulled (jaxdt.sync.server), and on what a snapshot
holds. The coordinator says when a snapshot is made. For a checkpoint it tells the least worker of each stage to keep
it, and another one when that is lost; the servers hold it until the checkpoint, or a later one, is complete."""

from collections.abc import Collection, Mapping

from jaxdt.membership.coordinator_config import CoordinatorConfig
from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import StateMeanReport
from jaxdt.protocol.round_id import RoundId, RoundKind
from jaxdt.run.config import RunConfig
from jaxdt.run.plan import Plan
from jaxdt.sync.scheduling.book import ReplicaBook
from jaxdt.sync.scheduling.open_groups import OpenGroup
from jaxdt.sync.scheduling.snapshots import Keepers

NO_SERVER = "it is the server that holds its stage's parameters"


class ServerAgreement(ReplicaBook):
    """The agreement of `sync.kind = "server"`."""

    NO_RETURN: str = "sync.kind server: what a virtual worker has pushed is not handed over yet"

    def __init__(self, config: CoordinatorConfig, run: RunConfig, plan: Plan):
        super().__init__(config, run, plan, Keepers(lambda stage: (self._servers[stage],), RoundKind.CHECKPOINT))
        self._servers = [server for (server,) in plan.roles.servers]
        self._checkpoint_rounds: dict[
            int, dict[int, RoundId]
        ] = {}  # version -> stage -> what its server holds for a checkpoint
        self._keepers: dict[RoundId, int] = {}  # of these: the worker that keeps it, and was told so
        self._n_complete = 0  # version of the last checkpoint that is complete

    def _hears(self, src: int) -> bool:
        return super()._hears(src) or src in self._servers

    def _end_run(self) -> list[ev.Action]:
        """The servers' parameters are the result."""
        for stage, row in enumerate(self._plan.placement):
            contributions = [(worker, self._finished[worker]) for worker in row if worker in self._finished]
            self._snapshots.holds(self._config.n_steps, stage, tuple(contributions))
        return self._snapshots.end(has_result=True)

    @property
    def _admissions(self) -> Mapping[int, int]:
        return {}  # a server is admitted once

    # ------------------------------------------------------------------------------------------------------- snapshots

    def _whole(self, group: OpenGroup) -> list[ev.Action]:
        """A stage's server has a whole snapshot, with so many pushes of each worker."""
        round = group.round
        stage, _ = self._plan.seat(group.members[0])
        contributions = tuple(zip(self._plan.placement[stage], group.member_steps, strict=True))
        if round.kind == RoundKind.HELD_OUT:
            return self._snapshots.on_mean(stage, round, group.members, contributions)
        if round.number <= self._n_complete:
            return group.closed_messages()
        self._snapshots.holds(round.number, stage, contributions)
        workers, steps = zip(*contributions, strict=True)
        report = StateMeanReport(stage, round.number, list(workers), list(steps))
        self._checkpoint_rounds.setdefault(round.number, {})[stage] = round
        return [report, *self._tell_workers()]

    def _tell_workers(self) -> list[ev.Action]:
        """The least worker of a stage writes its part of a checkpoint, so it has to keep what that holds."""
        actions: list[ev.Action] = []
        for of_stages in self._checkpoint_rounds.values():
            for stage, round in of_stages.items():
                worker = min(self._pipelines.replicas(stage), default=None)
                if worker is not None and self._keepers.get(round) != worker:
                    self._keepers[round] = worker
                    actions.append(ev.Send(worker, ev.GroupFormed(round, (worker,), (self._servers[stage],))))
        return actions

    def _on_gone(self, now_s: float, replicas: Collection[int]) -> list[ev.Action]:
        return self._tell_workers()

    def cannot_lose(self, peer: int, present: Collection[int]) -> str:
        is_server = any(peer in row for row in self._plan.roles.servers)
        return NO_SERVER if is_server else self._pipelines.cannot_lose(peer, present)

    def on_checkpoint(self, version: int) -> list[ev.Action]:
        """What is kept for this one and older ones can go."""
        self._n_complete = max(version, self._n_complete)
        over = [self._checkpoint_rounds.pop(other) for other in sorted(self._checkpoint_rounds) if other <= version]
        rounds = [(stage, round) for of_stages in over for stage, round in of_stages.items()]
        for _, round in rounds:
            self._keepers.pop(round, None)
        return [ev.Send(self._servers[stage], ev.GroupClosed(round)) for stage, round in rounds]
