"""Credentials of a run: who may take part in it, and as what.

    python scripts/tools/credential.py init --folder=DIR [--coordinators=2] [--peers=4]
    python scripts/tools/credential.py token --run_dir=DIR [--out=NAME.token] [--hours=24] [--peer=1]
    python scripts/tools/credential.py list --run_dir=DIR
    python scripts/tools/credential.py revoke --run_dir=DIR --peer=1

`init` makes the root, the operator and the coordinators, and the credentials of peers 0 to N-1; launch.py does that for
each run. `token`, on the coordinator's host, makes a file with which one process comes, once: a newcomer, or --peer of
the plan; it prints the file's name, which is new_1.token, new_2.token and so on in DIR without --out. `list`, also
there, prints who came with a token and who is revoked. `revoke`, with the operator's credential, puts a peer out of a
live run for good.
"""

import itertools
from pathlib import Path

from absl import flags

from jaxdt.cli import operator_flags, script_main
from jaxdt.membership.coordinator_config import load_operator_state
from jaxdt.run.errors import BadInput
from jaxdt.runtime.identity import authority
from jaxdt.runtime.identity.issuer import ISSUED
from jaxdt.runtime.run_dir import CREDENTIALS
from jaxdt.runtime.storage.durable import FileStore

FOLDER = flags.DEFINE_string("folder", None, "With init: a new folder for the credentials.")
COORDINATORS = flags.DEFINE_integer("coordinators", 1, "With init: how many coordinators, standbys included.", 1)
PEERS = flags.DEFINE_integer("peers", 0, "With init: how many credentials of peers.", 0)
OUT = flags.DEFINE_string("out", None, "With token: the file to write; by default a new one in --run_dir.")
HOURS = flags.DEFINE_float("hours", authority.TOKEN_HOURS, "With token: for how long it can be redeemed.")
PEER = flags.DEFINE_integer("peer", None, "With token: the peer of the plan that it is for; with revoke: the peer.", 0)


def init() -> int:
    folder = Path(_required("folder", FOLDER.value))
    authority.create_run(folder, COORDINATORS.value)
    authority.create_missing(folder, range(PEERS.value))
    print("\n".join(str(path) for path in sorted(folder.iterdir())))
    return 0


def token() -> int:
    path = Path(OUT.value) if OUT.value else _free_name(operator_flags.folders().job)
    if path.suffix != ".token":
        raise BadInput(f"--out: got {path}, expected NAME.token")
    authority.create_token(_credentials(), path, PEER.value, HOURS.value)
    print(path)
    return 0


def _free_name(folder: Path) -> Path:
    return next(path for n in itertools.count(1) if not (path := folder / f"new_{n}.token").exists())


def list_issued() -> int:
    folder = operator_flags.folders().run_dir / "coordinator"
    if not folder.is_dir():
        raise BadInput(f"--run_dir: {folder} is not there, expected the folder of a run, on its coordinator's host")
    store = FileStore(folder)
    revoked = load_operator_state({"operator": store.get("operator")}).revoked
    issued = store.get(ISSUED) or []
    for entry in issued:
        mark = "revoked" if entry["peer"] in revoked else "valid"
        print(f"peer {entry['peer']:<8} {mark:<8} issued {entry['issued']}  token {entry['token'][:16]}")
    for peer in sorted(set(revoked) - {entry["peer"] for entry in issued}):
        print(f"peer {peer:<8} revoked")
    if not issued and not revoked:
        print("nobody came with a token, and nobody is revoked")
    return 0


def revoke() -> int:
    print(operator_flags.ask("revoke", _required("peer", PEER.value)))
    return 0


def _credentials() -> Path:
    return operator_flags.folders().job / CREDENTIALS


def _required(name: str, value):
    if value is None:
        raise BadInput(f"--{name}: missing")
    return value


COMMANDS = {"init": init, "token": token, "list": list_issued, "revoke": revoke}


def main(command: str) -> int:
    return COMMANDS[command]()


if __name__ == "__main__":
    script_main.run(main, COMMANDS)
