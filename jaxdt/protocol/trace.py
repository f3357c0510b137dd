"""The trace format of both drivers, one JSON record a line, and the quantities that a trace contains.

run     a Work on a peer's device: peer, t (start), s (duration), work
send    a tensor handed to the link:  peer, to, t, tensor, bytes
recv    a tensor arrived:             peer, from, t, tensor
report  a report of a machine:        peer, t, kind and the report's fields
"""

import dataclasses
import functools
import json
import math
import typing
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeGuard

from jaxdt.protocol import events as ev
from jaxdt.protocol.reports import SCHEMAS, Report
from jaxdt.run.errors import BadInput
from jaxdt.run.serialize import fits, is_object, parse_json
from jaxdt.run.work import Work, is_work, parse_work

TraceRecord = dict[str, Any]  # of one line, as JSON gives it

FIELDS: dict[str, dict[str, type]] = {
    "run": {"s": float, "work": str},
    "send": {"to": int, "tensor": str, "bytes": int},
    "recv": {"from": int, "tensor": str},
    "report": {"kind": str, "fields": dict},
}


class Trace:
    """Records go to `write` as lines; times are rounded to the microsecond. Work and tensors are recorded for `n_steps`
    steps only, from that of the first Work on, reports for all: a trace does not grow with the weeks of a run."""

    def __init__(self, write: Callable[[str], None], n_steps: float = math.inf):
        self._write, self._n_steps = write, n_steps
        self._end = math.inf if n_steps else -math.inf  # the first step that is not recorded; known with the first Work

    def run(self, peer: int, start_s: float, seconds: float, work: Work) -> None:
        assert work.step is not None  # all Work that runs belongs to a step
        if self._end == math.inf:
            self._end = work.step + self._n_steps
        if work.step < self._end:
            self._put({"what": "run", "peer": peer, "t": start_s, "s": seconds, "work": str(work)})

    def send(self, peer: int, now_s: float, dst: int, key: ev.Key | ev.SliceKey | ev.StateKey, n_bytes: int) -> None:
        if step_of(key) < self._end:
            tensor = tensor_name(key)
            self._put({"what": "send", "peer": peer, "to": dst, "t": now_s, "tensor": tensor, "bytes": n_bytes})

    def recv(self, peer: int, now_s: float, src: int, key: ev.Key | ev.SliceKey | ev.StateKey) -> None:
        if step_of(key) < self._end:
            self._put({"what": "recv", "peer": peer, "from": src, "t": now_s, "tensor": tensor_name(key)})

    def report(self, peer: int, now_s: float, report: Report) -> None:
        self._put({"what": "report", "peer": peer, "t": now_s, "kind": report.kind, "fields": report.fields})

    def _put(self, record: TraceRecord) -> None:
        for field in ("t", "s"):
            if field in record:
                record[field] = round(record[field], 6)
        self._write(json.dumps(record, sort_keys=True) + "\n")


def step_of(key: ev.Key | ev.SliceKey | ev.StateKey) -> int:
    """The step that a tensor belongs to; a slice of the state belongs to the step that begins with it."""
    if isinstance(key, ev.StateKey):
        return key.version
    return key.step if isinstance(key, ev.Key) else key.round.number


def tensor_name(key: ev.Key | ev.SliceKey | ev.StateKey) -> str:
    """A tensor's name in a trace, equal on both ends of its link."""
    if isinstance(key, ev.Key):
        return f"{key.step}:{key.kind}{key.stage}.{key.microbatch}"
    if isinstance(key, ev.StateKey):
        return f"{key.version}:{f'part {key.part:.8}' if key.part else 'state'}[{key.lo}:{key.hi}]"
    src = "sum" if key.src is None else f"p{key.src}"
    return f"{key.round.number}:{key.round.vector}[{key.lo}:{key.hi}]{src}"


def read(lines: Iterable[str], source: str = "trace") -> list[TraceRecord]:
    """The records of a trace, in order of time. A last line that a crash cut off is left out. Any other line that is
    not a record raises BadInput, which names `source` and the line."""
    lines = list(lines)
    records: list[TraceRecord] = []
    for number, line in enumerate(lines, start=1):
        try:
            record: Any = parse_json(line)
        except ValueError:
            if number == len(lines):
                break
            record = None
        if not _is_record(record):
            raise BadInput(f"{source}: line {number}: got {line!r:.40}, expected a record of a trace")
        records.append(record)
    return sorted(records, key=lambda record: record["t"])


def _is_record(record: Any) -> TypeGuard[TraceRecord]:
    if not is_object(record) or str(record.get("what")) not in FIELDS:
        return False
    fields = {"t": float, "peer": int} | FIELDS[record["what"]]
    if not all(fits(kind, record.get(name)) for name, kind in fields.items()):
        return False
    if record["what"] == "run":
        return is_work(record["work"])
    return record["what"] != "report" or all(
        fits(kind, record["fields"].get(name)) for name, kind in _types_of_fields(record["kind"]).items()
    )


@functools.cache
def _types_of_fields(report: str) -> dict[str, Any]:
    """The type of each field of a report of this kind. Those of a kind that is not known are not checked, and neither
    are entries of a mapping that stand among the fields."""
    if report not in SCHEMAS:
        return {}
    kinds, without = typing.get_type_hints(SCHEMAS[report]), dataclasses.MISSING
    return {
        field.name: kinds[field.name] if field.default is field.default_factory is without else kinds[field.name] | None
        for field in dataclasses.fields(SCHEMAS[report])
        if not field.metadata
    }


def bytes_per_link(records: Iterable[TraceRecord]) -> dict[tuple[int, int], int]:
    """Payload bytes per directed pair of peers."""
    total: dict[tuple[int, int], int] = {}
    for record in records:
        if record["what"] == "send":
            pair = (record["peer"], record["to"])
            total[pair] = total.get(pair, 0) + record["bytes"]
    return total


def grid(records: Iterable[TraceRecord], step: int) -> str:
    """The Work of one step as text: a row per peer, in the order in which it ran."""
    rows: dict[int, list[str]] = {}
    for record in records:
        if record["what"] == "run" and record["peer"] != ev.COORDINATOR:
            work = parse_work(record["work"])
            if work.step == step:
                cell = str(replace(work, step=None, peer=None))
                rows.setdefault(record["peer"], []).append(cell)
    width = max((len(cell) for cells in rows.values() for cell in cells), default=0)
    return "\n".join(
        f"p{peer:<8}" + "".join(f" {cell:>{width}}" for cell in cells) for peer, cells in sorted(rows.items())
    )
