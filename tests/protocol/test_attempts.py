"""The step that a picture of the pipeline shows, for a run that went back and computed some steps again."""

from jaxdt.protocol import events as ev
from jaxdt.protocol.attempts import attempts, typical_attempt


def run(peer, step, at_s, seconds, kind="B"):
    return {"what": "run", "peer": peer, "t": at_s, "s": seconds, "work": f"{step}:{peer}{kind}0"}


def step_of(step, begin_s, seconds=0.2):
    """A step of two peers."""
    return [run(0, step, begin_s, 0.1), run(1, step, begin_s + 0.05, seconds - 0.05)]


def test_the_first_attempt_and_the_second_are_not_one():
    back = {"what": "report", "peer": ev.COORDINATOR, "t": 14.0, "kind": "rollback", "fields": {"to": 1}}
    records = [record for step in range(4) for record in step_of(step, 0.3 * step)]
    records += [back, *(record for step in range(1, 7) for record in step_of(step, 14.0 + 0.3 * step))]
    assert [attempt.step for attempt in attempts(records)] == [0, 1, 2, 3, 1, 2, 3, 4, 5, 6]
    found = typical_attempt(attempts(records))
    assert abs(found.seconds - 0.2) < 1e-6 and found.n_peers == 2


def test_it_is_of_typical_duration_with_all_peers_and_without_an_evaluation():
    records = [*step_of(0, 0.0, 3.0), *step_of(1, 4.0, 0.2), *step_of(2, 5.0, 46.0), *step_of(3, 60.0, 0.3)]
    records += [run(0, step, 70.0 + step, 0.1) for step in range(4, 9)]
    for step in (9, 10, 11):
        records += [*step_of(step, 80.0 + step, 0.4), run(1, step, 80.5 + step, 0.4, "E")]
    assert typical_attempt(attempts(step_of(4, 1.0))).step == 4
    assert typical_attempt(attempts([*records, *step_of(20, 99.0, 0.31)])).seconds < 0.5
    assert typical_attempt(attempts([*records, *step_of(20, 99.0, 0.31)])).step in (3, 20)
    assert typical_attempt([]) is None


def test_it_is_none_of_a_few_steps_before_a_peer_left():
    records = [record for step in range(2) for record in [*step_of(step, step, 0.2), run(2, step, step, 0.1)]]
    records += [record for step in range(2, 10) for record in step_of(step, step, 0.4)]
    found = typical_attempt(attempts(records))
    assert found.n_peers == 2 and abs(found.seconds - 0.4) < 1e-6
