"""The rule by which peers agree that a step is done: the interface of the part that the coordinator asks about it.

The coordinator owns the view, the checkpoints and what is made durable. An agreement owns the steps: it hears what
members say of them, and decides when one is committed. It is given to the coordinator by jaxdt.build.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import Report, StepReport
from jaxdt.protocol.round_id import RoundId

TIMER = "agreement "  # the tags of its timers begin with it
Results = tuple[tuple[RoundId, tuple[int, ...]], ...]  # rounds of steps under way, and who holds their whole result


@dataclass(frozen=True)
class CommittedStep:
    """A committed step, and what its members have measured in it."""

    record: ev.Record
    tally: ev.Tally


@dataclass(frozen=True)
class CountedRows:
    """Rows of the metrics, where replicas may differ: `n_rows` in all, and those that are new. `n_steps`: the local
    steps of each pipeline in all of them; `n_groups`: of each stage and fragment, groups that have formed."""

    n_rows: int
    new: tuple[StepReport, ...]
    n_steps: tuple[int, ...]
    n_groups: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class ReturningMembers:
    """Where replicas may differ: the members of returning pipelines that the next view admits.

    - `joining`: candidates without a state. They become members, and save no checkpoint before row `first_step`.
    - `joined`: members that have got a state.
    - `joins`: View.joins, if that changes."""

    joining: frozenset[int] = frozenset()
    joined: frozenset[int] = frozenset()
    joins: tuple[ev.PipelineJoin, ...] | None = None
    first_step: int = 0


NO_RETURNING_MEMBERS = ReturningMembers()


@dataclass(frozen=True)
class EndRun:
    """The run cannot continue; it ends with this exit code."""

    code: int
    reason: str


@dataclass(frozen=True)
class RollBack:
    """The run has to go back to the last complete checkpoint."""


@dataclass(frozen=True)
class RepairReplicas:
    """The states of these members are not those of their replicas: they are told to take those over, by peer."""

    repairs: Mapping[int, ev.Repair]
    reports: Sequence[Report]


Decision = ev.Record | CountedRows | EndRun | RollBack | RepairReplicas


class Agreement(ABC):
    """A pure state machine. `n_committed`: steps of the run that are committed. The defaults are those of replicas that
    stay equal, and of a policy that does without the part in question.

    READS                what members say that is for the agreement
    REPLICAS_MAY_DIFFER  then it decides on rows, and reports them also while no further step may be committed; what a
                         member said in an earlier view counts (else it says that again in the next one); members are
                         peers of the plan, and a newcomer gets the id and the place of one that was lost
    NO_RETURN            why no such peer comes back once it was evicted, in one line; '' where it may

    Where a method returns actions, these are reports, WakeAt with a tag that begins with TIMER, and Send, whose headers
    the coordinator fills in."""

    READS: frozenset[type]
    REPLICAS_MAY_DIFFER: bool = False
    NO_RETURN: str = ""
    n_committed: int

    # -------------------------------------------------------------------------------------------- what members agree on

    @abstractmethod
    def hear(self, now_s: float, src: int, message: ev.Message, admissions: Mapping[int, int]) -> list[ev.Action]:
        """A member has said something. `admissions`: member -> its present admission."""

    def on_woke(self, now_s: float, tag: str) -> list[ev.Action]:
        """The time of an earlier WakeAt has come."""
        raise AssertionError("it sets no timer")

    def on_pause(self, until_s: float) -> None:
        """The coordinator did not run; until then it hears of what its members did meanwhile."""
        return

    @abstractmethod
    def decide(self, admissions: Mapping[int, int], generation: int) -> Decision | None:
        """The decision of the members, or None while they have none. The coordinator makes a Record or CountedRows
        durable, and then calls `on_durable`."""

    def durable_form(self, record: ev.Record) -> Any:
        """What is made durable for `record`: plain data and frozen dataclasses."""
        return record

    @abstractmethod
    def on_durable(self, now_s: float, value: Any) -> tuple[ev.Message, list[ev.Action]]:
        """A record or rows that it has decided on are durable. Returns the message to all members, and reports."""

    @abstractmethod
    def has_unreported_rows(self, n_rows: int) -> bool:
        """Whether one of the first `n_rows` rows is done and not durable and reported yet. A run that ends after so
        many does not end before that, and their checkpoint is not complete: a run that continues from it has all
        rows."""

    # -------------------------------------------------------------------------------------------------- who takes part

    def cannot_lose(self, peer: int, present: Collection[int]) -> str:
        """'' if the run continues without this peer, else why it does not. `present`: the members that are there."""
        return ""

    def leave_with(self, peer: int) -> Collection[int]:
        """Members that have to leave the view together with this one, itself among them. () where the others of a stage
        do the work of one that is gone; then it leaves between two steps, if it can choose."""
        return ()

    def returning_members(self, candidates: Collection[int], states: Mapping[int, ev.StateName]) -> ReturningMembers:
        """The members that a view made now admits beside those of the roster. `candidates`: peers that may become
        members; `states`: what joining members hold."""
        return NO_RETURNING_MEMBERS

    @property
    def records(self) -> tuple[ev.Record, ...]:
        """The last records, which a new view carries."""
        return ()

    def results_held(self, members: Collection[int]) -> Results:
        """A new view of these members is about to be made durable. Returns the results of steps under way that the view
        carries over."""
        return ()

    def on_view(self, now_s: float, view: ev.View) -> list[ev.Action]:
        """A view is durable. The actions go to members after the view."""
        return []

    def roll_back(self) -> None:
        """Messages and commits since the last complete checkpoint do not count any more."""
        raise AssertionError("a run that would have to go back ends (`cannot_lose`)")

    # ------------------------------------------------------------------------------------- checkpoints and operators

    def refusal(self, command: str) -> str:
        """'' if an operator may ask for this, else why not."""
        return ""

    def promise_checkpoint(self, promised: int = 0) -> int | None:
        """An operator wants a checkpoint. Returns the version that it will have, or None if that is the version of the
        next record. `promised`: the version that an earlier coordinator promised and may not have made; 0 for a new
        request."""
        return None

    def mean_of(self, version: int) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Checkpoint.mean_of, () where replicas are equal."""
        return ()

    def on_checkpoint(self, version: int) -> list[ev.Action]:
        """The checkpoint of this version is complete, also when a coordinator continues after another."""
        return []

    # ------------------------------------------------------------------------------------------ a coordinator's restart

    @abstractmethod
    def restore(self, view: ev.View, steps: Sequence[CommittedStep], rows: CountedRows | None) -> None:
        """Take over what an earlier coordinator made durable: its last view, its last steps, and the last rows."""

    @abstractmethod
    def start(self, now_s: float) -> list[ev.Action]:
        """A coordinator continues where an earlier one has died: reports of what that one may not have reported."""

    @property
    def is_asking(self) -> bool:
        """Whether a coordinator that was started again waits for members to say what they know. Until then no
        checkpoint becomes complete, and the run does not end."""
        return False

    @abstractmethod
    def missed_messages(self) -> list[ev.Message]:
        """The messages to a member that was out of reach: those that it may have missed, and questions."""
