"""Step times as they are predicted before a run, and as they are measured, over emulated networks.

Real runs of the workload configs/small.py: 6 networks x schedules gpipe and 1f1b x cuts into 2 stages, 4 stages and 2
stages with 2 pipelines x codecs none and int8. The prediction is the one that a run prints before its first step. The
error of a run is predicted / measured - 1. Even an idle virtual machine may change its speed between the timing of the
stages and the steps, so the error of a case is the median over its runs, and all cases are run once before any is run
again. The 72 cases of five runs take nearly two hours on two cores.
"""

import itertools
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from comparison import Comparison, Given, Line, launched
from page import ROOT
from prediction_error import page
from prediction_error.page import EMULATED

from jaxdt.cli import environment
from jaxdt.model.data import write_tokens
from jaxdt.run import network as networks

N_PEERS_MAX = 4
LINKS = {  # name: milliseconds one way, Gb/s
    "1000mbps_1ms": (1.0, 1.0),
    "300mbps_5ms": (5.0, 0.3),
    "300mbps_50ms": (50.0, 0.3),
    "100mbps_20ms": (20.0, 0.1),
    "50mbps_5ms": (5.0, 0.05),
}
FOUR_CITIES = "four_cities"
CUTS = {"2x1": (2, 1), "4x1": (4, 1), "2x2": (2, 2)}
CASES = {
    f"{network} {cut} {schedule} {codec}": (network, cut, schedule, codec)
    for cut, schedule, codec, network in itertools.product(
        CUTS, ("1f1b", "gpipe"), ("none", "int8"), [*LINKS, FOUR_CITIES]
    )
}


def cases(given: Given, names: Iterable[str] = CASES) -> list[Line]:
    return [dict(case=case, seed=seed) for seed in given.seeds for case in names]


def made(left: Sequence[Line], given: Given, folder: Path) -> Iterator[Line]:
    environment.compute_on_cpu()
    with tempfile.TemporaryDirectory() as name:
        tokens = prepare(Path(name))
        for line in left:
            network, cut, schedule, codec = CASES[line["case"]]
            stages, pipelines = CUTS[cut]
            settings = {"plan.stages": stages, "plan.pipelines": pipelines, "plan.schedule": schedule, "codec": codec}
            settings |= {"train.steps": given.steps, "data.path": tokens}
            words = [f"--config={ROOT / 'configs/small.py'}", f"--emulate={name}/{network}.json"]
            words += [f"--config.{field}={value}" for field, value in settings.items()]
            found = launched(folder / line["case"].replace(" ", "_"), words)
            seconds = dict(predicted_s=found["step_s_predicted"], measured_s=found["step_s_measured"])
            yield dict(case=line["case"], **seconds, seed=line["seed"])


def prepare(folder: Path) -> Path:
    """Write the networks of the cases and a random token file into `folder`; returns the token file."""
    tokens = folder / "tokens.tok"
    ids = np.random.default_rng(0).integers(0, 1024, 200_000).astype(np.uint16)
    write_tokens(tokens, "random", 1024, ids, ids[:20_000])
    for link, (latency_ms, gbps) in LINKS.items():
        network = networks.uniform(N_PEERS_MAX, latency_ms / 1e3, gbps)
        (folder / f"{link}.json").write_text(json.dumps(networks.to_json(network)))
    cities = (ROOT / f"configs/networks/{FOUR_CITIES}.json").read_text()
    (folder / f"{FOUR_CITIES}.json").write_text(cities)
    return tokens


COMPARISON = Comparison(
    page=ROOT / "configs/prediction",
    cases=cases,
    made=made,
    values=page.values,
    result=page.result,
    n_seeds=5,
    steps=4,
    steps_min=3,
    file=EMULATED,
    fields=page.FIELDS,
)
