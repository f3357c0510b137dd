"""A step's record from what all members are prepared for, and its metrics."""

import math
from collections.abc import Collection, Iterable, Mapping

from jaxdt.protocol.events import GroupResult, Prepared, Record, Round, Tally
from jaxdt.spec.seq_lengths import SeqLengths


class Disagreement(Exception):
    """One line: who holds another result than the others."""


class Votes:
    """Who has said in the present view that it is prepared for a step, and with which results."""

    def __init__(self):
        self._said: dict[int, dict[int, Prepared]] = {}

    def add(self, src: int, prepared: Prepared, admissions: Mapping[int, int]) -> None:
        """What a member says under its present admission; of another nothing counts."""
        if prepared.admission == admissions.get(src):
            self._said.setdefault(prepared.step, {})[src] = prepared

    def all(self, step: int, admissions: Mapping[int, int]) -> Mapping[int, Prepared] | None:
        """All votes on a step, once every member of the view has given its own."""
        said = self._said.get(step, {})
        return said if len(said) == len(admissions) and set(said) == set(admissions) else None

    def held(self, members: Collection[int]) -> tuple[tuple[Round, tuple[int, ...]], ...]:
        """Rounds of all steps, and the members that hold their whole result."""
        holders: dict[Round, list[int]] = {}
        for said in self._said.values():
            for peer, prepared in sorted(said.items()):
                for result in prepared.results if peer in members else ():
                    holders.setdefault(result.round, []).append(peer)
        return tuple((round, tuple(peers)) for round, peers in sorted(holders.items()))

    def pop(self, step: int) -> list[Prepared]:
        """The votes on a step that is committed."""
        return list(self._said.pop(step).values())

    def clear(self) -> None:
        self._said.clear()


def agreed(step: int, said: Mapping[int, Prepared], generation: int) -> Record:
    """The record of a step that every member is prepared for: the groups' rounds and the squared norm over all of them;
    verdict "skip" if that is not finite. Disagreement if two members of a group hold different results."""
    results: dict[str, GroupResult] = {}
    for peer, one in sorted(said.items()):
        for result in one.results:
            group = result.round.group
            first = results.setdefault(group, result)
            if (first.round, first.digest) != (result.round, result.digest):  # norms may be NaN, unequal to itself
                raise Disagreement(f"peer {peer} holds another result of group {group}")
    counts = {result.n_samples for result in results.values()}
    if len(counts) != 1:
        raise Disagreement(f"the groups counted different numbers of samples {counts}")
    rounds = tuple(result.round for _, result in sorted(results.items()))
    sq_norm = math.fsum(result.sq_norm for result in results.values())
    return Record(step, rounds, sq_norm, counts.pop(), "apply" if math.isfinite(sq_norm) else "skip", generation)


def metrics_of(record: Record, said: Iterable[Prepared], step_s: float, tokens_per_sample: SeqLengths) -> dict:
    """The fields of a committed step's report."""
    results = {result.round.group: result for one in said for result in one.results}
    tally = sum((result.tally for result in results.values()), Tally())
    fields = {
        "step": record.step,
        "loss": tally.loss_sum / tally.n_losses if tally.n_losses else math.nan,
        "step_s": step_s,
        "tokens_per_s": record.n_samples * tokens_per_sample.at(record.step) / step_s if step_s > 0 else math.inf,
        "gradient_norm": math.sqrt(record.sq_norm) / record.n_samples,
        "verdict": record.verdict,
    }
    if tally.n_evals:
        fields["eval_loss"] = tally.eval_sum / tally.n_evals
    return fields
