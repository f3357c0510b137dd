"""The flags that launch.py, train.py and coordinate.py share, and the job that they describe."""

import contextlib
import itertools
import os
import sys
import traceback
from collections.abc import Callable, Collection
from pathlib import Path

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from jaxdt.core import config as configs
from jaxdt.core import network as networks
from jaxdt.core import plan as plans
from jaxdt.core.errors import BadInput
from jaxdt.model.data import TokenFile, open_data
from jaxdt.model.prepare import EVAL_TEXTS, TRAIN_TEXTS, prepare
from jaxdt.runtime.durable import refusal

FLAGS = flags.FLAGS
CONFIG = config_flags.DEFINE_config_file("config", None, "A configs/*.py file; --config.FIELD=VALUE changes a field.")
RUN_DIR = flags.DEFINE_string("run_dir", None, "Folder of this run: metrics, summary, trace, checkpoints.")
PLAN = flags.DEFINE_string("plan", None, "A plan.json; without it the config's plan fields are used.")
CREDENTIAL = flags.DEFINE_string("credential", None, "The run's credential file. Without one: loopback only.")
EMULATE = flags.DEFINE_string("emulate", None, "A network.json whose links are emulated inside the transport.")
RUN = flags.DEFINE_string("run", "local", "Name of the run, equal on all its processes.")
PLAINTEXT = flags.DEFINE_bool("allow_plaintext", False, "Run without a credential outside of loopback.")
RESUME = flags.DEFINE_string("resume_from", None, "Folder of a complete checkpoint to go on from.")
STOP_WITH_PARENT = flags.DEFINE_bool("stop_with_parent", False, "End when standard input ends.")

CORPUS_TOKENS = Path(__file__).resolve().parent.parent / "runs" / "data" / "corpus_bytes.tok"


def required(*names: str) -> None:
    """BadInput for a flag that was not given."""
    for name in names:
        if getattr(FLAGS, name) is None:
            raise BadInput(f"--{name}: missing")


def config_and_plan() -> tuple[configs.RunConfig, plans.Plan, TokenFile]:
    """The checked config and plan of the flags, and the open token file."""
    try:
        config_dict = CONFIG.value
    except OSError as error:
        raise BadInput(f"--config: {str(error).strip().splitlines()[-1].strip()}") from None
    if not isinstance(config_dict, ConfigDict):
        got = "missing" if FLAGS["config"].using_default_value else f"get_config() returned {config_dict!r:.40}"
        raise BadInput(f"--config: {got}, expected a file whose get_config() returns a ConfigDict")
    fields = config_dict.to_dict()
    data = token_file(fields.get("data", {}).get("path", ""))
    config = configs.parse(fields, data.vocab_size)
    plan = plans.load(PLAN.value) if PLAN.value else configs.default_plan(config)
    plan = configs.with_codec(config, plan)
    try:
        configs.check_plan(config, plan)
    except BadInput as error:
        raise BadInput(f"{PLAN.value or '--config'}: {error}") from None
    data.n_train_windows(config.model.seq_len)
    if config.train.eval_every_steps:
        data.n_eval_batches(config.train.microbatch_size, config.model.seq_len)
    if config.train.eval_every_steps:
        data.n_eval_batches(config.train.microbatch_size, config.model.seq_len)
    return config, plan, data


def token_file(path: str) -> TokenFile:
    """The token file of a config; the committed corpus is tokenized on first use."""
    if path:
        return open_data(path)
    CORPUS_TOKENS.parent.mkdir(parents=True, exist_ok=True)
    return prepare(TRAIN_TEXTS, EVAL_TEXTS, "bytes", CORPUS_TOKENS)


def emulated(plan: plans.Plan) -> networks.Network | None:
    """The network to emulate."""
    return None if EMULATE.value is None else network_of(EMULATE.value, plan)


def network_of(path: str, plan: plans.Plan) -> networks.Network:
    """A network from its file; it must have every device of the plan, and links between them."""
    network = networks.load(path)
    if max(plan.peers) >= network.n_devices:
        raise BadInput(f"{path}: has {network.n_devices} devices, the plan uses device {max(plan.peers)}")
    for src, dst in itertools.permutations(sorted(plan.peers), 2):
        if network.link(src, dst).bandwidth_gbps == 0:
            raise BadInput(f"{path}: bandwidth_gbps[{src}][{dst}]: got 0, expected more between two peers")
    return network


def job():
    """The process.Job of the flags; imports jax, so whatever jax reads from the environment must be set before."""
    from jaxdt.runtime.process import Job

    config, plan, data = config_and_plan()
    credential = Path(CREDENTIAL.value) if CREDENTIAL.value else None
    return Job(
        config=config,
        plan=plan,
        data=data,
        run=RUN.value,
        run_dir=Path(RUN_DIR.value),
        credential=credential,
        network=emulated(plan),
        resume=Path(RESUME.value) if RESUME.value else None,
        allow_plaintext=PLAINTEXT.value,
    )


def set_cpus(cpus: list[str]) -> None:
    """Confine this process to some CPUs, where the system can; before jax is imported, which counts them."""
    if not cpus:
        return
    if not all(cpu.isdigit() for cpu in cpus):
        raise BadInput(f"--cpus: got {','.join(cpus)}, expected numbers separated by commas")
    if hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, {int(cpu) for cpu in cpus})
        except OSError:
            raise BadInput(f"--cpus: got {','.join(cpus)}, this machine has 0..{(os.cpu_count() or 1) - 1}") from None
    if len(cpus) == 1:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()


def run(main: Callable[..., int], commands: Collection[str] = ()) -> None:
    """Run a script: bad input is one line on standard error and exit code 2. With `commands`, main is given the one
    that stands on the command line."""

    def guarded(argv: list[str]):
        logging.set_verbosity(logging.FATAL)  # Orbax tells a story per checkpoint, and what is wrong we say
        try:
            words = argv[1:]
            if commands and (len(words) != 1 or words[0] not in commands):
                raise BadInput(f"command: got {' '.join(words) or 'none'}, expected one of {', '.join(commands)}")
            if words and not commands:
                raise BadInput(f"argument: got {words[0]!r}, expected flags only")
            sys.exit(main(*words))
        except BadInput as error:
            _refuse(str(error))
        except OSError as error:  # a disk that is full or a folder that may not be written
            if not (reason := refusal(error, RUN_DIR.value or "disk")):
                raise
            _refuse(reason)

    app.run(guarded, flags_parser=_parse)


def _refuse(reason: str) -> None:
    with contextlib.suppress(OSError):  # the log may be on the disk that is full
        sys.stdout.flush()
        print(reason, file=sys.stderr, flush=True)
    os._exit(2)  # another thread may be inside XLA, where the interpreter's own exit would abort it


def _parse(argv: list[str]) -> list[str]:
    """The words that are no flags; a flag that is wrong is one line and exit code 2, like all bad input."""
    logging.get_absl_logger().setLevel("ERROR")  # what a config file makes the flags' own library say, we say
    try:
        app.define_help_flags()
        return FLAGS(argv)
    except (flags.Error, KeyError, AttributeError, OSError) as error:
        unknown = isinstance(error, KeyError | AttributeError)  # what ml_collections raises for --config.NO_SUCH_FIELD
        while error.args and isinstance(error.args[0], Exception):
            error = error.args[0]
        reason = " ".join(str(error.args[-1] if error.args else error).split())
        if "has no attribute 'get_config'" in reason:
            _refuse("--config: the file has no function get_config(), expected one that returns a ConfigDict")
        _refuse(f"--config: unknown field {reason}" if unknown else reason)
    except Exception as error:  # a config file is a program, which may raise anything
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{at.filename}:{at.lineno}"
        if isinstance(error, SyntaxError):
            file = next((word.partition("=")[2] for word in argv if word.startswith("--config=")), "")
            where = f"{error.filename or file}:{error.lineno or 1}"
        _refuse(f"--config: {where}: {type(error).__name__}: {' '.join(str(error).split())}")
