"""Files of a run's folder that hold no text, as a disk or an editor leaves them, are refused in one line."""

import pytest

from jaxdt.cli import local_run, process_job
from jaxdt.run.errors import BadInput
from jaxdt.run.run_folder import kept_lines
from jaxdt.runtime.run_dir import job_flags
from jaxdt.runtime.storage.durable import disk_id

NO_TEXT = b"\xff\xfe\0"


READERS = {
    "disk_id": disk_id,
    "coordinator_address": lambda run_dir: process_job.check_joinable("127.0.0.1:1", str(run_dir)),
    "run": job_flags,
    "summary.json": local_run.summary,
    "trace.jsonl": lambda run_dir: kept_lines(run_dir / "trace.jsonl"),
}


@pytest.mark.parametrize("name", READERS)
def test_what_is_no_text_is_refused_in_one_line(tmp_path, name):
    (tmp_path / name).write_bytes(NO_TEXT)
    with pytest.raises(BadInput, match="cannot be read") as refused:
        READERS[name](tmp_path)
    assert str(refused.value).startswith(f"{tmp_path / name}: ") and "\n" not in str(refused.value)
