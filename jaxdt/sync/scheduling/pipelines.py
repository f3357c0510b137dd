"""The coordinator's account of the pipelines of a run that are whole, where replicas may differ.

A pipeline that loses a peer cannot do a step any more, so it leaves the run at all stages. Its other peers leave the
view with the lost one, and are candidates from then on. The run continues with the pipelines that are whole, and ends
with the last of them. Once all peers of a pipeline are candidates it joins: they are members that get states, and when
they have them it is whole. One pipeline joins at a time.
"""

from bisect import insort
from collections.abc import Collection, Iterable, Sequence

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import PipelineEndReport
from jaxdt.run.plan import Plan
from jaxdt.sync.donor_transfer import joining_pipeline

LAST = "its pipeline was the last one that was whole"


class Pipelines:
    """The pipelines of a plan. `whole`: pipelines that have all their peers, with states, in order; `joining`: the
    pipeline that comes back."""

    def __init__(self, plan: Plan):
        self.whole: list[int] = list(range(plan.n_pipelines))
        self.joining: int | None = None
        self._joins: dict[int, ev.PipelineJoin] = {}  # the last return of each
        self._plan = plan
        self._pipeline_of = {peer: pipeline for row in plan.placement for pipeline, peer in enumerate(row)}
        self._n_steps = [0] * plan.n_pipelines  # the most local steps that a replica of it is known to have done

    def replicas(self, stage: int) -> tuple[int, ...]:
        """The peers of a stage in whole pipelines, in the order of `whole`."""
        return tuple(self._plan.placement[stage][pipeline] for pipeline in self.whole)

    def peers(self, pipeline: int) -> tuple[int, ...]:
        """The peers of one pipeline, in the order of stages."""
        return tuple(row[pipeline] for row in self._plan.placement)

    def has(self, peer: int) -> bool:
        return self._pipeline_of.get(peer) in self.whole

    def has_lost(self, peer: int) -> bool:
        return peer in self._pipeline_of and not self.has(peer)

    def beside(self, peer: int) -> tuple[int, ...]:
        """The peers of a pipeline that is whole or joins, if this peer is in one."""
        pipeline = self._pipeline_of.get(peer)
        if pipeline is None or pipeline not in (*self.whole, self.joining):
            return ()
        return self.peers(pipeline)

    def returning(self, candidates: Collection[int]) -> int | None:
        """The least pipeline that is lost and whose peers are all candidates."""
        lost = [pipeline for pipeline in range(self._plan.n_pipelines) if pipeline not in self.whole]
        return next((pipeline for pipeline in lost if set(candidates).issuperset(self.peers(pipeline))), None)

    def on_joined(self, join: ev.PipelineJoin) -> None:
        insort(self.whole, join.pipeline)
        self._n_steps[join.pipeline] = join.step
        self._joins[join.pipeline] = join

    def was_whole(self, pipeline: int, n_rows: int) -> bool:
        """Whether a whole pipeline has not come back since so many rows were done."""
        return pipeline not in self._joins or self._joins[pipeline].n_rows < n_rows

    def cannot_lose(self, peer: int, present: Collection[int]) -> str:
        """'' if another pipeline is whole when this peer goes and the `present` members are there, else the reason."""
        others = [pipeline for pipeline in self.whole if peer not in self.peers(pipeline)]
        is_there = any(set(present).issuperset(self.peers(pipeline)) for pipeline in others)
        return "" if is_there or not self.has(peer) else LAST

    def did(self, peers: Iterable[int], steps: Sequence[int]) -> list[PipelineEndReport]:
        """These replicas have done so many local steps. Late news of a lost pipeline is reported, since in a replay the
        pipeline does these steps too."""
        reports: list[PipelineEndReport] = []
        for peer, n_steps in zip(peers, steps, strict=True):
            pipeline = self._pipeline_of[peer]
            if n_steps > self._n_steps[pipeline]:
                self._n_steps[pipeline] = n_steps
                reports += [] if pipeline in self.whole else [PipelineEndReport(pipeline, n_steps)]
        return reports

    def keep(self, members: Collection[int]) -> list[int]:
        """A view of these members begins; the pipelines that are not whole in it."""
        broken = [pipeline for pipeline in self.whole if not set(members).issuperset(self.peers(pipeline))]
        self.whole = [pipeline for pipeline in self.whole if pipeline not in broken]
        return broken

    def restore(self, view: ev.View, n_steps: Sequence[int]) -> list[int]:
        """The pipelines as an earlier coordinator has left them, each with so many local steps that are known; those
        that are not whole in the last view."""
        self._n_steps = list(n_steps)
        self._joins = {join.pipeline: join for join in view.joins}
        self.joining = joining_pipeline(self._plan, view)
        return self.keep(view.by_peer.keys() - set(view.joining))

    def ends_of_broken(self) -> list[PipelineEndReport]:
        """The reports that an earlier coordinator may not have made, each with at most as many steps."""
        return self.ends(pipeline for pipeline in range(self._plan.n_pipelines) if pipeline not in self.whole)

    def ends(self, pipelines: Iterable[int]) -> list[PipelineEndReport]:
        """The reports that pipelines have been lost."""
        return [PipelineEndReport(pipeline, self._n_steps[pipeline]) for pipeline in pipelines]
