"""The job of one process of a run, train.py or coordinate.py, from its options and its config. Needs no jax."""

import json
from pathlib import Path

from jaxdt.build import fingerprint, replicas_may_differ
from jaxdt.cli import config_flag, run_inputs
from jaxdt.cli.run_inputs import ProcessOptions
from jaxdt.protocol import events as ev
from jaxdt.run import config as configs
from jaxdt.run import plan as plans
from jaxdt.run.errors import BadInput, read_text
from jaxdt.run.run_folder import ADDRESS
from jaxdt.runtime.net.address import parse_address
from jaxdt.runtime.run_end import ended_run
from jaxdt.runtime.run_job import RunInputs, RunJob
from jaxdt.runtime.storage.model_folder import check_model_of_run


def job(options: ProcessOptions, coordinator: str | None = None, peer: int | None = None) -> RunJob:
    """The job of the config that the flags name; a token, of `peer`, is redeemed at `coordinator`, a host:port."""
    checked = config_flag.inputs(options)
    check_run_dir(options.run_dir)
    resume = Path(options.resume_from) if options.resume_from else None
    if peer is not None:  # before anything else is done for a peer that lacks the model
        check_model_of_run(checked.config, resumes=resume is not None)
        checked.config.model.check_source()
    return _job(checked, options, options.run, _credential(options, coordinator, peer), resume)


def _job(
    inputs: RunInputs, options: ProcessOptions, run: str, credential: Path | None, resume: Path | None = None
) -> RunJob:
    return RunJob(
        **vars(inputs),
        run=run,
        run_dir=Path(options.run_dir or ""),
        credential=credential,
        resume=resume,
        allow_plaintext=options.allow_plaintext,
    )


def check_run_dir(run_dir: str | None) -> None:
    """BadInput for a --run_dir that is a file."""
    if run_dir and Path(run_dir).exists() and not Path(run_dir).is_dir():
        raise BadInput(f"--run_dir: {run_dir} is not a folder, expected one, or a name for a new one")


def check_joinable(coordinator: str, run_dir: str) -> None:
    """BadInput for a --run_dir that is a file, or that of a run of this coordinator, a host:port, that has ended."""
    check_run_dir(run_dir)
    known = Path(run_dir) / ADDRESS
    if known.exists() and read_text(known).strip() == coordinator and (ended := ended_run(Path(run_dir))):
        raise BadInput(f"--join: {ended}")


def newcomer(
    options: ProcessOptions, coordinator: str, data_path: str, is_worker: bool = False, peer: int | None = None
) -> tuple[RunJob, ev.Welcome]:
    """The job of a newcomer, or of a pool's worker, and the answer of the coordinator at `coordinator`, a host:port,
    with its peer id and stage. `data_path` replaces the path of the token file in the run's config. `peer`: the id of a
    worker of the plan."""
    from jaxdt.runtime.joining import ask_to_join, check_credential

    credential = _credential(options, coordinator)
    check_credential(credential)
    print(f"asks the coordinator at {coordinator} to join", flush=True)
    welcome = ask_to_join(parse_address("--join", coordinator), credential, options.allow_plaintext, is_worker, peer)
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
    run_job = _job(run_inputs.with_options(config, plan, data, options), options, welcome.run, credential)
    return run_job, _placed(coordinator, run_job, welcome)


def ask_again(coordinator: str, job: RunJob, peer: int) -> ev.Welcome:
    """Ask the coordinator again for the place of the worker `peer` of this job, which has asked before."""
    from jaxdt.runtime.joining import ask_to_join

    welcome = ask_to_join(parse_address("--join", coordinator), job.credential, job.allow_plaintext, True, peer)
    return _placed(coordinator, job, welcome)


def _placed(coordinator: str, job: RunJob, welcome: ev.Welcome) -> ev.Welcome:
    """The answer with a worker's place, once it has measured its links where it has to."""
    from jaxdt.runtime.joining import ask_to_join, temporary_id
    from jaxdt.runtime.server_links import measured_gbps

    if not welcome.servers:
        return welcome
    gbps = measured_gbps(job, temporary_id(welcome.peer), dict(welcome.servers))
    address = parse_address("--join", coordinator)
    return ask_to_join(address, job.credential, job.allow_plaintext, True, welcome.peer, gbps)


def _credential(options: ProcessOptions, coordinator: str | None, peer: int | None = None) -> Path | None:
    """The credential of this process, from its file or for its token."""
    if not options.token:
        return Path(options.credential) if options.credential else None
    if options.credential or coordinator is None:
        raise BadInput("--token: is for a peer that has no --credential yet")
    from jaxdt.runtime.joining import credential_for

    return credential_for(Path(options.token), parse_address("coordinator", coordinator), peer)
