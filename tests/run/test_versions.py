"""Versions of checkpoints: those up to the next minor one are read, all others are refused in one line."""

import pytest

from jaxdt.run import versions
from jaxdt.run.errors import BadInput
from jaxdt.run.versions import Version, check_checkpoint


@pytest.fixture(autouse=True)
def some_version(monkeypatch):
    monkeypatch.setattr(versions, "CHECKPOINT", Version(2, 5))


@pytest.mark.parametrize("got", ["2.0", "2.5", "2.6"])
def test_checkpoints_up_to_the_next_minor_version_are_read(got):
    check_checkpoint(got, "file")


@pytest.mark.parametrize("got", ["2.7", "1.5", "3.0", "2", "two", "", None, 2.5, "2.²", "-2.5"])
def test_other_checkpoints_are_not(got):
    with pytest.raises(BadInput, match="^file: format: got .*, expected 2.0 to 2.6$"):
        check_checkpoint(got, "file")
