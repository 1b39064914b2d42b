"""What the broker's process does for its lock beside its doors: it goes on, whatever becomes of the network."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import pytest

from swarm.auth.broker_keys import BrokerKeys
from swarm.auth.key_proof import prove
from swarm.broker.auth import access, service
from swarm.broker.auth.access import AccessControl
from swarm.broker.auth.service import AuthService
from swarm.config import Settings
from swarm.errors import ConfigError
from swarm.wire.messages import Enrol, Invite, Role, RotateBroker
from swarm.wire.transport.keys import new_pair
from tests.unit.growing import Growing

SETTINGS = {"broker": {"listen": ["192.0.2.1"], "discoverable": True}}


@pytest.fixture
async def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AuthService]:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    monkeypatch.setattr(access, "resolve_own", lambda listen: ("192.0.2.1",))
    monkeypatch.setattr(service, "LOOK_S", 0.01)
    made = AuthService(Settings.model_validate({**SETTINGS, "state_dir": str(tmp_path)}))
    running = asyncio.create_task(made.run())
    yield made
    assert not running.done()  # whatever has happened meanwhile
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_the_network_is_told_the_new_key(
    keeper: AuthService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As soon as there is one; and the old one no more."""
    told, looked = Growing[str](), Growing[bool]()
    really = AccessControl.drop_former_key
    monkeypatch.setattr(AccessControl, "drop_former_key", lambda self: looked.append(really(self) is None))
    over: list[str] = []

    async def announce(_name: str, _addresses: object, _port: int, key: str) -> None:
        told.append(key)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            over.append(key)

    monkeypatch.setattr(service, "announce", announce)
    keeper.attach({}, None, None, lambda event: None)  # type: ignore[arg-type]
    await told.has(1)
    (old,) = (pair.public for pair in BrokerKeys(tmp_path / "locked").pairs)
    assert keeper.handle_client_message(b"", "", RotateBroker())
    await told.has(2)
    await looked.until(lambda: len(BrokerKeys(tmp_path / "locked").pairs) == 1)  # nobody has to be waited for
    assert told == [old, BrokerKeys(tmp_path / "locked").public]
    assert over == [old]


async def test_a_broker_that_nobody_can_find_serves(keeper: AuthService, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says why once."""
    asked = Growing[str]()

    async def announce(_name: str, _addresses: object, _port: int, key: str) -> None:
        asked.append(key)
        raise ConfigError("announcing on the local network failed (NonUniqueNameException)")

    log = Mock()
    monkeypatch.setattr(service, "announce", announce)
    monkeypatch.setattr(service, "log", log)
    await asked.has(1)
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(asked) == 1
    assert [call.args for call in log.warning.call_args_list] == [("not_discoverable",)]
    assert keeper.handle_client_message(b"", "", RotateBroker())


@pytest.mark.parametrize(("role", "rests"), [("client", True), ("worker", True), ("gateway", False), ("admin", False)])
async def test_a_member_that_floods_has_to_rest(
    keeper: AuthService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: Role, rests: bool
) -> None:
    """It is read no more for a while. Who speaks for many, may do all or is on this machine is not held to that."""
    monkeypatch.setattr(service, "announce", AsyncMock(side_effect=ConfigError("there is no network")))
    front, sent = Mock(), Growing[object]()
    front.send.side_effect = lambda *said: sent.append(said)
    keeper.attach({}, front, None, lambda event: None)  # type: ignore[arg-type]
    invitation, pair = new_pair().public, new_pair()
    own = pair.public
    assert keeper.handle_client_message(b"", "", Invite(key=invitation, role=role))
    await sent.has(1)
    proof = prove(pair, invitation, BrokerKeys(tmp_path / "locked").pairs[0].public)
    assert keeper.handle_client_message(b"", invitation, Enrol(key=own, proof=proof))
    await sent.has(2)
    keeper.charge(b"flood", own, 0.5, 0.0)
    assert not front.pause_reading.called
    keeper.charge(b"here", "", 60.0, 0.0)
    keeper.charge(b"flood", own, 60.0, 0.0)
    assert [call.args[0] for call in front.pause_reading.call_args_list] == [b"flood"] * rests
