"""For which server each of a pool's workers computes."""

from jaxdt.build import RunStart, build_coordinator
from jaxdt.membership.worker_places import WorkerPlaces
from jaxdt.protocol.events import TEMPORARY_IDS, Ended, Header, Hello, Join, Persisted, Received, Send, Started, Welcome
from jaxdt.spec.config import PlanConfig, RunConfig, WiringConfig, default_plan
from jaxdt.spec.model import GPTConfig

PLANNED = {4: (0, 0), 5: (1, 1)}


def test_a_worker_of_the_plan_gets_its_server_and_without_that_another_of_its_stage():
    places = WorkerPlaces(PLANNED)
    assert places.place(5, ({0, 2}, {1, 3})) == (1, 1)
    assert places.place(5, ({0, 2}, {3})) == (1, 3)
    assert places.place(5, ({0, 2}, set())) == (1, None)
    assert places.place(5, ({0, 2}, {1, 3})) == (1, 1)


def test_any_other_worker_gets_the_server_with_the_fewest_and_keeps_its_stage():
    places = WorkerPlaces(PLANNED)
    assert places.place(7, (set(), set())) == (0, None)
    for server, n_workers in ((0, 2), (2, 3), (1, 1), (3, 1)):
        places.counted(server, n_workers)
    assert places.place(7, ({0, 2}, {1, 3})) == (1, 1)
    assert places.place(8, ({0, 2}, {1, 3})) == (1, 3)  # the one before is on its way to server 1
    assert places.place(7, ({0, 2}, {3})) == (1, 3)
    assert places.place(7, ({0, 2}, set())) == (1, None)


def answer_of(kind: str, *, peer: int | None, hello: bool = True):
    """What a coordinator of a run with 2 servers and 2 workers says to a worker."""
    model = GPTConfig(vocab_size=16, n_layers=2, d_model=8, n_heads=2, d_ff=16, seq_len=8)
    plan_config = PlanConfig(stages=2, pipelines=1, microbatches=2, workers=1 if kind == "pool" else 0)
    config = RunConfig(model=model, plan=plan_config, wiring=WiringConfig(kind))
    plan = default_plan(config)
    coordinator = build_coordinator(config, plan, RunStart("r"))
    coordinator.handle(0.0, Started())
    coordinator.handle(0.0, Persisted("coordinator_term"))
    if hello:
        fingerprint = coordinator.config.fingerprint
        for server in plan.peers:
            said = Hello(server, server, fingerprint, address=f"h{server}:1")
            coordinator.handle(0.0, Received(Header("r", 0, 0, server), said))
    asks = Received(Header("", 0, 0, TEMPORARY_IDS), Join(peer, is_new=True, is_worker=True))
    (sent,) = [action for action in coordinator.handle(0.0, asks) if isinstance(action, Send)]
    assert sent.dst == TEMPORARY_IDS
    return sent.body


def test_the_coordinator_says_where_the_server_is_once_that_is_here():
    said = answer_of("pool", peer=3)
    assert isinstance(said, Welcome) and (said.peer, said.stage, said.server, said.server_address) == (3, 1, 1, "h1:1")
    assert set(said.job) == {"config", "plan"}
    waits = answer_of("pool", peer=3, hello=False)
    assert isinstance(waits, Welcome) and waits.server is None
    newcomer = answer_of("pool", peer=None)
    assert isinstance(newcomer, Welcome) and newcomer.peer > 3 and newcomer.server == 0


def test_the_coordinator_refuses_a_worker_where_there_are_none_and_one_with_a_members_id():
    assert answer_of("swarm", peer=9) == Ended(2, "asks to be a worker, and the wiring of this run has none")
    said = answer_of("pool", peer=1)
    assert isinstance(said, Ended) and said.code == 2 and "peer 1 (stage 1): is a member of the run" in said.reason
