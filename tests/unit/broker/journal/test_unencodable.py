"""What a message's own schema refuses is not sent, and ends no process: it would come to the same again."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarm.broker.actions import Action, Dispatch, SendToClient, SendToWorker
from swarm.broker.service import BrokerService
from swarm.wire.messages import PROTOCOL_VERSION, Fence, Malformed, Step

TOO_HIGH = 2**64  # more than the encoding can tell


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
    service = object.__new__(BrokerService)
    door = SimpleNamespace(send=pytest.fail, version_of=lambda _: PROTOCOL_VERSION)
    service._message_server = cast(Any, SimpleNamespace(clients=door, workers=door))
    service._unsent = deque()
    assert service._perform(action) is None
    assert not service._unsent
