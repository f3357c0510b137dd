"""Step times as predicted and as measured, over real TCP between hosts, with a router between them; needs root.

4 networks, whose delay, rate, loss and jitter the router makes, x 3 systems; otherwise as `emulated`. Each peer is in a
network namespace of its own (prediction_error/network_hosts.py). Without root the command says so in one line and ends
with code 0. The simulator gets a network as measure.py has measured it over the same hosts, as a user would do. It does
not get the settings of the router. The 12 cases of three runs take a quarter of an hour.
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from comparison import Given, Line
from page import ROOT
from prediction_error import page
from prediction_error.network_hosts import NETWORKS, NetworkHosts, missing

from comparisons import emulated
from comparisons.emulated import prepare
from jaxdt.cli import environment, local_run
from jaxdt.run import network as networks
from jaxdt.run.cpus import allowed_cpus
from jaxdt.run.errors import BadInput
from jaxdt.run.run_folder import EMITTED_RUN_DIR

N_HOSTS = 4
PORT = 7700
MACHINE = "here"
TRANSFER_S = 0.5  # of measuring a link
RUN_S = 240.0  # a run that takes longer is given up
SYSTEMS = {  # of each network; the last two have four microbatches in flight each
    "4x1 1f1b": {"plan.stages": 4, "plan.pipelines": 1},
    "2x2 1f1b": {"plan.stages": 2, "plan.pipelines": 2, "plan.in_flight": "2,1"},
    "2x2 swarm": {"plan.stages": 2, "plan.pipelines": 2, "wiring.kind": "swarm", "wiring.window": 4},
}


CASES = {f"{network} {system}": (network, system) for network in NETWORKS for system in SYSTEMS}


def made(left: Sequence[Line], given: Given, folder: Path) -> Iterator[Line]:
    """The systems of one network and seed run on the same new hosts, after their links were measured. `router` in each
    line: what the router has counted in all of these runs, and the processor seconds that it took."""
    environment.compute_on_cpu()
    if lacks := missing():
        print(f"skipped: hosts on this machine need {lacks}")
        return
    with tempfile.TemporaryDirectory() as tokens:
        data = prepare(Path(tokens))
        for (seed, network), group in itertools.groupby(left, lambda line: (line["seed"], CASES[line["case"]][0])):
            with tempfile.TemporaryDirectory() as name, NetworkHosts(N_HOSTS, NETWORKS[network], seed) as hosts:
                measured = measure(hosts, Path(name))
                lines = [run(line["case"], given.steps, hosts, measured, data) for line in group]
            yield from (line | {"seed": seed, "router": hosts.counted} for line in lines)


def measure(hosts: NetworkHosts, folder: Path) -> Path:
    """The file of the links between the hosts as measure.py finds them. All devices share this machine's cores."""
    measured, credentials = folder / "measured.json", folder / "credentials"
    _script("scripts/tools/credential.py", "init", f"--folder={credentials}", f"--peers={N_HOSTS}")
    addresses = ",".join(f"{address}:{PORT}" for address in hosts.addresses)
    shared = ["links", f"--hosts={addresses}", f"--transfer_s={TRANSFER_S}", f"--out={measured}"]
    _wait(
        [
            _start(hosts, host, "measure.py", [*shared, f"--me={host}", f"--credential={credentials}/peer_{host}.pem"])
            for host in range(N_HOSTS)
        ]
    )
    content = json.loads(measured.read_text())
    content["hosts"] = [{"name": MACHINE, "cores": len(allowed_cpus())}]
    content["devices"] = [device | {"host": MACHINE} for device in content["devices"]]
    measured.write_text(json.dumps(content) + "\n")
    return measured


def run(case: str, steps: int, hosts: NetworkHosts, measured: Path, tokens: Path) -> dict[str, Any]:
    """One run of a case. Returns its line of raw data."""
    job = measured.parent / "job"
    settings = {**SYSTEMS[CASES[case][1]], "train.steps": steps, "data.path": tokens}
    flags = [f"--config={ROOT / 'configs/small.py'}", f"--emit={job}", f"--hosts={','.join(hosts.addresses)}"]
    flags += [f"--port={PORT}", f"--network={measured}", "--overwrite"]
    load_before = os.getloadavg()[0]
    _script("scripts/launch.py", *flags, *(f"--config.{name}={value}" for name, value in settings.items()))
    processes = [_start(hosts, 0, "coordinate.py", [f"--flagfile={job}/coordinator.flags", "--nolive"])]
    processes += [_start(hosts, i, "train.py", [f"--flagfile={job}/host_{i}.flags"]) for i in range(N_HOSTS)]
    _wait(processes)
    run_dir = job / EMITTED_RUN_DIR
    summary = local_run.summary(run_dir)
    network = networks.load(measured)
    links = [network.link(src, dst) for src, dst in itertools.permutations(range(N_HOSTS), 2)]
    return {
        "case": case,
        "predicted_s": summary["step_s_predicted"],
        "measured_s": summary["step_s_measured"],
        "steps_s": [round(seconds, 4) for seconds in local_run.step_seconds(run_dir)],
        "links_ms": [round(1e3 * link.latency_s, 2) for link in links],
        "links_gbps": [round(link.bandwidth_gbps, 4) for link in links],
        "load_before": load_before,
    }


def _script(path: str, *arguments: str) -> None:
    subprocess.run([sys.executable, str(ROOT / path), *arguments], check=True, stdout=subprocess.DEVNULL)


def _start(hosts: NetworkHosts, host: int, script: str, arguments: list[str]) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "scripts" / script), *arguments]
    environment = local_run.of_one_thread() | {"JAX_PLATFORMS": "cpu"}
    return hosts.start(host, command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


def _wait(processes: Sequence[subprocess.Popen]) -> None:
    """Wait for all to end. BadInput if one fails or takes too long; then none is left."""
    try:
        codes = [process.wait(RUN_S) for process in processes]
    except subprocess.TimeoutExpired:
        raise BadInput(f"hosts: a process has not ended after {RUN_S:.0f} s") from None
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes):
        raise BadInput(f"hosts: exit codes {codes}, expected 0 of each process; the reason stands above")


COMPARISON = replace(
    emulated.COMPARISON, cases=partial(emulated.cases, names=CASES), made=made, n_seeds=3, steps=5, file=page.HOSTS
)
