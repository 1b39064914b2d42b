"""Damaged messages through the real data channel: each is refused with its reason, told to the broker at once, and
nothing of it is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
import zmq

from swarm.params import SamplingParams
from swarm.stage import actions as act
from swarm.testing import FakeExecutor, fake_manifest
from swarm.wire import tensors
from swarm.wire.codec import DATA
from swarm.wire.messages import (
    Activate,
    DataPathError,
    Edge,
    Fence,
    Hop,
    LayerRange,
    Open,
    Prepare,
    Row,
    SequencePosition,
    Step,
    StepDone,
    TensorSpec,
)
from swarm.wire.pull import PullChannel
from tests.integration.test_compute_thread import PATIENCE_S, Stage

Frames = list[bytes]
HIDDEN = fake_manifest(6).hidden_size


@pytest.fixture
def taker() -> Iterator[PullChannel]:
    """Takes the place of the broker, whom the last stage answers."""
    channel = PullChannel("127.0.0.1", DATA.frame_limit_bytes)
    yield channel
    channel.close()


@pytest.fixture
def stage(taker: PullChannel) -> Iterator[Stage]:
    """The last of two stages, active in epoch 1."""
    with zmq.Context() as context:
        stage = Stage(context)
        assert isinstance(stage.executor, FakeExecutor)
        edge = Edge("broker", taker.endpoint)
        stage.order(Prepare(epoch=1, layers=LayerRange(3, 6), standby=(), edge=edge, max_sequences=4))
        stage.says()
        stage.order(Fence(epoch=1))
        stage.order(Activate(epoch=1, first_step=1, live=()))
        stage.says()
        assert stage.before.wait(PATIENCE_S)
        yield stage
        stage.close()


def step(hidden: np.ndarray, **changes: object) -> tuple[Step, bytes]:
    """The first step of a sequence of three tokens."""
    spec, data = tensors.pack(hidden)
    made = Step(
        epoch=1,
        step=1,
        rows=(Row(7, 0, 3, True),),
        tokens=(5, 6, 7),
        open=(Open(7, SamplingParams(), 0, 3, 8, (5, 6, 7)),),
        hops=(Hop("w9", LayerRange(0, 3), 0.0, 0.0, 0.0, 0.0, 0),),
        tensor=spec,
    )
    return msgspec.structs.replace(made, **changes), bytes(data)


GOOD = np.arange(3 * HIDDEN, dtype=np.float32).reshape(3, HIDDEN)


def good() -> Frames:
    return [bytes(frame) for frame in DATA.encode(*step(GOOD))]


def flipped(frame: int, byte: int) -> Callable[[Frames], Frames]:
    def flip(frames: Frames) -> Frames:
        spoiled = bytearray(frames[frame])
        spoiled[byte] ^= 0x04
        return [bytes(spoiled) if index == frame else whole for index, whole in enumerate(frames)]

    return flip


def described(spec: TensorSpec) -> Callable[[Frames], Frames]:
    """Put the same bytes under a sealed header that says something else of them."""
    return lambda frames: [bytes(DATA.encode(step(GOOD, tensor=spec)[0])[0]), frames[1]]


def told_wrongly(**fields: object) -> TensorSpec:
    return msgspec.structs.replace(step(GOOD)[0].tensor, **fields)


DAMAGES: dict[str, tuple[Callable[[Frames], Frames], str]] = {
    "a bit of the tensor": (flipped(1, 9), "the checksum does not fit the"),
    "a bit of the header": (flipped(0, 40), "the header's checksum does not fit"),
    "a bit of the seal": (flipped(0, -1), "the header's checksum does not fit"),
    "a header cut short": (lambda f: [f[0][:-5], f[1]], "the header's checksum does not fit"),
    "a tensor cut short": (lambda f: [f[0], f[1][:-4]], f"a frame of {GOOD.nbytes} bytes was announced"),
    "a longer tensor": (lambda f: [f[0], f[1] + b"1234"], f"a frame of {GOOD.nbytes} bytes was announced"),
    "no tensor": (lambda f: f[:1], "the frame that it describes is missing"),
    "another length": (described(told_wrongly(num_bytes=4)), "step.tensor.num_bytes: its shape has"),
    "another dtype": (described(told_wrongly(dtype="float16")), "step.tensor.num_bytes: its shape has"),
    "an unknown dtype": (described(told_wrongly(dtype="float64")), "step.tensor.dtype: Invalid enum value 'float64'"),
    "other rows": (described(told_wrongly(shape=(HIDDEN, 3))), "step.tensor.shape: "),
    "another hidden size": (
        lambda f: [bytes(x) for x in DATA.encode(*step(np.ones((3, HIDDEN + 1), np.float32)))],
        f"this model's stages pass on {HIDDEN} numbers",
    ),
    "no message": (lambda f: [b"garbage"], "the header's checksum does not fit"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_is_never_used(stage: Stage, taker: PullChannel, name: str) -> None:
    """The broker hears at once that a step is lost, why, and that it is nobody's fault; no sequence is opened and
    nothing is computed. The whole message, sent again, is done as if nothing had been."""
    damage, reason = DAMAGES[name]
    assert stage.before.send(damage(good()))
    told = stage.says()
    assert isinstance(told, act.SendToBroker)
    assert isinstance(told.message, DataPathError)
    assert told.message.damaged
    assert told.message.not_finite is None
    assert reason in told.message.reason
    assert stage.core.sequences == {}
    assert stage.executor.chains == {}
    assert stage.core.counters["refused_frames"] == 1
    assert stage.before.send(good())
    assert taker.wait(PATIENCE_S)
    frames = taker.receive()
    assert frames is not None
    done, _ = DATA.decode(frames)
    assert isinstance(done, StepDone)
    assert done.kv == (SequencePosition(7, 3),)


def test_numbers_that_are_none_are_never_used(stage: Stage) -> None:
    """Their checksum is right: that is how they were sent. The sender is named."""
    hidden = GOOD.copy()
    hidden[1, 0] = np.inf
    assert stage.before.send(DATA.encode(*step(hidden)))
    told = stage.says()
    assert isinstance(told, act.SendToBroker)
    assert isinstance(told.message, DataPathError)
    assert not told.message.damaged
    assert told.message.not_finite is not None
    assert told.message.not_finite.worker == "w9"
    assert told.message.not_finite.rows == (SequencePosition(7, 1),)
    assert stage.core.sequences == {}
    assert stage.executor.chains == {}
