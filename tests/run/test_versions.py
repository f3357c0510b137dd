"""Versions of the protocol and of checkpoints: neighbours understand each other, all others are told so in one line."""

import pytest

from jaxdt.run import versions
from jaxdt.run.errors import BadInput
from jaxdt.run.versions import Version, check_checkpoint, check_protocol


@pytest.fixture(autouse=True)
def some_version(monkeypatch):
    monkeypatch.setattr(versions, "PROTOCOL", Version(3, 4))
    monkeypatch.setattr(versions, "CHECKPOINT", Version(2, 5))


@pytest.mark.parametrize("minor", [3, 4, 5])
def test_neighbouring_minor_versions_may_talk(minor):
    check_protocol(Version(3, minor))


@pytest.mark.parametrize("got", [Version(3, 2), Version(3, 6), Version(2, 4), Version(4, 0)])
def test_other_versions_are_refused(got):
    with pytest.raises(BadInput, match=f"^protocol version: got {got}, expected 3.3 to 3.5$"):
        check_protocol(got)


@pytest.mark.parametrize("got", ["2.0", "2.5", "2.6"])
def test_checkpoints_up_to_the_next_minor_version_are_read(got):
    check_checkpoint(got, "file")


@pytest.mark.parametrize("got", ["2.7", "1.5", "3.0", "2", "two", "", None, 2.5, "2.²", "-2.5"])
def test_other_checkpoints_are_not(got):
    with pytest.raises(BadInput, match="^file: format: got .*, expected 2.0 to 2.6$"):
        check_checkpoint(got, "file")
