"""Measures what the planner and the simulator go by.

    python scripts/measure.py profile --config=configs/small.py --out=profile.json [--kind=NAME] [--codecs=int8,bf16]
    python scripts/measure.py links --me=I --hosts=HOST:PORT,HOST:PORT,... --credential=C --out=network.json
    python scripts/measure.py links --local=4 --emulate=network.json --out=measured.json

profile  seconds of a layer, embedding, head and codecs on this device; an --out of the same model gains a kind
links    run it on every host with its own --me; host 0 measures all pairs, one at a time, and writes --out. Peers that
         train at the same time share the links: measure before. --local starts so many hosts on this machine.

Exit codes: 0 done, 2 bad input.
"""

import contextlib
import json
import multiprocessing
import os
import socket
from pathlib import Path

from jaxdt.cli import memory_settings

if __name__ == "__main__":
    memory_settings.restart()

from absl import flags  # noqa: E402

from jaxdt.cli import run_flags  # noqa: E402
from jaxdt.spec import codec  # noqa: E402
from jaxdt.spec import network as networks  # noqa: E402
from jaxdt.spec import profile as profiles  # noqa: E402
from jaxdt.spec.errors import BadInput  # noqa: E402

OUT = flags.DEFINE_string("out", None, "File to write.")
KIND = flags.DEFINE_string("kind", "", "profile: name of this kind of device; default is what jax calls it.")
CODECS = flags.DEFINE_list("codecs", ["bf16", "int8", "int8-dynamic"], "profile: codecs to time.")
ROUNDS = flags.DEFINE_integer("rounds", 5, "profile: how often everything is timed.")
CPUS = flags.DEFINE_list("cpus", ["0"], "profile: CPUs to use, as peers do that share a machine.")
ME = flags.DEFINE_integer("me", None, "links: index of this host in --hosts.")
HOSTS = flags.DEFINE_list("hosts", [], "links: host:port of every host.")
NAMES = flags.DEFINE_list("names", [], "links: names of the hosts for network.json.")
TRANSFER_S = flags.DEFINE_float("transfer_s", 1.0, "links: a long transfer takes at least so long.")
LOCAL = flags.DEFINE_integer("local", 0, "links: measure among so many processes of this machine.")


def profile() -> int:
    """Time the parts of the config's model."""
    run_flags.required("config", "out")
    if ROUNDS.value < 1:
        raise BadInput(f"--rounds: got {ROUNDS.value}, expected an integer >= 1")
    check_out()
    for name in CODECS.value:
        codec.parse(name, "--codecs")
    run_flags.set_cpus(CPUS.value)
    import jax

    from jaxdt.runtime import process
    from jaxdt.runtime.calibrate import layer_times

    config, _, data = run_flags.config_and_plan()
    out = Path(OUT.value)
    known = profiles.load(out) if out.exists() else None
    about = {
        "model": config.model,
        "microbatch_size": config.train.microbatch_size,
        "dtype": config.dtype,
        "remat": config.remat,
    }
    for name, value in about.items():
        if known and getattr(known, name) != value:
            raise BadInput(f"{out}: {name}: was measured for another, expected {value}; choose another --out")
    process.set_up_jax(Path("~/.cache/jaxdt").expanduser())
    kind = KIND.value or jax.devices()[0].device_kind
    measured = layer_times.measure_kind(config, data, CODECS.value, ROUNDS.value)
    kinds = (known.kinds if known else {}) | {kind: measured}
    found = profiles.Profile(kinds=kinds, source="measured", **about)
    write(found_json := profiles.to_json(found))
    layer = found_json["kinds"][kind]["layer"]
    print(
        f"{kind}: a layer takes {layer['forward_s'] * 1e3:.2f} ms forward, {layer['backward_s'] * 1e3:.2f} ms backward"
    )
    return 0


def links() -> int:
    """Be one host, or start them all."""
    if not 0 < TRANSFER_S.value <= 10:
        raise BadInput(f"--transfer_s: got {TRANSFER_S.value}, expected seconds in (0, 10]")
    if LOCAL.value:
        return local_links()
    run_flags.required("me")
    from jaxdt.runtime.process import parse_address

    hosts = [parse_address("hosts", host) for host in HOSTS.value]
    if not 0 <= ME.value < len(hosts) or len(hosts) < 2:
        raise BadInput(f"--me: got {ME.value}, expected an index of the {len(hosts)} hosts in --hosts, at least two")
    if ME.value == 0:
        check_out()
    be_host(ME.value, hosts, run_flags.CREDENTIAL.value, TRANSFER_S.value, names(len(hosts)), OUT.value, None)
    return 0


def names(n: int) -> list[str]:
    """Names of the hosts, as they were given or by address."""
    found = NAMES.value or HOSTS.value or [f"device{i}" for i in range(n)]
    if len(found) != n or len(set(found)) != n:
        raise BadInput(f"--names: got {','.join(found)}, expected {n} different names")
    return found


def local_links() -> int:
    """All hosts on this machine, over emulated links if asked for; plaintext, since nothing leaves it."""
    check_out()
    if LOCAL.value < 2:
        raise BadInput(f"--local: got {LOCAL.value}, expected an integer >= 2")
    network = networks.load(run_flags.EMULATE.value) if run_flags.EMULATE.value else None
    if network and network.n_devices < LOCAL.value:
        raise BadInput(f"{run_flags.EMULATE.value}: has {network.n_devices} devices, expected {LOCAL.value}")
    hosts = free_addresses(LOCAL.value)
    given = [device.name for device in network.devices[: LOCAL.value]] if network else names(LOCAL.value)
    context = multiprocessing.get_context("spawn")
    rest = (hosts, None, TRANSFER_S.value, given, OUT.value, network)
    followers = [context.Process(target=be_host, args=(me, *rest), daemon=True) for me in range(1, LOCAL.value)]
    for process in followers:
        process.start()
    be_host(0, *rest)
    for process in followers:
        process.join()
    return 0


def free_addresses(n: int) -> list[tuple[str, int]]:
    """Ports of loopback that nobody uses now."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(n)]
        return [server.getsockname() for server in servers]


def be_host(me, hosts, credential, transfer_s, device_names, out, network) -> None:
    """One host of the measurement, until the leader has ended it."""
    from jaxdt.runtime.calibrate.measure_links import Host
    from jaxdt.runtime.net.credential import load
    from jaxdt.runtime.net.shaper import LinkShape

    def shape(dst: int) -> LinkShape:
        link = network.link(me, dst)
        return LinkShape(link.latency_s, link.bandwidth_gbps)

    loaded = load(Path(credential)) if credential else None
    with Host(me, hosts, loaded, transfer_s, shape if network else None) as host:
        if me == 0:
            write(host.lead(device_names, say), Path(out))
        else:
            host.follow()


def say(src: int, dst: int, link) -> None:
    """One line per link."""
    print(
        f"{src} -> {dst}: {link.latency_s * 1e3:.2f} ms, {link.bandwidth_gbps:.4g} Gb/s, "
        f"short messages {link.short_gbps:.4g} Gb/s",
        flush=True,
    )


def check_out() -> None:
    """BadInput for an --out that cannot be written, before minutes of measuring go into it."""
    run_flags.required("out")
    out = Path(OUT.value)
    if out.is_dir() or not os.access(out.parent, os.W_OK):
        raise BadInput(f"--out: {out} cannot be written, expected a file in a folder that is there")


def write(content: dict, path: Path | None = None) -> None:
    """JSON, whole or not at all."""
    path = path or Path(OUT.value)
    whole = path.with_name(path.name + ".tmp")
    whole.write_text(json.dumps(content, indent=1) + "\n")
    whole.rename(path)
    print(f"wrote {path}", flush=True)


def main(command: str) -> int:
    return {"profile": profile, "links": links}[command]()


if __name__ == "__main__":
    run_flags.run(main, ("profile", "links"))
