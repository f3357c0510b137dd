"""Measure the inputs of the planner and the simulator: seconds of the parts of a model, and links between hosts.

    python scripts/measure.py profile --config=configs/small.py --out=profile.json [--kind=NAME] [--codecs=int8,bf16]
    python scripts/measure.py links --me=I --hosts=HOST:PORT,HOST:PORT,... --credential=C --out=network.json
    python scripts/measure.py links --local=4 --emulate=network.json --out=measured.json

profile  seconds of a layer, embedding, head and codecs on this device. If --out has a profile of the same model, this
         kind of device is added to it.
links    is run on every host with its own --me. Host 0 measures all pairs, one at a time, and writes --out. Measure
         before training: peers that train at the same time share the links. --local starts so many hosts on this
         machine.

Exit codes: 0 done, 2 bad input.
"""

import check_installed  # noqa: F401

# isort: split
import contextlib
import json
import multiprocessing
import socket
from dataclasses import replace
from pathlib import Path

from absl import flags

from jaxdt.cli import config_flag, environment, option_flags, script_main
from jaxdt.cli.run_inputs import ProcessOptions, RunOptions
from jaxdt.run import codec
from jaxdt.run import network as networks
from jaxdt.run import profile as profiles
from jaxdt.run.cpus import allowed_cpus
from jaxdt.run.errors import BadInput, require_writable
from jaxdt.run.network import Network
from jaxdt.runtime.compute_environment import set_cpus
from jaxdt.runtime.storage.durable import write_durably

option_flags.define(ProcessOptions, "emulate", "credential")
OUT = flags.DEFINE_string("out", None, "File to write.")
KIND = flags.DEFINE_string("kind", "", "profile: name of this kind of device; by default its name in jax.")
CODECS = flags.DEFINE_list("codecs", ["bf16", "int8", "int8-dynamic"], "profile: codecs to time.")
ROUNDS = flags.DEFINE_integer("rounds", 5, "profile: how many times each part is timed.")
CPUS = flags.DEFINE_list("cpus", None, "profile: numbers of the CPUs to use; by default the first of its mask.")
ME = flags.DEFINE_integer("me", None, "links: index of this host in --hosts.")
HOSTS = flags.DEFINE_list("hosts", [], "links: host:port of every host.")
NAMES = flags.DEFINE_list("names", [], "links: names of the hosts for network.json.")
TRANSFER_S = flags.DEFINE_float("transfer_s", 1.0, "links: shortest duration of a long transfer.")
REPEATS = flags.DEFINE_integer(
    "repeats", 1, "links: rounds in which all links are measured; from 3 on, --out has percentiles of bandwidths.", 1
)
LOCAL = flags.DEFINE_integer("local", 0, "links: number of processes of this machine among which to measure.")


def profile() -> int:
    """Time the parts of the config's model and write them to --out."""
    config_flag.config_dict()  # it is missing before --out is
    if ROUNDS.value < 1:
        raise BadInput(f"--rounds: got {ROUNDS.value}, expected an integer >= 1")
    check_out()
    for name in CODECS.value:
        codec.parse(name, "--codecs")
    set_cpus(CPUS.value or [str(allowed_cpus()[0])])
    import jax

    from jaxdt.runtime import jax_setup
    from jaxdt.runtime.calibrate import layer_times

    inputs = config_flag.inputs(RunOptions())
    config, data = inputs.config, inputs.data
    out = Path(OUT.value)
    earlier = profiles.load(out) if out.exists() else None
    measured_for = {
        "model": config.model,
        "microbatch_size": config.train.microbatch_size,
        "dtype": config.dtype,
        "remat": config.remat,
        "seq_len": config.seq_len,
    }
    if earlier:
        earlier = replace(earlier, seq_len=earlier.microbatch_shape.seq_len)
    for name, value in measured_for.items():
        if earlier and getattr(earlier, name) != value:
            raise BadInput(f"{out}: {name}: was measured for another, expected {value}; choose another --out")
    jax_setup.set_up_jax(Path("~/.cache/jaxdt").expanduser())
    kind = KIND.value or jax.devices()[0].device_kind
    measured = layer_times.measure_kind(config, data, CODECS.value, ROUNDS.value)
    kinds = (earlier.kinds if earlier else {}) | {kind: measured}
    profile_json = profiles.to_json(profiles.Profile(kinds=kinds, source="measured", **measured_for))
    write(profile_json, out)
    layer = profile_json["kinds"][kind]["layer"]
    forward_ms, backward_ms = layer["forward_s"] * 1e3, layer["backward_s"] * 1e3
    print(f"{kind}: a layer takes {forward_ms:.2f} ms forward, {backward_ms:.2f} ms backward")
    return 0


def links() -> int:
    """Be one host of the measurement, or with --local start all of them on this machine."""
    if not 0 < TRANSFER_S.value <= 10:
        raise BadInput(f"--transfer_s: got {TRANSFER_S.value}, expected seconds in (0, 10]")
    if LOCAL.value:
        return local_links()
    script_main.required("me")
    from jaxdt.runtime.net.address import check_reachable, parse_address

    hosts = [parse_address("--hosts", host) for host in HOSTS.value]
    check_reachable("--hosts", [host for host, _ in hosts])
    if not 0 <= ME.value < len(hosts) or len(hosts) < 2:
        raise BadInput(f"--me: got {ME.value}, expected an index of the {len(hosts)} hosts in --hosts, at least two")
    if ME.value == 0:
        check_out()
    be_host(ME.value, hosts, names(len(hosts)), flags.FLAGS.credential, **host_options())
    return 0


def host_options() -> dict:
    return {"transfer_s": TRANSFER_S.value, "out": OUT.value, "n_rounds": REPEATS.value}


def names(n: int) -> list[str]:
    """Names of the hosts: those of --names, else their addresses."""
    chosen = NAMES.value or HOSTS.value or [f"device{i}" for i in range(n)]
    if len(chosen) != n or len(set(chosen)) != n:
        raise BadInput(f"--names: got {','.join(chosen)}, expected {n} different names")
    return chosen


def local_links() -> int:
    """Measure among processes of this machine, over emulated links with --emulate. Nothing leaves the machine, so the
    connections are plaintext."""
    check_out()
    if LOCAL.value < 2:
        raise BadInput(f"--local: got {LOCAL.value}, expected an integer >= 2")
    network = networks.load(flags.FLAGS.emulate) if flags.FLAGS.emulate else None
    if network and network.n_devices < LOCAL.value:
        raise BadInput(f"{flags.FLAGS.emulate}: has {network.n_devices} devices, expected {LOCAL.value}")
    device_names = [device.name for device in network.devices[: LOCAL.value]] if network else names(LOCAL.value)
    addresses = free_addresses(LOCAL.value)
    context, options = multiprocessing.get_context("spawn"), host_options() | {"network": network}
    followers = [
        context.Process(target=be_host, args=(me, addresses, device_names), kwargs=options, daemon=True)
        for me in range(1, LOCAL.value)
    ]
    for process in followers:
        process.start()
    be_host(0, addresses, device_names, **options)
    for process in followers:
        process.join()
    return 0


def free_addresses(n: int) -> list[tuple[str, int]]:
    """Loopback addresses with n different free ports."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(n)]
        return [server.getsockname() for server in servers]


def be_host(
    me: int,
    hosts: list[tuple[str, int]],
    names: list[str],
    credential: str | None = None,
    network: Network | None = None,
    **options,
) -> None:
    """Take part in the measurement as host `me`, until host 0 ends it. Host 0 writes the network, in which the hosts
    have these names. `network` is emulated, if it is not None. `options`: of the measurement, equal on all hosts."""
    from jaxdt.runtime.calibrate.measure_links import MeasuringHost
    from jaxdt.runtime.identity.credential import load
    from jaxdt.runtime.net.shaper import LinkShape

    def shape(dst: int) -> LinkShape | None:
        if network is None:
            return None
        link = network.link(me, dst)
        return LinkShape(link.latency_s, link.bandwidth_gbps)

    loaded = load(Path(credential)) if credential else None
    with MeasuringHost(me, hosts, loaded, options["transfer_s"], shape) as host:
        if me == 0:
            write(host.lead(names, print_link, options["n_rounds"]), Path(options["out"]))
        else:
            host.follow()


def print_link(src: int, dst: int, link) -> None:
    """Print one line about a measured link (measure_links.LinkFound)."""
    print(
        f"{src} -> {dst}: {link.latency_s * 1e3:.2f} ms, {link.bandwidth_gbps:.4g} Gb/s, "
        f"short messages {link.short_gbps:.4g} Gb/s",
        flush=True,
    )


def check_out() -> None:
    """BadInput for an --out that cannot be written, before minutes of measuring are lost."""
    require_writable("--out", script_main.required("out"))


def write(content: dict, path: Path) -> None:
    write_durably(path, (json.dumps(content, indent=1) + "\n").encode())
    print(f"wrote {path}", flush=True)


COMMANDS = {"profile": profile, "links": links}


def main(command: str) -> int:
    return COMMANDS[command]()


if __name__ == "__main__":
    environment.restart_with_malloc_settings()
    script_main.run(main, COMMANDS)
