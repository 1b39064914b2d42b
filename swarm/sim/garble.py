"""Damage of a step on its way: it goes through the production codec, which must refuse it."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import msgspec

from swarm.errors import WireError
from swarm.wire import tensors
from swarm.wire.codec import DATA
from swarm.wire.messages import Step

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def garble_step(step: Step, hidden: NDArray[np.float32], chance: Random) -> Step | str:
    """Return the step as decoded after a bit of its tensor flipped or its end was lost, or the refusal's reason."""
    spec, data = tensors.pack(hidden)
    header, payload = DATA.encode(msgspec.structs.replace(step, tensor=spec), data)
    damaged = bytearray(payload)
    if chance.random() < 0.2:
        del damaged[-chance.randint(1, len(damaged)) :]
    else:
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
    try:
        message, _ = DATA.decode([header, damaged])
    except WireError as error:
        return str(error)
    return message if isinstance(message, Step) else "no step"
