"""Start a whole fleet on this machine, or write the files with which it is started on several hosts.

    python scripts/launch.py --config=configs/quickstart.py --run_dir=runs/x \\
        [--emulate=configs/networks/four_cities.json] [--config.train.steps=50]
    python scripts/launch.py --resume --run_dir=runs/x [--config.train.steps=100]
    python scripts/launch.py --config=configs/two_hosts.py --emit=DIR --hosts=10.0.0.1,10.0.0.2

On this machine the coordinator and the peers are children of this process. With --emit nothing is started. Exit codes:
0 done, 2 bad input, 3 a peer was lost, 130 interrupted.
"""

import os
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

from absl import flags

from jaxdt.cli import codec_flags, config_sources, environment, gpu_flags, launch_help, resume_flags, run_flags
from jaxdt.model.data import TokenFile, verify_checksum
from jaxdt.runtime import run_dir as run_dirs
from jaxdt.runtime.fleet import INTERRUPTED, LocalFleet, PeerDevices
from jaxdt.runtime.net.address import Address, check_address, format_address, is_loopback
from jaxdt.runtime.storage.checkpoint import about_run, complete_checkpoints, newest_whole
from jaxdt.spec.config import RunConfig
from jaxdt.spec.errors import BadInput
from jaxdt.spec.plan import Plan

OVERWRITE = flags.DEFINE_bool("overwrite", False, "Delete the files of an earlier run in run_dir.")
RESUME = flags.DEFINE_bool("resume", False, "Continue from the newest complete checkpoint of run_dir.")
EMIT = flags.DEFINE_string("emit", None, "Folder for flag files, plan and credentials; nothing is started.")
HOSTS = flags.DEFINE_list("hosts", [], "With --emit: the address of each peer's host, in the order of the peers.")
PORT = flags.DEFINE_integer(
    "port", 7700, "With --emit: port of the coordinator, on the first host; peers get the next ones.", 1, 65535
)
PIN = flags.DEFINE_integer("pin", 0, "CPUs of each peer; 0 divides this machine's among them if there are enough.", 0)
GPUS_PER_PEER = flags.DEFINE_string(
    "gpus_per_peer",
    "",
    "GPUs of each peer: an integer, or 1/N for N peers on one GPU. By default the peers of this machine divide its "
    "GPUs, and with --emit each peer takes what jax finds.",
)
REPORT = flags.DEFINE_bool("report", True, "Write trace.jsonl, timeline.json and report.png at the end.")
PRINT_CONFIG = flags.DEFINE_bool(
    "print_config", False, "Print the config and where each value comes from, and start nothing."
)
SUBJECTS = {  # of --help
    "What to train": ("config", "plan", "print_config"),
    "The folder of the run": ("run_dir", "resume", "overwrite", "report"),
    "Links between the peers": ("emulate", "network", "profile"),
    "This machine": ("pin", "gpus_per_peer", "emulate_forward_s"),
    "Several hosts": ("emit", "hosts", "port"),
}

VERIFIED_BYTES_MAX = 1 << 30  # takes about a second; scripts/doctor.py verifies larger token files
SCRIPTS = Path(__file__).resolve().parent


def main() -> int:
    began_s = time.monotonic() - time.process_time()  # imports are CPU-bound, so this is when the process began
    environment.keep_off_gpus()
    config, plan, data = run_flags.config_and_plan()
    if data.tokens.nbytes <= VERIFIED_BYTES_MAX:
        verify_checksum(data)
    run_flags.emulated(plan)
    if PRINT_CONFIG.value:
        print(config_table(config, plan))
        return 0
    plan = codec_flags.decided(config, plan)
    per_peer = gpus_per_peer(config)
    if EMIT.value:
        check_hosts(plan)
        run_dirs.clear(Path(EMIT.value), OVERWRITE.value)
        emit(Path(EMIT.value), config, plan, per_peer)
        return 0
    run_flags.required("run_dir")
    check_pin(plan)
    devices = PeerDevices(PIN.value, gpu_flags.flags_of_local_peers(sorted(plan.peers), config.platform, per_peer))
    run_dir = Path(run_flags.RUN_DIR.value)
    extra = [f"--emulate={run_flags.EMULATE.value}"] if run_flags.EMULATE.value else []
    extra += [f"--emulate_forward_s={run_flags.FORWARD_S.value}"] if run_flags.FORWARD_S.value else []
    extra += network_flags(plan)
    if RESUME.value:
        if not any(run_dir.glob("checkpoints/*/")):  # nothing is written there then
            raise BadInput(f"{run_dir}: holds no complete checkpoint")
    else:
        run_dirs.clear(run_dir, OVERWRITE.value)
    lock = run_dirs.hold(run_dir)
    if RESUME.value:
        extra.append(f"--resume_from={resumable(run_dir, config, data)}")
        for line in resume_flags.changes(run_dir, config, plan):
            print(line, flush=True)
    run_dirs.write_job(run_dir, config, plan)
    resume_flags.save(run_dir)
    code = LocalFleet(run_dir, plan, SCRIPTS, extra, devices, began_s, lock).run()
    if code == INTERRUPTED:
        print(saved(run_dir))
    if code == 0 and REPORT.value:
        code = subprocess.run([sys.executable, str(SCRIPTS / "report.py"), f"--run_dir={run_dir}"]).returncode
    return code


def config_table(config: RunConfig, plan: Plan) -> str:
    """Every field of the config and every flag that is not at its default, with where its value comes from."""
    run_dir = Path(run_flags.RUN_DIR.value or "")
    is_of_run = RESUME.value and run_flags.PLAN.value == str(run_dir / "plan.json")
    given = config_sources.Given(
        fields=run_flags.config_dict().to_dict(),
        by_flag=flags.FLAGS["config"].override_values,
        file_source=config_sources.RESUME if RESUME.value else "config file",
        plan_source=(config_sources.RESUME if is_of_run else "plan") if run_flags.PLAN.value else None,
    )
    others = [name for names in SUBJECTS.values() for name in names if name not in ("config", "print_config")]
    kept = resume_flags.kept(run_dir) if RESUME.value else {}
    rows = config_sources.sourced(config, plan, given) + config_sources.sourced_flags(others, kept)
    return config_sources.table(rows)


def resumable(run_dir: Path, config: RunConfig, data: TokenFile) -> Path:
    """The newest complete checkpoint that is whole. BadInput if this config cannot continue from it."""
    folder, problems = newest_whole(run_dir, about_run(config, data.checksum))
    for problem in problems:
        print(f"--resume: a newer checkpoint is damaged, so the run goes on from step {int(folder.name)}: {problem}")
    if int(folder.name) >= config.train.steps:
        raise BadInput(f"train.steps: got {config.train.steps}, expected more than the {int(folder.name)} of {folder}")
    return folder


def saved(run_dir: Path) -> str:
    """What an interrupted run has left, and the command that goes on from it."""
    checkpoints = complete_checkpoints(run_dir)
    if not checkpoints:
        return f"{run_dir} holds no complete checkpoint, so nothing is left to go on from"
    n_steps = int(checkpoints[-1].name)
    return f"to go on from step {n_steps}: python scripts/launch.py --resume --run_dir={run_dir}"


def network_flags(plan: Plan) -> list[str]:
    """The coordinator's flag with the measured links, on which it predicts the step and looks for better plans; the
    peers of this machine, which get the same flags, do not know it."""
    if not codec_flags.NETWORK.value:
        return []
    run_flags.network_of(codec_flags.NETWORK.value, plan)
    return [f"--network={codec_flags.NETWORK.value}", "--undefok=network"]


def check_pin(plan: Plan) -> None:
    """BadInput unless this machine has --pin CPUs for each peer."""
    n_peers, n_cpus = len(plan.peers), os.cpu_count() or 1
    if PIN.value * n_peers > n_cpus:
        most = f"at most {n_cpus // n_peers}" if n_peers <= n_cpus else "0, which lets them share"
        raise BadInput(
            f"--pin: got {PIN.value} for each of {n_peers} peers, this machine has {n_cpus}, expected {most}"
        )


def gpus_per_peer(config: RunConfig) -> Fraction | None:
    """--gpus_per_peer, which must fit the platform and the microbatches of the config."""
    per_peer = gpu_flags.parse_gpus_per_peer(GPUS_PER_PEER.value)
    if per_peer and config.platform not in ("any", "gpu"):
        raise BadInput(f"--gpus_per_peer: got {per_peer}, but platform is {config.platform}, expected any or gpu")
    size = config.train.microbatch_size
    if per_peer and per_peer > 1 and size % per_peer:
        raise BadInput(f"--gpus_per_peer: got {per_peer}, expected a divisor of train.microbatch_size {size}")
    return per_peer


def check_hosts(plan: Plan) -> None:
    """BadInput unless every peer has a host and a port."""
    peers = sorted(plan.peers)
    if len(HOSTS.value) != len(peers):
        raise BadInput(f"--hosts: got {len(HOSTS.value)} addresses, expected {len(peers)}, one per peer {peers}")
    if not all(HOSTS.value):
        raise BadInput(f"--hosts: got {','.join(HOSTS.value)}, expected no empty address")
    if PORT.value + len(peers) > 65535:
        raise BadInput(f"--port: got {PORT.value}, expected at most {65535 - len(peers)} for {len(peers)} peers")


def emit(folder: Path, config: RunConfig, plan: Plan, per_peer: Fraction | None) -> None:
    """Write coordinator.flags and one host_N.flags per peer, with the files that they name, and print the commands."""
    peers = sorted(plan.peers)
    run_dirs.write_job(folder, config, plan)
    shared = [*run_dirs.job_flags(folder), f"--run_dir={folder / 'run_dir'}"]
    coordinator = _address(HOSTS.value[0], PORT.value)
    gpus = gpu_flags.flags_of_hosts(dict(zip(peers, HOSTS.value, strict=True)), per_peer) if per_peer else {}
    own_flags = [*_listen_flags(coordinator), run_dirs.coordinator_credential(folder), *network_flags(plan)]
    _write_flags(folder / "coordinator.flags", [*shared, *own_flags])
    print(f"on {HOSTS.value[0]}: python scripts/coordinate.py --flagfile={folder}/coordinator.flags")
    for offset, (peer, host) in enumerate(zip(peers, HOSTS.value, strict=True), start=1):
        own = _address(host, PORT.value + offset)
        own_flags = [f"--peer={peer}", f"--coordinator={format_address(coordinator)}", *_listen_flags(own)]
        own_flags.append(run_dirs.new_token(folder, f"host_{peer}", peer))
        _write_flags(folder / f"host_{peer}.flags", [*shared, *own_flags, *gpus.get(peer, [])])
        print(f"on {host}: python scripts/train.py --flagfile={folder}/host_{peer}.flags")


def _address(host: str, port: int) -> Address:
    """The address of a host of --hosts; BadInput if that is none."""
    address = (host.strip("[]"), port)
    check_address("--hosts", address)
    return address


def _listen_flags(address: Address) -> list[str]:
    """The flags with which a process is reached at an address. The address may be one of a router, or a name, so the
    process listens on all interfaces."""
    host, port = address
    if is_loopback(host):
        return [f"--listen={format_address(address)}"]
    return [f"--listen={'[::]' if ':' in host else '0.0.0.0'}:{port}", f"--advertise={format_address(address)}"]


def _write_flags(path: Path, lines: list[str]) -> None:
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    run_flags.run(
        main,
        complete=resume_flags.with_flags_of_run,
        help_text=lambda: launch_help.help_text(__doc__ or "", SUBJECTS),
    )
