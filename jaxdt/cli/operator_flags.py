"""Flags of the scripts that ask a live run's coordinator for something: the run, its address, the operator's file."""

from pathlib import Path

from absl import flags

from jaxdt.run.errors import BadInput, read_text
from jaxdt.run.run_folder import ADDRESS, RunFolders
from jaxdt.runtime.coordinator_client import CoordinatorAway, OperatorRefused, ask_as_operator
from jaxdt.runtime.identity import authority
from jaxdt.runtime.identity.credential import load
from jaxdt.runtime.net.address import format_address, parse_address
from jaxdt.runtime.run_dir import CREDENTIALS, live_holder
from jaxdt.runtime.run_end import ended_run

RUN_DIR = flags.DEFINE_string(
    "run_dir",
    None,
    "Folder of the run, or that of launch.py --emit, for its coordinator's address and its credentials.",
)
COORDINATOR = flags.DEFINE_string("coordinator", None, "host:port of the coordinator, if not that in --run_dir.")
CREDENTIAL = flags.DEFINE_string("credential", None, "The operator's credential file, if not that in --run_dir.")
PLAINTEXT = flags.DEFINE_bool("allow_plaintext", False, "Ask without a credential, as the run has none.")
PATIENCE_S = 1.0  # an operator can ask again


def folders() -> RunFolders:
    """The folders of the run that --run_dir names; BadInput without one."""
    if RUN_DIR.value is None:
        raise BadInput("--run_dir: missing, expected the folder of the run, such as --run_dir=runs/x")
    if not Path(RUN_DIR.value).is_dir():
        raise BadInput(f"--run_dir: {RUN_DIR.value} is no folder, expected that of a run")
    return RunFolders.of(Path(RUN_DIR.value))


def ask(command: str, peer: int | None = None) -> str:
    """The coordinator's answer to an operator's request; BadInput if it refuses."""
    address = parse_address("--coordinator", COORDINATOR.value or _known_address())
    path = Path(CREDENTIAL.value) if CREDENTIAL.value else authority.operator_file(folders().job / CREDENTIALS)
    credential = None if PLAINTEXT.value else load(path)
    patience_s = 0.0 if _known_end() else PATIENCE_S
    try:
        return ask_as_operator(command, address, credential, peer, PLAINTEXT.value, patience_s)
    except OperatorRefused:
        raise
    except BadInput as error:
        if ended := _known_end():
            raise BadInput(f"{command}: {ended}") from None
        is_here = RUN_DIR.value and not COORDINATOR.value
        if isinstance(error, CoordinatorAway) and is_here and (pid := live_holder(folders().run_dir)):
            again = f"but the run is under way (process {pid}), and launch.py restarts a coordinator that has died"
            raise BadInput(f"{command}: no answer from {format_address(address)}, {again}: ask again") from None
        raise


def _known_end() -> str:
    """ended_run of --run_dir; '' where that does not say which coordinator to ask."""
    return ended_run(folders().run_dir) if RUN_DIR.value and not COORDINATOR.value else ""


def _known_address() -> str:
    found = folders()
    for file in (found.run_dir / ADDRESS, found.job / ADDRESS):
        if file.exists():
            return read_text(file).strip()
    raise BadInput(
        f"--coordinator: missing, and {found.run_dir / ADDRESS} is not there (a coordinator writes it at its start); "
        "expected HOST:PORT, and --credential=operator.pem, the file of the run"
    )
