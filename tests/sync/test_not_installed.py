"""A state that could not be installed, since it was not what was sent any more, is fetched again; and an answer to the
Install of a download that was given up is not taken for that of the next one."""

from dataclasses import replace

import pytest

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import RefusedReport
from jaxdt.run import config as configs
from jaxdt.sync.donor_transfer import DonorTransfer
from jaxdt.sync.state_transfer import StateTransfer
from jaxdt.sync.worker_parameters import ParameterDownload

N_WORDS, SLICE_WORDS, VERSION = 10, 4, 3
MEMBERS = tuple(ev.Member(peer, 0, 1) for peer in range(3))
CONFIG = configs.parse(
    dict(
        model=dict(preset="debug", n_layers=2, d_model=8, n_heads=2, d_ff=8, max_len=4, vocab_size=16),
        plan=dict(stages=1, pipelines=3, microbatches=3),
        wiring=dict(on_stage_lost="stop"),
        sync=dict(kind="groups"),
    )
)


def worker():
    machine = ParameterDownload(0, 1, N_WORDS, 4 * SLICE_WORDS)
    return machine, machine.handle(0.0, ev.Admitted(5, 0, VERSION, 0)), ev.Updated(0, VERSION)


def newcomer():
    machine = StateTransfer(2, 0, 4 * SLICE_WORDS)
    machine.handle(0.0, ev.Ready({}, N_WORDS))
    view = ev.View(2, 1, 0, MEMBERS, (1,), VERSION, joining=(2,))
    return machine, machine.handle(0.0, ev.ViewChanged(view)), ev.Joined(VERSION)


def repaired():
    machine = StateTransfer(2, 0, 4 * SLICE_WORDS)
    machine.handle(0.0, ev.Ready({}, N_WORDS))
    machine.handle(0.0, ev.ViewChanged(ev.View(2, 1, 0, MEMBERS, (1,), VERSION)))
    return machine, machine.handle(0.0, ev.Repairing(VERSION, 1)), ev.Joined(VERSION)


def returning():
    machine = DonorTransfer(configs.default_plan(CONFIG), 2, 4 * SLICE_WORDS)
    machine.handle(0.0, ev.Ready({}, N_WORDS))
    machine.handle(0.0, ev.ViewChanged(ev.View(2, 1, 0, MEMBERS, (1,), VERSION, joining=(2,))))
    donor = machine._donor
    waits = ev.Received(ev.Header("r", 0, 2, donor), ev.DonorWaits(VERSION))
    return machine, machine.handle(0.0, waits), ev.Holds


def fetched(machine, actions):
    """All that the machine asks for arrives. Returns what it wants then."""
    asked = [action for action in actions if isinstance(action, ev.Send) and isinstance(action.body, ev.Fetch)]
    assert asked and ev.Discard(ev.StateKey(VERSION, 0, N_WORDS)) in actions
    while asked:
        send = asked.pop(0)
        arrived = ev.Received(ev.Header("r", 0, 2, send.dst), ev.State(send.body.key), "words")
        actions = machine.handle(2.0, arrived)
        assert ev.StoreTensor(send.dst, arrived.body) in actions and machine.handle(2.0, arrived) == []
        asked += [action for action in actions if isinstance(action, ev.Send) and isinstance(action.body, ev.Fetch)]
    return actions


def installs(actions):
    return [action for action in actions if isinstance(action, ev.Install)]


@pytest.mark.parametrize("begin", [worker, newcomer, repaired, returning])
def test_what_was_not_installed_is_fetched_again(begin):
    machine, actions, says = begin()
    assert len(installs(fetched(machine, actions))) == 1
    refused, *actions = machine.handle(2.0, ev.NotInstalled(VERSION, "words 4..8: wrong"))
    assert refused == RefusedReport("words 4..8: wrong; it is fetched again")
    assert len(installs(fetched(machine, actions))) == 1
    done = machine.handle(3.0, ev.Installed(VERSION))
    assert says in done or says in map(type, done)


@pytest.mark.parametrize("answer", [ev.Installed(VERSION), ev.NotInstalled(VERSION, "wrong")])
def test_an_answer_to_a_repair_that_was_given_up_is_not_that_of_the_next_one(answer):
    machine, actions, _ = repaired()
    fetched(machine, actions)  # its Install waits behind a long Work
    without = ev.View(3, 1, 0, MEMBERS[::2], (1,), VERSION)
    assert machine.handle(2.0, ev.ViewChanged(without)) == [ev.Joined(VERSION)]
    machine.handle(2.0, ev.ViewChanged(replace(without, number=4, members=MEMBERS)))
    actions = machine.handle(2.0, ev.Repairing(VERSION, 0))
    assert not {ev.Joined, ev.Install, ev.Send} & set(map(type, machine.handle(2.0, answer)))
    assert len(installs(fetched(machine, actions))) == 1
    assert ev.Joined(VERSION) in machine.handle(3.0, ev.Installed(VERSION))


def test_a_view_during_the_installation_asks_for_no_second_one():
    """Its state is the first one's: nothing would be there for the second."""
    machine, actions, joined = newcomer()
    assert len(installs(fetched(machine, actions))) == 1
    without = ev.View(3, 1, 0, MEMBERS[1:], (1,), VERSION, joining=(2,))
    assert machine.handle(2.0, ev.ViewChanged(without)) == []
    assert joined in machine.handle(3.0, ev.Installed(VERSION))
