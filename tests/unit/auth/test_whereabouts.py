"""Where a worker from elsewhere may be reached."""

from __future__ import annotations

import ipaddress

import pytest

from swarm.auth.worker_address import address_error, usable_kv_endpoint

KEY = "1f" * 32
NETWORKS = (ipaddress.ip_network("10.1.0.0/16"), ipaddress.ip_network("2001:db8:1::/48"))


@pytest.mark.parametrize(
    ("endpoint", "comes_from"),
    [
        (f"tcp://{KEY}@192.0.2.2:20000", "192.0.2.2"),
        ("tcp://192.0.2.2:20000", "::ffff:192.0.2.2"),
        (f"tcp://{KEY}@[2001:db8::2]:20000", "2001:db8::2"),
        ("tcp://[2001:db8:0::2]:20000", "2001:db8::2%eth0"),
        ("tcp://10.1.2.3:20000", "192.0.2.2"),
        ("tcp://[2001:db8:1::7]:20000", "192.0.2.2"),
        ("tcp://10.1.2.3:20000", ""),
    ],
)
def test_at_the_address_that_it_comes_from_or_in_a_network_that_is_allowed(endpoint: str, comes_from: str) -> None:
    assert address_error(endpoint, comes_from, NETWORKS) == ""


@pytest.mark.parametrize(
    ("endpoint", "comes_from", "words"),
    [
        (f"tcp://{KEY}@192.0.2.9:22", "192.0.2.2", "names the address 192.0.2.9, and comes from 192.0.2.2"),
        ("tcp://127.0.0.1:22", "192.0.2.2", "names the address 127.0.0.1"),
        ("tcp://[::1]:5700", "2001:db8::2", "names the address ::1"),
        ("tcp://[2001:db8::3]:1", "2001:db8::2", "comes from 2001:db8::2"),
        ("tcp://192.0.2.2:1", "", "comes from an address that is not known any more"),
        ("tcp://[::ffff:192.0.2.9]:1", "192.0.2.2", "names the address 192.0.2.9"),
    ],
)
def test_nowhere_else(endpoint: str, comes_from: str, words: str) -> None:
    """What would be shown to others is named with the setting that may allow it, and never with a key."""
    reason = address_error(endpoint, comes_from, NETWORKS)
    assert words in reason
    assert "broker.worker_networks" in reason
    assert KEY not in reason


@pytest.mark.parametrize(
    ("kv_endpoint", "error", "is_usable"),
    [
        (f"tcp://{KEY}@192.0.2.2:20001", "", True),
        (f"tcp://{KEY}@192.0.2.2:20001", "it names another address", False),
        (f"tcp://{KEY}@192.0.2.9:20001", "", False),
        ("tcp://elsewhere.example:20001", "", False),
        ("", "", False),
    ],
)
def test_copies_go_to_the_address_of_the_steps(kv_endpoint: str, error: str, is_usable: bool) -> None:
    """A worker could otherwise direct other workers' connections anywhere."""
    assert usable_kv_endpoint(kv_endpoint, f"tcp://{KEY}@192.0.2.2:20000", error) == (kv_endpoint if is_usable else "")
