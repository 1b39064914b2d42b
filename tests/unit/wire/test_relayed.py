"""Addresses of doors that are reached by a relay."""

from __future__ import annotations

import pytest

from swarm.wire.door.keys import address_and_key, by_relay, reached, without_ticket

KEY, TICKET = "ab" * 32, "cd" * 16


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1"])
def test_an_address_by_relay_has_the_doors_own_key_the_relays_place_and_the_ticket(host: str) -> None:
    told = by_relay(f"tcp://{KEY}@10.0.0.7:20000", "tcp://*:5704", TICKET)
    address, key = address_and_key(reached(told, host))
    assert key == KEY.encode()
    shown = f"[{host}]" if ":" in host else host
    assert without_ticket(address) == (f"tcp://{shown}:5704", TICKET)


def test_an_address_without_a_ticket_stays_as_it_is() -> None:
    assert without_ticket("tcp://192.0.2.1:20000") == ("tcp://192.0.2.1:20000", "")
