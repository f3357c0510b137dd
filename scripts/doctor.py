"""Check this host before it joins a run: versions, devices, ports, clock, disk, and the settings that its links need.

    python scripts/doctor.py [--config=C] [--plan=P] [--network=N.json] [--listen=HOST:PORT] [--coordinator=HOST:PORT]
        [--credential=F] [--run_dir=R]

Prints one line per finding, and below a bad one the command that mends it. Exit code 1 if there is a bad one.
"""

import check_installed  # noqa: F401

# isort: split
from collections.abc import Iterable
from pathlib import Path

from absl import flags

from jaxdt.cli import config_flag, option_flags, process_job, script_main
from jaxdt.cli.run_inputs import ProcessOptions, RunOptions
from jaxdt.run import network as networks
from jaxdt.run import plan as plans
from jaxdt.run.errors import BadInput
from jaxdt.runtime.calibrate import doctor
from jaxdt.runtime.identity.credential import load as load_credential
from jaxdt.runtime.net.address import parse_address
from jaxdt.runtime.net.descriptor_limit import descriptor_limit

option_flags.define(ProcessOptions, "run_dir", "plan", "credential")
NETWORK = flags.DEFINE_string("network", None, "A network.json with measured or planned links between the hosts.")
LISTEN = flags.DEFINE_string("listen", None, "host:port that this peer will listen on.")
COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of the coordinator, to which a connection is tried.")


def main() -> int:
    process_job.check_run_dir(flags.FLAGS.run_dir)
    findings = [*doctor.versions(), *doctor.devices(), *doctor.clock(doctor.clock_error_s())]
    if LISTEN.value:
        findings += doctor.port(parse_address("--listen", LISTEN.value))
    if COORDINATOR.value:
        findings += doctor.reach(parse_address("--coordinator", COORDINATOR.value))
    if flags.FLAGS.credential:
        load_credential(Path(flags.FLAGS.credential))
        findings += doctor.validity(Path(flags.FLAGS.credential))
    findings += data_and_disk()
    plan = plans.load(flags.FLAGS.plan) if flags.FLAGS.plan else None
    findings += doctor.descriptors(descriptor_limit(), len(plan.peers) if plan else 1)
    findings += links(plan)
    for finding in findings:
        print(f"{'mend' if finding.mend else 'good'}  {finding.what:<24} {finding.seen}")
        if finding.mend:
            print(f"      {'':<24} {finding.mend}")
    return 1 if any(finding.mend for finding in findings) else 0


def data_and_disk() -> Iterable[doctor.Finding]:
    """Findings about the token file, and about the disk. Without --config only the free space is reported."""
    n_checkpoints = n_bytes = 0
    if config_flag.is_given():
        inputs = config_flag.inputs(RunOptions(plan=flags.FLAGS.plan))
        config = inputs.config
        yield from doctor.tokens(inputs.data)
        n_checkpoints = config.train.keep_checkpoints + 1  # the next one is written before the oldest is deleted
        facts = config.model.facts
        n_bytes = 4 * facts.state_numbers(0, facts.n_layers, config.optim.moments)
    yield from doctor.disk(Path(flags.FLAGS.run_dir or "."), n_checkpoints, n_bytes)


def links(plan: plans.Plan | None) -> Iterable[doctor.Finding]:
    """Findings about the links of --network between the peers of --plan, or between all devices without a plan."""
    if NETWORK.value is None:
        return
    network = networks.load(NETWORK.value)
    peers = plan.peers if plan else range(network.n_devices)
    if max(peers) >= network.n_devices:
        raise BadInput(f"{NETWORK.value}: has {network.n_devices} devices, the plan uses device {max(peers)}")
    yield from doctor.links(network, peers, doctor.read_sysctl)


if __name__ == "__main__":
    script_main.run(main)
