"""Run a coroutine on the fastest installed event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

try:
    import uvloop
except ModuleNotFoundError:  # Windows
    _factory = None
else:
    _factory = uvloop.new_event_loop


def run_loop(main: Coroutine[object, object, None]) -> None:
    with asyncio.Runner(loop_factory=_factory) as runner:
        runner.run(main)
