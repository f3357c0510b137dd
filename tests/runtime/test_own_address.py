"""Where the processes of a run listen, and where others reach them: flags, flag files, and the loop's connections."""

import subprocess
import sys
from pathlib import Path

from jaxdt.protocol import events as ev
from jaxdt.protocol.trace import Trace
from jaxdt.runtime.loop import Loop

ROOT = Path(__file__).resolve().parents[2]


class ConnectsTo:
    """A machine that connects to peer 5 at one address, and stops when that is refused."""

    def __init__(self, address):
        self.address = address

    def handle(self, now_s, event):
        if isinstance(event, ev.Started):
            return [ev.Connect(5, self.address)]
        return [ev.Stop(0, event.reason)] if isinstance(event, ev.Refused) and event.peer == 5 else []


def test_a_peer_that_gives_a_bad_address_ends_no_other_process():
    for address in ("0.0.0.0:7", "10.0.0.1:7", "host", "host:port", "[::1"):
        loop = Loop(0, ConnectsTo(address), Trace(lambda line: None, 0), lambda report: None)
        loop.open_transport("run")
        stop = loop.run("127.0.0.1:1")
        assert isinstance(stop, ev.Stop) and stop.reason.startswith("peer 5: got "), stop


def test_flag_files_listen_everywhere_and_advertise_the_host(tmp_path):
    command = [sys.executable, str(ROOT / "scripts/launch.py"), f"--config={ROOT / 'configs/two_hosts.py'}"]
    subprocess.run([*command, f"--emit={tmp_path}", "--hosts=gpu7.example,[2001:db8::7]"], check=True, timeout=90)
    flags = {path.stem: path.read_text().splitlines() for path in tmp_path.glob("*.flags")}
    assert {"--listen=0.0.0.0:7700", "--advertise=gpu7.example:7700"} <= set(flags["coordinator"])
    assert {"--listen=0.0.0.0:7701", "--coordinator=gpu7.example:7700"} <= set(flags["host_0"])
    assert {"--listen=[::]:7702", "--advertise=[2001:db8::7]:7702"} <= set(flags["host_1"])
    assert (tmp_path / "coordinator_address").read_text() == "gpu7.example:7700"
