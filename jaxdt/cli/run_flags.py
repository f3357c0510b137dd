"""The flags that launch.py, train.py and coordinate.py share, and the job that they describe. Needs no jax."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from absl import flags

from jaxdt.cli import config_flag, option_flags, run_inputs, script_main
from jaxdt.cli.run_inputs import RunInputs, RunOptions
from jaxdt.run import config as configs
from jaxdt.run import plan as plans
from jaxdt.run.errors import BadInput
from jaxdt.run.run_folder import ADDRESS
from jaxdt.runtime.net.address import parse_address
from jaxdt.runtime.run_end import ended_run
from jaxdt.runtime.storage.model_folder import check_model_of_run

if TYPE_CHECKING:
    from jaxdt.protocol import events as ev
    from jaxdt.runtime.run_job import RunJob

FLAGS = flags.FLAGS
RUN_DIR = flags.DEFINE_string("run_dir", None, "Folder of this run: metrics, summary, trace, checkpoints.")
CREDENTIAL = flags.DEFINE_string("credential", None, "This process's credential file. Without one: loopback only.")
TOKEN = flags.DEFINE_string("token", None, "A token file, for a credential of its own from the coordinator.")
RUN = flags.DEFINE_string("run", "local", "Name of the run, equal on all its processes.")
PLAINTEXT = flags.DEFINE_bool("allow_plaintext", False, "Run without a credential outside of loopback.")
RESUME = flags.DEFINE_string("resume_from", None, "Folder of a complete checkpoint to go on from.")
STOP_WITH_PARENT = flags.DEFINE_bool("stop_with_parent", False, "End when standard input ends.")
option_flags.define(RunOptions)

run = script_main.run


def required(*names: str) -> None:
    """BadInput if one of these flags was not given."""
    for name in names:
        if name == "config":
            config_flag.config_dict()
        elif getattr(FLAGS, name) is None:
            raise BadInput(missing(name))


def missing(name: str) -> str:
    """The error message for a required flag that was not given."""
    where = "".join(f"; {file} does not give it: is it another script's?" for file in script_main.flag_files(sys.argv))
    return f"--{name}: missing, expected --{name}=..., see --help ({FLAGS[name].help.rstrip('.')}){where}"


def check_run_dir() -> None:
    """BadInput for a --run_dir that is a file."""
    if RUN_DIR.value and Path(RUN_DIR.value).exists() and not Path(RUN_DIR.value).is_dir():
        raise BadInput(f"--run_dir: {RUN_DIR.value} is not a folder, expected one, or a name for a new one")


def inputs() -> RunInputs[RunOptions]:
    """The inputs of a run that the flags describe, checked."""
    return run_inputs.check(config_flag.config_dict().to_dict(), option_flags.read(RunOptions))


def job(coordinator: str | None = None, peer: int | None = None) -> "RunJob":
    """The job that the flags describe; a token, of `peer`, is redeemed at `coordinator`, a host:port."""
    checked = inputs()
    check_run_dir()
    if peer is not None:  # before anything else is done for a peer that lacks the model
        check_model_of_run(checked.config, resumes=bool(RESUME.value))
        checked.config.model.check_source()
    return _job(checked, RUN.value, _credential(coordinator, peer), Path(RESUME.value) if RESUME.value else None)


def _job(inputs: RunInputs[RunOptions], run: str, credential: Path | None, resume: Path | None = None) -> "RunJob":
    from jaxdt.runtime.run_job import RunJob

    return RunJob(
        config=inputs.config,
        plan=inputs.plan,
        data=inputs.data,
        run=run,
        run_dir=_run_dir(),
        credential=credential,
        network=inputs.network,
        resume=resume,
        allow_plaintext=PLAINTEXT.value,
        forward_s_min=inputs.options.emulate_forward_s or 0.0,
        stalls=inputs.stalls,
    )


def check_joinable(coordinator: str) -> None:
    """BadInput for a --run_dir that is a file, or that of a run of this coordinator, a host:port, that has ended."""
    check_run_dir()
    known = _run_dir() / ADDRESS
    if known.exists() and known.read_text().strip() == coordinator and (ended := ended_run(_run_dir())):
        raise BadInput(f"--join: {ended}")


def newcomer(
    coordinator: str, data_path: str, is_worker: bool = False, peer: int | None = None
) -> tuple["RunJob", "ev.Welcome"]:
    """The job of a newcomer, or of a pool's worker, and the answer of the coordinator at `coordinator`, a host:port,
    with its peer id and stage. `data_path` replaces the path of the token file in the run's config. `peer`: the id of a
    worker of the plan."""
    from jaxdt.build import fingerprint, replicas_may_differ
    from jaxdt.runtime.joining import ask_to_join, check_credential

    credential = _credential(coordinator)
    check_credential(credential)
    print(f"asks the coordinator at {coordinator} to join", flush=True)
    welcome = ask_to_join(parse_address("--join", coordinator), credential, PLAINTEXT.value, is_worker, peer)
    if peer not in (None, welcome.peer):
        raise BadInput(f"--peer: got {peer}, expected {welcome.peer}, whose credential {credential} is")
    config = configs.parse(json.loads(welcome.job["config"]))
    plan = plans.parse(welcome.job["plan"], "the run's plan")
    if welcome.peer in plan.peers and not replicas_may_differ(config):
        raise BadInput(f"--join: {credential} is that of peer {welcome.peer} of the plan, expected a newcomer's")
    data = run_inputs.token_file(data_path or config.data.path)
    own_fingerprint = fingerprint(config, plan, data.checksum)
    if own_fingerprint != welcome.fingerprint:
        raise BadInput(f"--data: {data.path}: here is {own_fingerprint}, the run has {welcome.fingerprint}")
    config.model.check_source()
    run_job = _job(run_inputs.with_options(config, plan, data, option_flags.read(RunOptions)), welcome.run, credential)
    return run_job, _placed(coordinator, run_job, welcome)


def ask_again(coordinator: str, job: "RunJob", peer: int) -> "ev.Welcome":
    """Ask the coordinator again for the place of the worker `peer` of this job, which has asked before."""
    from jaxdt.runtime.joining import ask_to_join

    welcome = ask_to_join(parse_address("--join", coordinator), job.credential, job.allow_plaintext, True, peer)
    return _placed(coordinator, job, welcome)


def _placed(coordinator: str, job: "RunJob", welcome: "ev.Welcome") -> "ev.Welcome":
    """The answer with a worker's place, once it has measured its links where it has to."""
    from jaxdt.runtime.joining import ask_to_join, temporary_id
    from jaxdt.runtime.server_links import measured_gbps

    if not welcome.servers:
        return welcome
    gbps = measured_gbps(job, temporary_id(welcome.peer), dict(welcome.servers))
    address = parse_address("--join", coordinator)
    return ask_to_join(address, job.credential, job.allow_plaintext, True, welcome.peer, gbps)


def _run_dir() -> Path:
    if RUN_DIR.value is None:
        raise BadInput(missing("run_dir"))
    return Path(RUN_DIR.value)


def _credential(coordinator: str | None, peer: int | None = None) -> Path | None:
    """The credential of this process, from its file or for its token."""
    if not TOKEN.value:
        return Path(CREDENTIAL.value) if CREDENTIAL.value else None
    if CREDENTIAL.value or coordinator is None:
        raise BadInput("--token: is for a peer that has no --credential yet")
    from jaxdt.runtime.joining import credential_for

    return credential_for(Path(TOKEN.value), parse_address("coordinator", coordinator), peer)
