"""Start a whole fleet on this machine, or write the files with which it is started on several hosts.

    python scripts/launch.py --config=configs/quickstart.py --run_dir=runs/x \\
        [--emulate=configs/networks/four_cities.json] [--config.train.steps=50]
    python scripts/launch.py --resume --run_dir=runs/x [--config.train.steps=100]
    python scripts/launch.py --config=configs/two_hosts.py --emit=DIR --hosts=10.0.0.1,10.0.0.2
    python scripts/launch.py --resume --emit=DIR [--config.train.steps=100]

On this machine the coordinator and the peers are children of this process. With --emit nothing is started. Exit codes:
0 done, 2 bad input, 3 a peer was lost, 130 interrupted.
"""

import check_installed  # noqa: F401

from jaxdt.cli import interrupts
from jaxdt.run.exit_codes import ExitCode

# isort: split
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from absl import flags

from jaxdt.api import launch as api
from jaxdt.cli import config_fields, config_sources, environment, gpu_flags, resume_flags, run_flags
from jaxdt.membership.operations import STOPPED
from jaxdt.protocol.address import is_host, is_loopback
from jaxdt.run import plan as plans
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput, shell_line
from jaxdt.run.plan import Plan
from jaxdt.run.run_folder import ADDRESS, COORDINATOR_FLAGS, EMITTED_RUN_DIR, LAUNCH, launch_flags
from jaxdt.runtime import run_dir as run_dirs
from jaxdt.runtime.coordinator_folder import drop_damaged, last_members
from jaxdt.runtime.identity import authority
from jaxdt.runtime.identity.issuer import ISSUED
from jaxdt.runtime.net.address import Address, check_reachable, format_address
from jaxdt.runtime.reporting.console import print_line
from jaxdt.runtime.run_end import has_steps, how_to_go_on
from jaxdt.runtime.storage.checkpoint import Found
from jaxdt.runtime.storage.durable import FileStore
from jaxdt.runtime.storage.parts import part_name

INIT_FROM = flags.DEFINE_string(
    "init_from", None, "A model folder of tools/import_model.py: the run begins with its parameters."
)
UNTIE = flags.DEFINE_bool("untie", False, "With --init_from: the head gets a copy of the table that it shared.")
OVERWRITE = flags.DEFINE_bool("overwrite", False, "Delete the files of an earlier run in run_dir.")
RESUME = flags.DEFINE_bool("resume", False, "Continue from the newest complete checkpoint of run_dir, or of --emit.")
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
NETWORK = flags.DEFINE_string(
    "network", None, "Measured links, for the prediction and codec auto; else those of --emulate."
)
PROFILE = flags.DEFINE_string("profile", None, "For codec auto: a profile.json; by default int8 is measured.")
REPORT = flags.DEFINE_bool("report", True, "Write trace.jsonl, timeline.json and report.png at the end.")
PRINT_CONFIG = flags.DEFINE_bool(
    "print_config", False, "Print the config and where each value comes from, and start nothing."
)
NETWORKS = {"emulate": "emulated_network.json", "network": "measured_network.json"}  # beside the flag files
SUBJECTS = {  # of --help
    "What to train": ("config", "init_from", "untie", "plan", "print_config"),
    "The folder of the run": ("run_dir", "resume", "overwrite", "report"),
    "Links between the peers": ("emulate", "network", "profile"),
    "This machine": ("pin", "gpus_per_peer", "emulate_forward_s", "stall"),
    "Several hosts": ("emit", "hosts", "port"),
}


def main() -> int:
    began_s = time.monotonic() - time.process_time()  # imports are CPU-bound, so this is when the process began
    environment.keep_off_gpus()
    config = run_flags.config_dict()
    check_model_flags()
    checked = api.check(config, options_of_flags(), run_flags.PLAN.value or "--config")
    if PRINT_CONFIG.value:
        print(config_table(checked.config, checked.plan))
        return 0
    check_used_flags()
    if INIT_FROM.value:
        facts = checked.config.model.facts
        shape = f"{facts.n_layers} layers, {facts.n_params:,} parameters, samples of at most {facts.max_len} tokens"
        say(f"--init_from: the run begins with {INIT_FROM.value}: {shape}")
    checked = api.with_codecs(checked, say)
    if EMIT.value:
        check_hosts(checked.plan)
        emit(Path(EMIT.value), checked)
        return 0
    run_flags.required("run_dir")
    run = api.start(checked, run_flags.RUN_DIR.value, say, began_s)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: run.stop())
    code = run.wait()
    assert code is not None, "it has waited without a limit"
    to_draw = f"to draw these steps: {shell_line('python', 'scripts/report.py', f'--run_dir={run.run_dir}')}"
    interrupts.end_on_interrupt(f"interrupted when the run was over; {to_draw}")
    if code and run.summary.get("steps"):
        print(to_draw)
    is_stopped = run.summary.get("reason", "").startswith(STOPPED)
    if code == ExitCode.INTERRUPTED or (code == ExitCode.LOST and has_steps(run.run_dir)) or is_stopped:
        print(how_to_go_on(run.run_dir))
    if code == 0 and REPORT.value:
        print("draws the report", flush=True)
        print(run.report().text)
    return code


def say(line: str) -> None:
    print_line(line)


def options_of_flags() -> api.LaunchOptions:
    """Most options have the names of flags."""
    named = {
        field.name: flags.FLAGS[field.name].value for field in fields(api.LaunchOptions) if field.name in flags.FLAGS
    }
    plan = plans.load(run_flags.PLAN.value) if run_flags.PLAN.value else None
    return api.LaunchOptions(**named | {"plan": plan, "show": True})


def config_table(config: RunConfig, plan: Plan) -> str:
    """Every field of the config and every flag that is not at its default, with where its value comes from."""
    folders = resume_flags.folders(run_flags.RUN_DIR.value, EMIT.value)
    is_of_run = RESUME.value and run_flags.PLAN.value == str(folders.run_dir / "plan.json")
    others = [name for names in SUBJECTS.values() for name in names if name not in ("config", "plan", "print_config")]
    kept = launch_flags(folders.job) if RESUME.value else {}
    rows = config_sources.sourced(
        config,
        plan,
        run_flags.config_dict().to_dict(),
        by_flag=flags.FLAGS["config"].override_values,
        file_source=config_sources.RESUME if RESUME.value else "config file",
        plan_source=(config_sources.RESUME if is_of_run else "plan") if run_flags.PLAN.value else None,
    )
    rows += config_sources.sourced_flags(others, kept)
    return config_sources.table(rows)


def check_model_flags() -> None:
    """BadInput for a flag that says something else of a model that comes from a folder."""
    given = flags.FLAGS["config"].override_values
    names = [name for name in given if name.startswith("model.") and name != "model.adapter"]
    if INIT_FROM.value and names:
        expected = "expected no such flag, since the model is that of --init_from (--config.data.seq_len is the run's)"
        raise BadInput(f"--config.{names[0]}: got {given[names[0]]!r}, {expected}")


def check_used_flags() -> None:
    """BadInput for a flag that would not be read beside the others, or a line for a field of the config."""
    own = Path(EMIT.value) / EMITTED_RUN_DIR if EMIT.value else None
    if own and run_flags.RUN_DIR.value not in (None, str(own)):
        raise BadInput(f"--run_dir: got {run_flags.RUN_DIR.value}, expected none with --emit, whose run is in {own}")
    if own and PIN.value:
        raise BadInput("--pin: is for the peers of this machine, expected no --emit")
    if HOSTS.value and not EMIT.value:
        raise BadInput("--hosts: is read with --emit=DIR only, which writes what each host needs")
    cut = [name for name in flags.FLAGS["config"].override_values if name.startswith("plan.")]
    if run_flags.PLAN.value and cut:
        say(f"--config.{', --config.'.join(cut)}: not read, since --plan={run_flags.PLAN.value} says it")


def check_hosts(plan: Plan) -> None:
    """BadInput unless every peer has a port, and a host that the others reach."""
    peers, hosts = sorted(plan.peers), [host.strip("[]") for host in HOSTS.value]
    if len(HOSTS.value) != len(peers):
        raise BadInput(f"--hosts: got {len(HOSTS.value)} addresses, expected {len(peers)}, one per peer {peers}")
    for given, host in zip(HOSTS.value, hosts, strict=True):
        if not is_host(host):
            expected = "a name or address alone, without user, port and mask (--port is the coordinator's)"
            raise BadInput(f"--hosts: got {given!r}, which no other host can resolve; expected {expected}")
    check_reachable("--hosts", hosts)
    if PORT.value + len(peers) > 65535:
        raise BadInput(f"--port: got {PORT.value}, expected at most {65535 - len(peers)} for {len(peers)} peers")


def emit(folder: Path, checked: api.CheckedRun) -> None:
    """Write coordinator.flags, one host_N.flags per peer and one worker_N.flags per worker of a pool, with the files
    that they name, and print the commands and the files that each host needs. With --resume they go on from the newest
    checkpoint of the run in this folder."""
    peers, per_peer, run_dir = sorted(checked.plan.peers), checked.gpus_per_peer, folder / EMITTED_RUN_DIR
    checkpoint = checkpoint_of(run_dir, checked) if RESUME.value else None
    resumed = [f"--resume_from={checkpoint.folder}"] if checkpoint else []
    lacking = lacking_parts(run_dir, checkpoint) if checkpoint else []
    if checkpoint:
        drop_redeemed_tokens(folder / run_dirs.CREDENTIALS, run_dir)
    elif replaced := run_dirs.clear(folder, OVERWRITE.value):
        say(replaced)
    run_dirs.write_job(folder, checked.config, checked.plan)
    options = with_networks(folder, checked.options)
    resume_flags.save(folder, options, hosts=",".join(HOSTS.value), port=str(PORT.value))
    shared = [*run_dirs.job_flags(folder), f"--run_dir={run_dir}", *resumed, *api.process_flags(options)]
    coordinator = (HOSTS.value[0].strip("[]"), PORT.value)
    gpus = gpu_flags.flags_of_hosts(dict(zip(peers, HOSTS.value, strict=True)), per_peer) if per_peer else {}
    own_flags = [*_listen_flags(coordinator), run_dirs.coordinator_credential(folder), *api.network_flags(options)]
    _write_flags(folder / COORDINATOR_FLAGS, [*shared, *own_flags])
    (folder / ADDRESS).write_text(format_address(coordinator))
    begun_with = "" if checkpoint else checked.config.init.path
    inputs = [Path(path) for path in (options.emulate, checked.config.data.path, begun_with) if path]
    inputs += [file.path for file in checked.data.files]
    inputs += checked.config.model.source_files
    files = [folder / name for name in ("config.json", "config.py", "plan.json", "run")] + inputs
    files += [checkpoint.folder] if checkpoint else []
    needed = {host: list(files) for host in HOSTS.value}
    needed[HOSTS.value[0]] += [folder / COORDINATOR_FLAGS, folder / ADDRESS, folder / LAUNCH]
    needed[HOSTS.value[0]] += [Path(options.network)] if options.network else []
    needed[HOSTS.value[0]].append(authority.coordinator_file(folder / run_dirs.CREDENTIALS))
    start = shell_line("python", "scripts/coordinate.py", f"--flagfile={folder / COORDINATOR_FLAGS}")
    print_line(f"on {HOSTS.value[0]}: {start}")
    for offset, (peer, host) in enumerate(zip(peers, HOSTS.value, strict=True), start=1):
        own = (host.strip("[]"), PORT.value + offset)
        own_flags = [f"--peer={peer}", f"--coordinator={format_address(coordinator)}", *_listen_flags(own)]
        own_flags.append(run_dirs.token_flag(folder, f"host_{peer}", peer))
        flag_file = folder / f"host_{peer}.flags"
        _write_flags(flag_file, [*shared, *own_flags, *gpus.get(peer, [])])
        needed[host] += [flag_file, run_dirs.token_file(folder, f"host_{peer}")]
        print_line(f"on {host}: {shell_line('python', 'scripts/train.py', f'--flagfile={flag_file}')}")
    for host, paths in needed.items():
        print_line(f"{host} needs: {shell_line(*paths)}")
    for line in lacking:
        print_line(line)
    if checked.plan.workers:
        of_workers = [f"--join={format_address(coordinator)}", "--as=worker", f"--run_dir={run_dir}"]
        _emit_workers(folder, checked.plan.workers, [*of_workers, *api.process_flags(options)], inputs)
    operator = authority.operator_file(folder / run_dirs.CREDENTIALS)
    flags_of_operator = (f"--coordinator={format_address(coordinator)}", f"--credential={operator}")
    where = "" if operator.exists() else f", where {operator.name} is"
    stop = shell_line("python", "scripts/fleet.py", "stop", *flags_of_operator)
    print_line(f"to end the run early{where}: {stop}")


def with_networks(folder: Path, options: api.LaunchOptions) -> api.LaunchOptions:
    """The options with copies of the network files in the folder, for the hosts."""
    copies: dict[str, Path] = {}
    for option, name in NETWORKS.items():
        if path := getattr(options, option):
            copies[option] = folder / name
            copies[option].write_bytes(Path(path).read_bytes())
    return replace(options, **copies)


def _emit_workers(folder: Path, workers: Sequence[int], shared: Sequence[str], inputs: Sequence[Path]) -> None:
    """A pool's workers may run on any hosts, and ask the coordinator for the job of the run. `inputs`: files that are
    no part of it."""
    for worker in workers:
        flag_file, token = folder / f"worker_{worker}.flags", run_dirs.token_flag(folder, f"worker_{worker}", worker)
        _write_flags(flag_file, [f"--peer={worker}", *shared, token])
        print_line(f"on any host: {shell_line('python', 'scripts/train.py', f'--flagfile={flag_file}')}")
        needed = shell_line(flag_file, run_dirs.token_file(folder, f"worker_{worker}"), *inputs)
        print_line(f"the host of worker {worker} needs: {needed}")


def drop_redeemed_tokens(credentials: Path, run_dir: Path) -> None:
    """Delete the tokens that earlier processes of the run have redeemed: a peer that is now on another host needs a new
    one. On its former host it has its credential."""
    folder = run_dir / "coordinator"
    issued = (FileStore(folder).get(ISSUED) or []) if folder.exists() else []
    authority.drop_tokens(credentials, {entry["token"] for entry in issued})


def lacking_parts(run_dir: Path, checkpoint: Found) -> list[str]:
    """A line for each part of a checkpoint that is not in its folder here: on which hosts of the last view it lies."""
    members = last_members(run_dir)
    lines: list[str] = []
    for part in checkpoint.record.checkpoint.parts:
        name = part_name(part.stage, part.digest)
        if name in checkpoint.elsewhere:
            holders = [member for member in members if member.disk in part.disks]
            found = [f"peer {member.peer} on {member.address.rpartition(':')[0]}" for member in holders]
            where, path = " and of ".join(found) or "a peer of its stage", checkpoint.folder / name
            lines.append(f"bring {shell_line(path)} here before you copy: it lies in the run_dir of {where}")
    return lines


def checkpoint_of(run_dir: Path, checked: api.CheckedRun) -> Found:
    """The newest checkpoint of an emitted run that has ended. Its parts may be on other hosts, where whoever loads one
    checks it. BadInput if this config cannot continue from it."""
    os.close(run_dirs.hold(run_dir))
    found, problems = api.resumable(run_dir, checked, elsewhere=True)
    changed = api.resumption(run_dir, found.folder, checked)  # nothing is deleted for a run that is refused
    for line in [*problems, *drop_damaged(run_dir), *changed]:
        say(line)
    return found


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
        help_text=lambda: config_fields.help_text(__doc__ or "", SUBJECTS),
    )
