"""The docstring of a Peer shows one step, as its machines pass events on, and the picture of the docs shows it too: it
is the step of a simulation."""

import inspect
import re
from pathlib import Path

from jaxdt.build import RunStart, build_coordinator, build_peers
from jaxdt.membership import peer as peer_module
from jaxdt.membership.peer import Peer
from jaxdt.protocol import events as ev
from jaxdt.run import config as run_config
from jaxdt.run.network import Link
from jaxdt.sim.cluster import Simulation
from jaxdt.sim.sim_peer import Environment, SimPeer
from jaxdt.sim.tensors import NoTensors
from jaxdt.sync.allreduce import AllReduce
from jaxdt.wiring.fixed import FixedWiring

PICTURE = Path(__file__).parents[2] / "docs" / "picture.svg"
PEER, STEP = 1, 1  # a replica of the middle stage
MACHINES = {FixedWiring: "wiring", AllReduce: "sync"}
ANSWERS = (ev.Run, ev.Sum, ev.Send, ev.Post, ev.InternalEvent)


def described(thing):
    """An event or an action in two words at most."""
    name = type(thing).__name__
    match thing:
        case ev.Ran(work) | ev.Run(work):
            return f"{name} {work.kind.name}"
        case ev.Received(_, body) | ev.Send(_, body):
            return f"{name} {type(body).__name__}"
        case ev.Post(((_, body, _), *_)):
            return f"{name} {type(body).__name__}"
    return name


def test_docstring_and_picture_show_a_step(monkeypatch):
    passed, rows = [], []

    def recording(kind, label):
        handle = kind.handle

        def handle_and_record(self, now_s, event):
            answers = handle(self, now_s, event)
            if self._peer == PEER and not isinstance(event, ev.ViewChanged):
                passed.append((event, label, answers))
            return answers

        monkeypatch.setattr(kind, "handle", handle_and_record)

    for kind, label in MACHINES.items():
        recording(kind, label)
    peer_module._readers.cache_clear()
    config = run_config.parse(
        dict(
            model=dict(preset="debug", n_layers=3),
            plan=dict(stages=3, pipelines=2, microbatches=2),
            train=dict(steps=3, microbatch_size=1),
            sync=dict(slice_bytes=1 << 30),
        )
    )
    plan = run_config.default_plan(config)
    seconds = dict.fromkeys("FBEGU", 1.0)
    peers = {
        peer: SimPeer(machine, NoTensors(1), f"h{peer}", seconds)
        for peer, machine in build_peers(config, plan, RunStart("r")).items()
    }
    environment = Environment(lambda src, dst: Link(0.1, 1e-4), cores={f"h{peer}": 1 for peer in peers})
    Simulation(build_coordinator(config, plan, RunStart("r")), peers, environment).run(until_s=1e4)
    peer_module._readers.cache_clear()
    begins = [i for i, (event, label, _) in enumerate(passed) if event == ev.Updated(1, STEP) and label == "sync"]
    ends = [i for i, (event, label, _) in enumerate(passed) if event == ev.Updated(1, STEP + 1) and label == "sync"]
    for event, label, answers in passed[begins[0] + 1 : ends[0] + 1]:
        told = [described(answer) for answer in answers if isinstance(answer, ANSWERS)]
        row = (described(event), label, ", ".join(told))
        if (told or isinstance(event, ev.InternalEvent)) and row not in rows:
            rows.append(row)
    shown = [line.strip() for line in inspect.getdoc(Peer).splitlines() if line.startswith("    ")]
    assert shown == [" -> ".join(filter(None, row)) for row in rows]
    drawn = re.findall(r'<g class="row">(.*?)</g>', PICTURE.read_text())
    assert [" -> ".join(re.findall(r">([^<]+)</text>", row)) for row in drawn] == shown
