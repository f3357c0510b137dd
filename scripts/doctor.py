"""Look at this host before it joins a run: versions, devices, ports, clock, disk, and what its links need.

    python scripts/doctor.py [--plan=P] [--network=N.json] [--listen=HOST:PORT] [--credential=F] [--config=C]

Exit code 1 if there is anything to mend; the command for it stands beside each finding.
"""

from pathlib import Path

import run_flags
from absl import flags

from jaxdt.core import network as networks
from jaxdt.core import plan as plans
from jaxdt.runtime import doctor
from jaxdt.runtime.credential import load as load_credential

NETWORK = flags.DEFINE_string("network", None, "A network.json: measured or planned links between the hosts.")
LISTEN = flags.DEFINE_string("listen", None, "host:port that this peer will listen on.")
FLOATS_PER_PARAMETER = 3  # the parameter and two moments


def main() -> int:
    findings = [*doctor.versions(), *doctor.devices()]
    if LISTEN.value:
        findings += doctor.port(LISTEN.value)
    if run_flags.CREDENTIAL.value:
        load_credential(run_flags.CREDENTIAL.value)
        findings += doctor.clock(Path(run_flags.CREDENTIAL.value))
    n_bytes = 0
    if run_flags.CONFIG.value is not None:
        config, _, _ = run_flags.config_and_plan()
        n_bytes = 4 * FLOATS_PER_PARAMETER * config.model.n_params
    findings += doctor.disk(Path(run_flags.RUN_DIR.value or "."), n_bytes)
    if NETWORK.value:
        network = networks.load(NETWORK.value)
        peers = plans.load(run_flags.PLAN.value).peers if run_flags.PLAN.value else range(network.n_devices)
        findings += doctor.links(network, peers, doctor.read_sysctl)
    for finding in findings:
        print(f"{'mend' if finding.mend else 'good'}  {finding.what:<24} {finding.seen}")
        if finding.mend:
            print(f"      {'':<24} {finding.mend}")
    return 1 if any(finding.mend for finding in findings) else 0


if __name__ == "__main__":
    run_flags.run(main)
