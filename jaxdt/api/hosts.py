"""A run on several hosts: the files with which each of its processes is started there (launch.py --emit)."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxdt.api.launch import LaunchInputs, LaunchOptions, coordinator_flags, gpus_per_peer, resumed
from jaxdt.cli import gpu_flags, resume_flags, run_inputs
from jaxdt.protocol.address import is_host, is_loopback
from jaxdt.run.errors import BadInput, shell_line
from jaxdt.run.options import in_range, option
from jaxdt.run.plan import Plan
from jaxdt.run.run_folder import ADDRESS, COORDINATOR_FLAGS, EMITTED_RUN_DIR, LAUNCH
from jaxdt.runtime import run_dir as run_dirs
from jaxdt.runtime.coordinator_folder import last_members
from jaxdt.runtime.identity import authority
from jaxdt.runtime.identity.issuer import ISSUED
from jaxdt.runtime.net.address import Address, check_reachable, format_address
from jaxdt.runtime.storage.checkpoint import Found
from jaxdt.runtime.storage.durable import FileStore
from jaxdt.runtime.storage.parts import part_name

PORT = 7700
NETWORKS = {"emulate": "emulated_network.json", "network": "measured_network.json"}  # beside the flag files

Say = Callable[[str], None]


@dataclass(frozen=True)
class HostOptions(LaunchOptions):
    """The options of a launch on several hosts."""

    hosts: tuple[str, ...] | None = option(
        None, "With --emit: the address of each peer's host, in the order of the peers.", kept=True
    )
    port: int | None = option(
        None,
        f"With --emit: port of the coordinator, on the first host, by default {PORT}; peers get the next ones.",
        in_range(1, 65535),
        kept=True,
    )


@dataclass(frozen=True)
class HostProcess:
    """A process that is started by hand. files: what its host needs for it alone, beside its flag file."""

    script: str
    flag_file: Path
    flags: Sequence[str]
    files: Sequence[Path]

    def write(self) -> str:
        """Write the flag file. Returns the command that starts the process."""
        self.flag_file.write_text("\n".join(self.flags) + "\n")
        return shell_line("python", f"scripts/{self.script}", f"--flagfile={self.flag_file}")


def emit(folder: Path, checked: LaunchInputs[HostOptions], say: Say) -> None:
    """Write coordinator.flags, one host_N.flags per peer and one worker_N.flags per worker of a pool, with the files
    that they name, and say the commands and the files that each host needs. With `resume` they go on from the newest
    checkpoint of the run in this folder."""
    hosts = [*(checked.options.hosts or ())]
    port = checked.options.port or PORT
    check_hosts(checked.plan, hosts, port)
    peers, per_peer, run_dir = sorted(checked.plan.peers), gpus_per_peer(checked), folder / EMITTED_RUN_DIR
    checkpoint = checkpoint_of(run_dir, checked, say) if checked.options.resume else None
    lacking = lacking_parts(run_dir, checkpoint) if checkpoint else []
    if checkpoint:
        drop_redeemed_tokens(folder / run_dirs.CREDENTIALS, run_dir)
    elif replaced := run_dirs.clear(folder, checked.options.overwrite):
        say(replaced)
    run_dirs.write_job(folder, checked.config, checked.plan)
    options = with_networks(folder, replace(checked.options, port=port))
    resume_flags.save(folder, options)
    emulation = run_inputs.process_flags(options)
    resume = [f"--resume_from={checkpoint.folder}"] if checkpoint else []
    shared = [*run_dirs.job_flags(folder), f"--run_dir={run_dir}", *resume, *emulation]
    coordinator = (hosts[0].strip("[]"), port)
    (folder / ADDRESS).write_text(format_address(coordinator))
    credential = authority.coordinator_file(folder / run_dirs.CREDENTIALS)
    own_flags = [*_listen_flags(coordinator), run_dirs.coordinator_credential(folder), *coordinator_flags(options)]
    measured = [Path(options.network)] if options.network else []
    own_files = [folder / ADDRESS, folder / LAUNCH, *measured, credential]
    first = HostProcess("coordinate.py", folder / COORDINATOR_FLAGS, [*shared, *own_flags], own_files)
    processes = [(hosts[0], first)]
    gpus = gpu_flags.flags_of_hosts(dict(zip(peers, hosts, strict=True)), per_peer) if per_peer else {}
    for offset, (peer, host) in enumerate(zip(peers, hosts, strict=True), start=1):
        own = _listen_flags((host.strip("[]"), port + offset))
        own_flags = [f"--peer={peer}", f"--coordinator={format_address(coordinator)}", *own]
        processes.append((host, _peer_process(folder, f"host_{peer}", peer, [*shared, *own_flags], gpus.get(peer, []))))
    begun_with = "" if checkpoint else checked.config.init.path
    inputs = [Path(path) for path in (options.emulate, checked.config.data.path, begun_with) if path]
    inputs += [file.path for file in checked.data.files]
    inputs += checked.config.model.source_files
    for host, process in processes:
        say(f"on {host}: {process.write()}")
    of_all = [folder / name for name in ("config.json", "config.py", "plan.json", "run")] + inputs
    of_all += [checkpoint.folder] if checkpoint else []
    for host in dict.fromkeys(hosts):
        own = [path for where, process in processes if where == host for path in (process.flag_file, *process.files)]
        say(f"{host} needs: {shell_line(*of_all, *own)}")
    for line in lacking:
        say(line)
    of_workers = [f"--join={format_address(coordinator)}", "--as=worker", f"--run_dir={run_dir}", *emulation]
    for worker in checked.plan.workers:  # on any hosts: they ask the coordinator for the job of the run
        process = _peer_process(folder, f"worker_{worker}", worker, [f"--peer={worker}", *of_workers])
        say(f"on any host: {process.write()}")
        say(f"the host of worker {worker} needs: {shell_line(process.flag_file, *process.files, *inputs)}")
    operator = authority.operator_file(folder / run_dirs.CREDENTIALS)
    flags_of_operator = (f"--coordinator={format_address(coordinator)}", f"--credential={operator}")
    where = "" if operator.exists() else f", where {operator.name} is"
    say(f"to end the run early{where}: {shell_line('python', 'scripts/fleet.py', 'stop', *flags_of_operator)}")


def _peer_process(
    folder: Path, name: str, peer: int, flags: Sequence[str], more_flags: Sequence[str] = ()
) -> HostProcess:
    """The process of a peer, or of a pool's worker, which comes with a token."""
    flags = [*flags, run_dirs.token_flag(folder, name, peer), *more_flags]
    return HostProcess("train.py", folder / f"{name}.flags", flags, [run_dirs.token_file(folder, name)])


def check_folder(folder: Path) -> None:
    """BadInput for a folder whose name a flag file, or the flag that names one, does not keep as it is."""
    name = str(folder)
    if not name.isprintable() or name != name.strip() or name.startswith("~"):
        expected = "a name of printable characters without a blank at its ends, or ~ at its beginning"
        raise BadInput(f"--emit: got {name!a}, which a flag file does not keep; expected {expected} (or its full path)")


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


def with_networks(folder: Path, options: HostOptions) -> HostOptions:
    """The options with copies of the network files in the folder, for the hosts."""
    copies: dict[str, Path] = {}
    for kind, name in NETWORKS.items():
        if path := getattr(options, kind):
            copies[kind] = folder / name
            copies[kind].write_bytes(Path(path).read_bytes())
    return replace(options, **copies)


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


def checkpoint_of(run_dir: Path, checked: LaunchInputs[HostOptions], say: Say) -> Found:
    """The newest checkpoint of an emitted run that has ended. Its parts may be on other hosts, where whoever loads one
    checks it. BadInput if this config cannot continue from it."""
    os.close(run_dirs.hold(run_dir))
    found, lines = resumed(run_dir, checked, elsewhere=True)
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
