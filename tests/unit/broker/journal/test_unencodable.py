"""What a message's own schema refuses is not sent, and ends no process: it would come to the same again."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarm.broker.actions import Action, Dispatch, SendToClient, SendToWorker
from swarm.broker.events import ClientMessageReceived
from swarm.broker.service import BrokerService
from swarm.wire.messages import PROTOCOL_VERSION, Fence, HostDone, Malformed, StartWorkers, Step

TOO_HIGH = 2**64  # more than the encoding can tell


def unsendable(version: int) -> BrokerService:
    """A broker whose peers speak this version, and whose sockets must not be asked."""
    service = object.__new__(BrokerService)
    door = SimpleNamespace(send=pytest.fail, version_of=lambda _: version)
    service._message_server = cast(Any, SimpleNamespace(clients=door, workers=door))
    service._unsent = deque()
    return service


@pytest.mark.parametrize(
    "action",
    [
        SendToWorker(b"w0.1", Fence(epoch=2**63)),
        SendToClient(b"client", Malformed(reason="x" * 10_000)),
        Dispatch(Step(epoch=TOO_HIGH, step=1, rows=(), tokens=())),
    ],
)
def test_it_is_not_sent(action: Action) -> None:
    """The sockets are never asked."""
    service = unsendable(PROTOCOL_VERSION)
    assert service._perform(action) is None
    assert not service._unsent


def test_a_host_that_is_too_old_for_a_device_refuses() -> None:
    """Otherwise the asker of ``swarmctl join --device`` would wait for an answer that nobody sends."""
    answer = unsendable(3)._perform(SendToClient(b"host", StartWorkers(ticket=7, count=1, device="cuda")))
    assert isinstance(answer, ClientMessageReceived)
    assert isinstance(answer.message, HostDone)
    assert answer.message.ticket == 7
    assert "supports 3: upgrade it" in answer.message.error
