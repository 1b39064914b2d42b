"""Parts of copies on their way out: what can be read is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from swarm.stage import actions as act
from swarm.stage.shell.kv_channels import KvChannels
from swarm.testing import FakeExecutor
from swarm.wire.codec import DATA
from swarm.wire.messages import NO_LINEAGE, Edge, KvPart, LayerRange, Row
from tests.unit.stage.bench import StageBench, opened, step_of

EDGE = Edge("w1.1", "tcp://w1.1")
LAYERS = LayerRange(0, 3)


@dataclass
class Channel:
    """Accepts everything."""

    is_ready: bool = True
    messages: list[Any] = field(default_factory=list)

    def open(self, endpoint: str, *, queue: int) -> Channel:
        return self

    def send_all(self, messages: Sequence[Any]) -> bool:
        self.messages += [DATA.decode([memoryview(frame) for frame in frames])[0] for frames in messages]
        return True


@pytest.fixture
def executor(stage: StageBench) -> FakeExecutor:
    """Sequences 1 and 3 have positions, 2 is gone."""
    rows = (Row(1, 0, 3, False), Row(3, 0, 3, False))
    stage.run(step_of(1, *rows, tokens=(1, 2, 3) * 2, open=(opened(1), opened(3))))
    return stage.executor


def send(executor: FakeExecutor, *sequences: int) -> tuple[int, list[int]]:
    """The bytes that were sent, and the sequences."""
    channel = Channel()
    channels = KvChannels(channel, executor, "w0.1")  # type: ignore[arg-type]
    channels.connect((EDGE,))
    parts = [act.SendKvPart(EDGE, 1, NO_LINEAGE, number, LAYERS, 0, (1, 2, 3), None) for number in sequences]
    num_bytes = channels.send(act.SendKvParts(tuple(parts)))
    assert all(isinstance(message, KvPart) for message in channel.messages)
    return num_bytes, [message.sequence for message in channel.messages]


def test_a_part_that_cannot_be_read_holds_up_no_other(executor: FakeExecutor) -> None:
    of_one, _ = send(executor, 1)
    assert of_one > 0
    assert send(executor, 1, 2, 3) == (2 * of_one, [1, 3])


def test_without_a_readable_part_nothing_is_sent(executor: FakeExecutor) -> None:
    assert send(executor, 2) == (0, [])
