"""The inputs of a run, checked: its config, plan and token file, and networks that fit the plan. Needs no flags, and no
jax."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxdt import build
from jaxdt.model.data import TokenFile, open_data
from jaxdt.model.prepare import EVAL_TEXTS, TRAIN_TEXTS, prepare
from jaxdt.run import config as configs
from jaxdt.run import network as networks
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput
from jaxdt.run.network import Network
from jaxdt.run.plan import Plan

CORPUS_TOKENS = Path(__file__).resolve().parents[2] / "runs" / "data" / "corpus_bytes.tok"


def config_and_plan(fields: Mapping[str, Any], plan: Plan | None, source: str) -> tuple[RunConfig, Plan, TokenFile]:
    """The config that these fields describe and its plan, both checked, and the open token file. Without a plan the
    config's plan fields make one. `source` names the plan in errors."""
    data = token_file(fields.get("data", {}).get("path", ""))
    config = configs.parse(fields, data.vocab_size)
    build.check_config(config)
    plan = configs.with_codec(config, plan or configs.default_plan(config))
    try:
        build.check(config, plan)
    except BadInput as error:
        raise BadInput(f"{source}: {error}") from None
    data.n_train_windows(config.seq_len)
    if config.train.eval_every_steps:
        data.n_eval_batches(config.train.microbatch_size, config.seq_len)
    return config, plan, data


def token_file(path: str) -> TokenFile:
    """The token file of a config; the committed corpus is tokenized on first use."""
    if path:
        return open_data(path)
    CORPUS_TOKENS.parent.mkdir(parents=True, exist_ok=True)
    return prepare(TRAIN_TEXTS, EVAL_TEXTS, "bytes", CORPUS_TOKENS, replaces=True)


def network_of(path: str, plan: Plan) -> Network:
    """A network from its file; it must have every device of the plan, and links between them."""
    network = networks.load(path)
    if max(plan.peers) >= network.n_devices:
        raise BadInput(f"{path}: has {network.n_devices} devices, the plan uses device {max(plan.peers)}")
    for src, dst in itertools.permutations(sorted(plan.peers), 2):
        if network.link(src, dst).bandwidth_gbps == 0:
            raise BadInput(f"{path}: bandwidth_gbps[{src}][{dst}]: got 0, expected more between two peers")
    return network
