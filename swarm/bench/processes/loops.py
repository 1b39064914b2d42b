"""Run a coroutine on the quickest event loop that is installed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

try:
    import uvloop
except ModuleNotFoundError:  # not on Windows
    _factory = None
else:
    _factory = uvloop.new_event_loop


def run_loop(main: Coroutine[object, object, None]) -> None:
    with asyncio.Runner(loop_factory=_factory) as runner:
        runner.run(main)
