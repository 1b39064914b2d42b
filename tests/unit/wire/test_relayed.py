"""Addresses of doors that are reached by a relay."""

from __future__ import annotations

import pytest

from swarm.wire.transport.keys import address_and_key, split_ticket, via_relay, with_host

KEY, TICKET = "ab" * 32, "cd" * 16


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1"])
def test_an_address_by_relay_has_the_doors_own_key_the_relays_place_and_the_ticket(host: str) -> None:
    told = via_relay(f"tcp://{KEY}@10.0.0.7:20000", "tcp://*:5704", TICKET)
    address, key = address_and_key(with_host(told, host))
    assert key == KEY.encode()
    shown = f"[{host}]" if ":" in host else host
    assert split_ticket(address) == (f"tcp://{shown}:5704", TICKET)


def test_an_address_without_a_ticket_stays_as_it_is() -> None:
    assert split_ticket("tcp://192.0.2.1:20000") == ("tcp://192.0.2.1:20000", "")
