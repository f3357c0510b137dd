"""`python -m planner network`: write a network.json, from a seed or from measurements."""

import csv
import json
import math
from argparse import Namespace
from pathlib import Path

from jaxdt.run.errors import BadInput, require_writable
from jaxdt.run.network import Device, Network, to_json
from planner.model.generate import generate
from planner.report.plan_file import write_text

COLUMNS = ("src", "dst", "latency_ms", "bandwidth_gbps")


def from_csv(path: str) -> Network:
    """A network from the links of a CSV file. A pair measured in one direction counts for both; a pair never measured
    has no link. A device named REGION/NAME belongs to that region."""
    links = dict(_rows(path))
    names = list(dict.fromkeys(name for pair in links for name in pair))
    if len(names) < 2:
        raise BadInput(f"{path}: got {len(names)} devices, expected links between at least two")
    pairs = [[links.get((a, b)) or links.get((b, a)) or (0.0, 0.0) for b in names] for a in names]
    devices = tuple(Device(name, name.split("/")[0] if "/" in name else "") for name in names)
    latency_s = tuple(tuple(pair[0] / 1e3 for pair in row) for row in pairs)
    bandwidth_gbps = tuple(tuple(pair[1] for pair in row) for row in pairs)
    return Network(devices, latency_s, bandwidth_gbps, Path(path).stem)


def _rows(path: str):
    """Yield ((src, dst), (latency_ms, bandwidth_gbps)) for every line."""
    try:
        with open(path, newline="") as file:
            lines = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{path}: cannot be read ({error})") from None
    seen = set()
    for number, line in enumerate(lines, start=2):
        missing = [column for column in COLUMNS if not line.get(column)]
        if missing:
            raise BadInput(f"{path}:{number}: {', '.join(missing)}: missing, expected columns {','.join(COLUMNS)}")
        pair = line["src"].strip(), line["dst"].strip()
        if pair in seen or pair[0] == pair[1]:
            raise BadInput(f"{path}:{number}: link {pair[0]} -> {pair[1]}: expected two devices, and each link once")
        seen.add(pair)
        yield pair, (_number(line, "latency_ms", path, number), _number(line, "bandwidth_gbps", path, number))


def _number(line: dict, column: str, path: str, number: int) -> float:
    try:
        value = float(line[column])
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise BadInput(f"{path}:{number}: {column}: got {line[column]!r}, expected a finite number >= 0")
    return value


def run(flags: Namespace) -> int:
    require_writable("--out", flags.out)
    network = from_csv(flags.csv) if flags.source == "import" else generate(flags.kind, flags.devices, flags.seed)
    write_text(flags.out, json.dumps(to_json(network)) + "\n")
    print(f"wrote {flags.out}: {network.n_devices} devices")
    return 0
