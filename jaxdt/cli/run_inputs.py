"""The inputs of a run, checked: its config, plan and token file, and what its options emulate. The launcher, from flags
or from Python, and each process of a run get theirs here. Needs no flags, and no jax."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxdt import build
from jaxdt.model.data import TOKENIZER, TokenFile, open_data
from jaxdt.model.mixture import SUFFIX, open_mixture
from jaxdt.model.prepare import EVAL_TEXTS, TRAIN_TEXTS, prepare
from jaxdt.model.tokenizer import (
    OF_FILE,
    TOKENIZER_JSON,
    Tokenizer,
    load_tokenizer,
    name_of_content,
    tokenizer_of_content,
)
from jaxdt.run import config as configs
from jaxdt.run import network as networks
from jaxdt.run import plan as plans
from jaxdt.run.config import MASK, RunConfig
from jaxdt.run.errors import BadInput, shell_line
from jaxdt.run.model import as_fields, options_of
from jaxdt.run.network import Network
from jaxdt.run.options import SECONDS, kept_names, option, require_accepted
from jaxdt.run.plan import Plan
from jaxdt.run.serialize import parse_json
from jaxdt.runtime.run_job import RunInputs
from jaxdt.runtime.storage.model_folder import ORIGIN, open_model
from jaxdt.sim.stragglers import stalls

CORPUS_TOKENS = Path(__file__).resolve().parents[2] / "runs" / "data" / "corpus_bytes.tok"


@dataclass(frozen=True)
class RunOptions:
    """The options that every process of a run has beside the config. Their flags have the same names."""

    plan: Plan | str | Path | None = option(None, "A plan.json; without it the config's plan fields are used.")
    emulate: str | Path | None = option(
        None, "A network.json whose links are emulated inside the transport.", kept=True
    )
    emulate_forward_s: float | None = option(
        None,
        "Emulate a slower device: a forward takes at least so long, a backward twice that; 0, the default, emulates "
        "none.",
        SECONDS,
        kept=True,
    )
    stall: str | None = option(
        None,
        f"Emulate stragglers, {stalls.SYNTAX}: peers pause before the first forward of a step, or each Work.",
        kept=True,
    )


@dataclass(frozen=True)
class ProcessOptions(RunOptions):
    """The options of one process of a run."""

    run_dir: str | None = option(None, "Folder of this run: metrics, summary, trace, checkpoints.")
    run: str = option("local", "Name of the run, equal on all its processes.")
    credential: str | None = option(None, "This process's credential file. Without one: loopback only.")
    token: str | None = option(None, "A token file, for a credential of its own from the coordinator.")
    allow_plaintext: bool = option(False, "Run without a credential outside of loopback.")
    resume_from: str | None = option(None, "Folder of a complete checkpoint to go on from.")
    stop_with_parent: bool = option(False, "End when standard input ends.")


def process_flags(options: RunOptions) -> list[str]:
    """The flags of train.py and coordinate.py with these options. Another names the plan of the job's folder."""
    given = {name: getattr(options, name) for name in kept_names(RunOptions)}
    return [f"--{name}={value}" for name, value in given.items() if value]


def with_options(config: RunConfig, plan: Plan, data: TokenFile, options: RunOptions) -> RunInputs:
    """The inputs of a run of this config and plan, which are checked already."""
    require_accepted(options, "--")
    return RunInputs(
        config,
        plan,
        data,
        network=network_of(str(options.emulate), plan) if options.emulate else None,
        forward_s_min=options.emulate_forward_s or 0.0,
        stalls=stalls.parse(options.stall) if options.stall else None,
    )


def check(fields: Mapping[str, Any], options: RunOptions, source: str = "--config") -> RunInputs:
    """The inputs of a run whose config has these fields. Without a plan the config's plan fields make one, which errors
    name by `source`."""
    if isinstance(options.plan, str | Path) and options.plan:
        source = str(options.plan)
        plan = plans.load(source)
    else:
        plan = options.plan or None
    data = token_file(fields.get("data", {}).get("path", ""))
    begins_with_model = fields.get("init", {}).get("digest")
    if begins_with_model and data.vocab_size > fields["model"]["vocab_size"]:
        has = f"the model of {fields['init']['path']} has {fields['model']['vocab_size']}"
        raise BadInput(
            f"data.path: {data.path} is of a vocabulary of {data.vocab_size} tokens, {has}; expected a text that the "
            "tokenizer of the model has encoded"
        )
    if begins_with_model and data.tokenizer.startswith(OF_FILE):
        _check_tokenizer(data, fields["init"]["path"])
    config = configs.parse(fields, data.vocab_size)
    build.check_config(config)
    plan = configs.with_codec(config, plan or configs.default_plan(config))
    try:
        build.check(config, plan)
    except BadInput as error:
        raise BadInput(f"{source}: {error}") from None
    if config.data.borders == MASK and not data.n_documents:
        raise BadInput(
            f"data.borders: got {MASK}, {data.path} does not say where documents begin; expected a file that "
            "scripts/prepare_data.py made of them, or join"
        )
    data.n_train_windows(config.seq_len)
    if config.train.eval_every_steps:
        data.n_eval_batches(config.train.microbatch_size, config.seq_len)
    return with_options(config, plan, data, options)


def _check_tokenizer(data: TokenFile, model: str) -> None:
    """BadInput if the tokens are of another tokenizer.json than that which came with the model in this folder."""
    origin = Path(model) / ORIGIN / TOKENIZER_JSON
    name = name_of_content(origin.read_bytes()) if origin.is_file() else data.tokenizer
    if name != data.tokenizer:
        command = shell_line("python", "scripts/prepare_data.py", f"--tokenizer={model}")
        found = f"{data.path} is of the tokenizer {data.tokenizer}, the model of {model} has {name}"
        raise BadInput(f"data.path: {found}; expected tokens of that: {command} --train=... --out=...")


def with_model(fields: Mapping[str, Any], folder: str | Path | None, untie: bool) -> Mapping[str, Any]:
    """The fields of a config whose run begins with the model of this folder, in place of their own. The length of
    samples is theirs. A config that names a model already, as that of an earlier run does, keeps it; the folder may be
    another copy."""
    init = fields.get("init", {})
    if not folder:
        if untie:
            raise BadInput("--untie: is for the model of --init_from=DIR, expected both")
        return fields
    model = open_model(Path(folder))
    if init.get("digest"):
        if model.digest != init["digest"]:
            expected = f"expected {init['digest']:.16}, with which the run of this config begins"
            raise BadInput(f"--init_from: {folder} is the model {model.digest:.16}, {expected}")
        return {**fields, "init": {**init, "path": str(folder)}}
    fields = configs.of_today(fields)
    own, data = fields.get("model", {}), fields.get("data", {})
    options = model.options.untied() if untie else model.options
    adapter = {"adapter": own["adapter"]} if own.get("adapter") else {}
    seq_len = data.get("seq_len") or own.get("max_len") or options_of(own.get("preset", "debug")).max_len
    return {
        **fields,
        "model": as_fields(options) | adapter,
        "data": {**data, "seq_len": seq_len},
        "init": {"path": str(folder), "digest": model.digest},
    }


def token_file(path: str) -> TokenFile:
    """The token file of a config, or its mixture; the committed corpus is tokenized on first use."""
    if path.endswith(SUFFIX):
        return open_mixture(path)
    if path:
        return open_data(path)
    CORPUS_TOKENS.parent.mkdir(parents=True, exist_ok=True)
    return prepare(TRAIN_TEXTS, EVAL_TEXTS, "bytes", CORPUS_TOKENS, replaces=True)


def tokenizer_of(data: TokenFile, origin: Path) -> tuple[Tokenizer, set[int]]:
    """The tokenizer of the text of a run, and the tokens that end a text. `origin`: what came with the model with which
    the run began, if it did."""
    ends = set() if data.end_of_text is None else {data.end_of_text}
    if not data.tokenizer.startswith(OF_FILE):
        return load_tokenizer(data.tokenizer), ends
    if content := data.section(TOKENIZER):
        tokenizer = tokenizer_of_content(content, str(data.path))
    elif (origin / TOKENIZER_JSON).exists():
        tokenizer = load_tokenizer(str(origin))
    else:
        raise BadInput(f"{data.path}: is of the tokenizer {data.tokenizer}, expected it in {origin / TOKENIZER_JSON}")
    if tokenizer.name != data.tokenizer:
        raise BadInput(f"{data.path}: is of the tokenizer {data.tokenizer}, the model of the run has {tokenizer.name}")
    for name in ("config.json", "generation_config.json"):
        if (origin / name).exists():
            found = parse_json((origin / name).read_bytes()).get("eos_token_id")
            ends |= set(found if isinstance(found, list) else [found]) - {None}
    return tokenizer, ends


def network_of(path: str, plan: Plan) -> Network:
    """A network from its file; it must have every device of the plan, and links between them."""
    network = networks.load(path)
    network.require_devices(plan.peers, path)
    for src, dst in itertools.permutations(sorted(plan.peers), 2):
        if network.link(src, dst).bandwidth_gbps == 0:
            raise BadInput(f"{path}: bandwidth_gbps[{src}][{dst}]: got 0, expected more between two peers")
    return network
