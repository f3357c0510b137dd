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
from dataclasses import dataclass, replace
from pathlib import Path

from absl import flags

from jaxdt.api import launch as api
from jaxdt.cli import (
    config_fields,
    config_flag,
    config_sources,
    environment,
    gpu_flags,
    option_flags,
    resume_flags,
    run_inputs,
    script_main,
)
from jaxdt.cli.run_inputs import ProcessOptions
from jaxdt.membership.operations import STOPPED
from jaxdt.protocol.address import is_host, is_loopback
from jaxdt.run.errors import BadInput, shell_line
from jaxdt.run.options import in_range, option
from jaxdt.run.plan import Plan
from jaxdt.run.run_folder import ADDRESS, COORDINATOR_FLAGS, EMITTED_RUN_DIR, LAUNCH, launch_flags
from jaxdt.runtime import run_dir as run_dirs
from jaxdt.runtime.coordinator_folder import last_members
from jaxdt.runtime.identity import authority
from jaxdt.runtime.identity.issuer import ISSUED
from jaxdt.runtime.net.address import Address, check_reachable, format_address
from jaxdt.runtime.reporting.console import print_line
from jaxdt.runtime.run_end import has_steps, how_to_go_on
from jaxdt.runtime.storage.checkpoint import Found
from jaxdt.runtime.storage.durable import FileStore
from jaxdt.runtime.storage.parts import part_name

PORT = 7700


@dataclass(frozen=True)
class Launch(api.LaunchOptions):
    """The flags of this script, beside --config and --run_dir."""

    show: bool = True
    report: bool = option(True, "Write trace.jsonl, timeline.json and report.png at the end.")
    print_config: bool = option(False, "Print the config and where each value comes from, and start nothing.")
    emit: str | None = option(None, "Folder for flag files, plan and credentials; nothing is started.")
    hosts: tuple[str, ...] | None = option(
        None, "With --emit: the address of each peer's host, in the order of the peers.", kept=True
    )
    port: int | None = option(
        None,
        f"With --emit: port of the coordinator, on the first host, by default {PORT}; peers get the next ones.",
        in_range(1, 65535),
        kept=True,
    )


option_flags.define(ProcessOptions, "run_dir")
option_flags.define(Launch)
FLAGS = flags.FLAGS
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
    config, given = config_flag.config_dict(), option_flags.read(Launch)
    if given.resume:
        given = resume_flags.completed(resume_flags.folders(FLAGS.run_dir, given.emit).job, given)
    check_model_flags(given)
    checked = api.check(config, given)
    if given.print_config:
        print(config_table(checked))
        return 0
    check_used_flags(given)
    if given.init_from:
        facts = checked.config.model.facts
        shape = f"{facts.n_layers} layers, {facts.n_params:,} parameters, samples of at most {facts.max_len} tokens"
        say(f"--init_from: the run begins with {given.init_from}: {shape}")
    checked = api.with_codecs(checked, say)
    if given.emit:
        emit(Path(given.emit), checked)
        return 0
    run = api.start(checked, script_main.required("run_dir"), say, began_s)
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
    if code == 0 and given.report:
        print("draws the report", flush=True)
        print(run.report().text)
    return code


def say(line: str) -> None:
    print_line(line)


def config_table(inputs: api.LaunchInputs[Launch]) -> str:
    """Every field of the config and every flag that is not at its default, with where its value comes from."""
    given, run_dir = inputs.options, FLAGS.run_dir
    folders = resume_flags.folders(run_dir, given.emit)
    is_of_run = given.resume and given.plan == str(folders.run_dir / "plan.json")
    rows = config_sources.sourced(
        inputs.config,
        inputs.plan,
        config_flag.config_dict().to_dict(),
        by_flag=config_flag.overrides(),
        file_source=config_sources.RESUME if given.resume else "config file",
        plan_source=(config_sources.RESUME if is_of_run else "plan") if given.plan else None,
    )
    rows += [config_sources.SourcedValue("--run_dir", run_dir, config_sources.FLAG)] if run_dir else []
    kept = launch_flags(folders.job) if given.resume else {}
    return config_sources.table(
        rows + config_sources.sourced_flags(replace(given, plan=None, show=True, print_config=False), kept)
    )


def check_model_flags(given: Launch) -> None:
    """BadInput for a flag that says something else of a model that comes from a folder."""
    fields = config_flag.overrides()
    names = [name for name in fields if name.startswith("model.") and name != "model.adapter"]
    if given.init_from and names:
        expected = "expected no such flag, since the model is that of --init_from (--config.data.seq_len is the run's)"
        raise BadInput(f"--config.{names[0]}: got {fields[names[0]]!r}, {expected}")


def check_used_flags(given: Launch) -> None:
    """BadInput for a flag that would not be read beside the others, or a line for a field of the config."""
    own = Path(given.emit) / EMITTED_RUN_DIR if given.emit else None
    if own and FLAGS.run_dir not in (None, str(own)):
        raise BadInput(f"--run_dir: got {FLAGS.run_dir}, expected none with --emit, whose run is in {own}")
    if own and given.pin:
        raise BadInput("--pin: is for the peers of this machine, expected no --emit")
    if given.hosts and not given.emit:
        raise BadInput("--hosts: is read with --emit=DIR only, which writes what each host needs")
    cut = [name for name in config_flag.overrides() if name.startswith("plan.")]
    if given.plan and cut:
        say(f"--config.{', --config.'.join(cut)}: not read, since --plan={given.plan} says it")


def check_hosts(plan: Plan, given_hosts: Sequence[str], port: int) -> None:
    """BadInput unless every peer has a port, and a host that the others reach."""
    peers, hosts = sorted(plan.peers), [host.strip("[]") for host in given_hosts]
    if len(hosts) != len(peers):
        raise BadInput(f"--hosts: got {len(hosts)} addresses, expected {len(peers)}, one per peer {peers}")
    for given, host in zip(given_hosts, hosts, strict=True):
        if not is_host(host):
            expected = "a name or address alone, without user, port and mask (--port is the coordinator's)"
            raise BadInput(f"--hosts: got {given!r}, which no other host can resolve; expected {expected}")
    check_reachable("--hosts", hosts)
    if port + len(peers) > 65535:
        raise BadInput(f"--port: got {port}, expected at most {65535 - len(peers)} for {len(peers)} peers")


def emit(folder: Path, checked: api.LaunchInputs[Launch]) -> None:
    """Write coordinator.flags, one host_N.flags per peer and one worker_N.flags per worker of a pool, with the files
    that they name, and print the commands and the files that each host needs. With --resume they go on from the newest
    checkpoint of the run in this folder."""
    hosts, port = checked.options.hosts or (), checked.options.port or PORT
    check_hosts(checked.plan, hosts, port)
    peers, per_peer, run_dir = sorted(checked.plan.peers), api.gpus_per_peer(checked), folder / EMITTED_RUN_DIR
    checkpoint = checkpoint_of(run_dir, checked) if checked.options.resume else None
    resumed = [f"--resume_from={checkpoint.folder}"] if checkpoint else []
    lacking = lacking_parts(run_dir, checkpoint) if checkpoint else []
    if checkpoint:
        drop_redeemed_tokens(folder / run_dirs.CREDENTIALS, run_dir)
    elif replaced := run_dirs.clear(folder, checked.options.overwrite):
        say(replaced)
    run_dirs.write_job(folder, checked.config, checked.plan)
    options = with_networks(folder, replace(checked.options, port=port))
    resume_flags.save(folder, options)
    emulation = run_inputs.process_flags(options)
    shared = [*run_dirs.job_flags(folder), f"--run_dir={run_dir}", *resumed, *emulation]
    coordinator = (hosts[0].strip("[]"), port)
    gpus = gpu_flags.flags_of_hosts(dict(zip(peers, hosts, strict=True)), per_peer) if per_peer else {}
    own_flags = [*_listen_flags(coordinator), run_dirs.coordinator_credential(folder), *api.coordinator_flags(options)]
    _write_flags(folder / COORDINATOR_FLAGS, [*shared, *own_flags])
    (folder / ADDRESS).write_text(format_address(coordinator))
    begun_with = "" if checkpoint else checked.config.init.path
    inputs = [Path(path) for path in (options.emulate, checked.config.data.path, begun_with) if path]
    inputs += [file.path for file in checked.data.files]
    inputs += checked.config.model.source_files
    files = [folder / name for name in ("config.json", "config.py", "plan.json", "run")] + inputs
    files += [checkpoint.folder] if checkpoint else []
    needed = {host: list(files) for host in hosts}
    needed[hosts[0]] += [folder / COORDINATOR_FLAGS, folder / ADDRESS, folder / LAUNCH]
    needed[hosts[0]] += [Path(options.network)] if options.network else []
    needed[hosts[0]].append(authority.coordinator_file(folder / run_dirs.CREDENTIALS))
    start = shell_line("python", "scripts/coordinate.py", f"--flagfile={folder / COORDINATOR_FLAGS}")
    print_line(f"on {hosts[0]}: {start}")
    for offset, (peer, host) in enumerate(zip(peers, hosts, strict=True), start=1):
        own = (host.strip("[]"), port + offset)
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
        _emit_workers(folder, checked.plan.workers, [*of_workers, *emulation], inputs)
    operator = authority.operator_file(folder / run_dirs.CREDENTIALS)
    flags_of_operator = (f"--coordinator={format_address(coordinator)}", f"--credential={operator}")
    where = "" if operator.exists() else f", where {operator.name} is"
    stop = shell_line("python", "scripts/fleet.py", "stop", *flags_of_operator)
    print_line(f"to end the run early{where}: {stop}")


def with_networks(folder: Path, options: Launch) -> Launch:
    """The options with copies of the network files in the folder, for the hosts."""
    copies: dict[str, Path] = {}
    for kind, name in NETWORKS.items():
        if path := getattr(options, kind):
            copies[kind] = folder / name
            copies[kind].write_bytes(Path(path).read_bytes())
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


def checkpoint_of(run_dir: Path, checked: api.LaunchInputs[Launch]) -> Found:
    """The newest checkpoint of an emitted run that has ended. Its parts may be on other hosts, where whoever loads one
    checks it. BadInput if this config cannot continue from it."""
    os.close(run_dirs.hold(run_dir))
    found, lines = api.resumed(run_dir, checked, elsewhere=True)
    for line in lines:
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
    script_main.run(
        main,
        complete=resume_flags.with_flags_of_run,
        help_text=lambda: config_fields.help_text(__doc__ or "", SUBJECTS),
    )
