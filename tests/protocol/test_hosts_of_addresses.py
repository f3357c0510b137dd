import pytest

from jaxdt.protocol.address import is_host, is_loopback, why_undialable, why_unreachable


@pytest.mark.parametrize(
    "host", ["10.0.0.1", "2001:db8::7", "box", "box_1.example.", "gpu-7.example", "b\u00fcro.example", "1.example"]
)
def test_hosts_that_others_may_reach(host):
    assert is_host(host) and not why_unreachable(host)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "box:7700",
        "me@box",
        "10.0.0.1/24",
        "10.0.0.256",
        "10.1",
        "0x7f000001",
        "0x7f.0x1",
        "127.0.0.0x1",
        "0X7F000001",
        "0177.0.0.1",
        "2130706433",
        "\uff11\uff12\uff17.0.0.1",
        "127\u30020\u30020\u30021",
        "7",
        "b ox",
        "-box",
        "a..b",
        "http://box",
        "a" * 64,
    ],
)
def test_texts_that_are_no_host(host):
    assert not is_host(host) and why_unreachable(host)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "127.8.9.1",
        "::1",
        "::ffff:127.0.0.1",
        "localhost",
        "A.LocalHost.",
        "\uff4cocalhost",
        "a\u3002localhost",
        "ⓛocalhost.",
    ],
)
def test_loopback(host):
    assert is_host(host) and is_loopback(host) and "loopback" in why_unreachable(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0.1.2.3", "224.0.0.1", "ff02::1", "255.255.255.255", "fe80::1"])
def test_addresses_that_are_of_no_host(host):
    assert why_unreachable(host) and not is_loopback(host)


@pytest.mark.parametrize(
    ("address", "coordinator", "may_be"),
    [
        ("127.0.0.1:7", "127.0.0.1:7700", True),
        ("127.0.0.1:7", "10.0.0.1:7700", False),
        ("localhost:7", "gpu7.example:7700", False),
        ("[::1]:7", "[2001:db8::7]:7700", False),
        ("10.0.0.2:7", "10.0.0.1:7700", True),
        ("0.0.0.0:7", "127.0.0.1:7700", False),
        ("", "10.0.0.1:7700", True),
        ("127.0.0.1:7", "", True),
    ],
)
def test_all_addresses_of_a_run_are_of_loopback_or_none(address, coordinator, may_be):
    assert (why_undialable(address, coordinator) == "") == may_be
