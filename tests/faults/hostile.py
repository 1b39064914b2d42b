"""A worker that somebody has taken over: ``python -m tests.faults.hostile worker …``.

It computes honestly until it is revoked. It does not end then: it keeps every socket that it had, hears whoever still
speaks to it, knocks again everywhere, and says its last messages again and again, to all whom it ever spoke to. What it
achieves goes, a line each, into the file that ``HOSTILE_NOTES`` names.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

from swarm.cli import main as swarm
from swarm.stage.shell.control import ControlConnection
from swarm.stage.shell.service import WorkerService
from swarm.wire.dealer import ConnectionEvent
from swarm.wire.pull import PullChannel
from swarm.wire.push import PushChannel

VARIABLE: Final = "HOSTILE_NOTES"
PAUSE_S: Final = 0.02

_said: dict[PushChannel, Sequence[Any]] = {}
_hears, _says, _take, _turned_away = (
    PullChannel.receive,
    PushChannel.send,
    ControlConnection._handle_frames,
    ControlConnection._on_auth_rejected,
)


def note(what: str) -> None:
    with open(os.environ[VARIABLE], "a") as notes:
        notes.write(f"{time.time()} {what}\n")


def hears(pull: PullChannel) -> Any:
    frames = _hears(pull)
    if frames is not None:
        note("heard-a-step")
    return frames


def says(push: PushChannel, frames: Sequence[Any]) -> bool:
    _said[push] = [bytes(frame) for frame in frames]
    return _says(push, frames)


def takes(control: ControlConnection, frames: Any) -> None:
    note("heard-an-order")
    _take(control, frames)


def knocks_again(control: ControlConnection) -> None:
    note("turned-away")
    control._channel._arrived.append(ConnectionEvent.LOST)
    control._loop.call_later(0.2, control._channel.reconnect)


def says_again() -> None:
    """For ever, over sockets that its owner wanted closed."""
    while True:
        time.sleep(PAUSE_S)
        for push, frames in list(_said.items()):
            if push.is_left and _says(push, frames):  # type: ignore[attr-defined]
                note("said-a-step")


def leaves(push: PushChannel, linger_s: float = 0.0) -> None:
    push.is_left = True  # type: ignore[attr-defined]


def main() -> None:
    PushChannel.is_left = False  # type: ignore[attr-defined]
    PushChannel.close = leaves  # type: ignore[method-assign]
    PullChannel.receive = hears  # type: ignore[method-assign]
    PullChannel.drop_unauthorized = lambda _pull: None  # type: ignore[method-assign]
    PushChannel.send = says  # type: ignore[method-assign]
    ControlConnection._handle_frames = takes  # type: ignore[method-assign]
    ControlConnection._on_auth_rejected = knocks_again  # type: ignore[method-assign]
    WorkerService.end = lambda _service, _code, reason: note(f"should-end {reason}")  # type: ignore[method-assign]
    threading.Thread(target=says_again, daemon=True).start()
    sys.exit(swarm.run(sys.argv[1:]))


if __name__ == "__main__":
    main()
