"""The results file of the ablation: one JSON line per finished run, so that an interrupted grid can be continued."""

import hashlib
import json
from pathlib import Path

from experiments.ablation.grid import Case

from jaxdt.run import serialize
from jaxdt.run.config import RunConfig
from jaxdt.run.errors import BadInput
from jaxdt.run.model import recorded


def fingerprint(config: RunConfig, data_checksum: str) -> str:
    """16 hex digits that are equal for configs whose runs may stand in one table. Method and seed do not count: the
    case has them."""
    train = {name: value for name, value in serialize.write(config.train).items() if name != "seed"}
    parts = [
        recorded(config.model),
        train,
        serialize.write(config.optim),
        config.plan.microbatches,
        config.seq_len,
        config.dtype,
    ]
    return hashlib.sha256(json.dumps([*parts, data_checksum], sort_keys=True).encode()).hexdigest()[:16]


def load(path: Path, mark: str) -> dict[Case, dict]:
    """The records of the finished runs, without an incomplete last line. BadInput for a run with another fingerprint
    than `mark`."""
    records: dict[Case, dict] = {}
    text = path.read_bytes() if path.exists() else b""
    for number, line in enumerate(text[: text.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            record = serialize.parse_json(line)
            case = Case(**record["case"])
        except (ValueError, KeyError, TypeError):
            raise BadInput(f"{path}:{number}: got no result, expected a JSON object with a case") from None
        if record.get("config") != mark:
            raise BadInput(
                f"{path}:{number}: made with config {record.get('config')}, this one is {mark}; "
                "expected another --run_dir or the same config"
            )
        records[case] = record
    return records
