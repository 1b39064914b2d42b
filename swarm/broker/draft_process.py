"""Process of the draft model: started, watched, started again, and ended with the broker. It decides nothing else.

The process gets the broker's requests by its stdin; at the end of it the process exits by itself. It is killed if it
does not answer for long. After a death it is started again, each time after a longer pause; not if its model can't be
used, because then another start would not help.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from swarm.broker.actions import AskDraft
from swarm.broker.events import DraftGone, DraftMessageReceived
from swarm.errors import WireError
from swarm.log import get_logger
from swarm.wire.draft_messages import (
    LENGTH_BYTES,
    DraftLoaded,
    DraftMessage,
    DraftUnusable,
    Proposals,
    body_length,
    decode_message,
    encode_frame,
)

if TYPE_CHECKING:
    from swarm.config import Settings

LOAD_TIMEOUT_S = 600.0  # for the model to be loaded
ANSWER_TIMEOUT_S = 10.0  # for an answer; sequences stop waiting for it far earlier
EXIT_TIMEOUT_S = 1.0  # between the end of its output and its own
FIRST_PAUSE_S = 0.5  # before the process is started again; doubles with each death
MAX_PAUSE_S = 60.0
SOUND_AFTER_S = 60.0  # a process that has run this long has not died at its start

log = get_logger(__name__)


def draft_command(settings: Settings) -> list[str]:
    """Return the command line of the process."""
    assert settings.broker.draft is not None
    safe_path = ["-P"] if sys.flags.safe_path else []
    options = [
        *("--threads", str(settings.broker.draft_threads)),
        *("--log-level", settings.log.level),
        *("--log-format", settings.log.format),
    ]
    return [sys.executable, *safe_path, "-m", "swarm.cli.draft", *options, "--", settings.broker.draft]


class DraftProcess:
    """The process, over all its starts. ``feed`` is called with its events, in the event loop."""

    def __init__(self, command: Sequence[str], feed: Callable[[DraftMessageReceived | DraftGone], None]):
        self._command = command
        self._feed = feed
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopped = False
        self._deadline: asyncio.TimerHandle | None = None  # after which the process is killed
        self._problem = ""  # why it was killed

    async def run(self) -> None:
        """Keep the process running until it is stopped or can't work."""
        pause_s, loop = FIRST_PAUSE_S, asyncio.get_running_loop()
        while not self._is_stopped:
            began = loop.time()
            reason, is_final = await self._run_process()
            self._feed(DraftGone(reason, is_final or self._is_stopped))
            if is_final:
                log.error("draft_model_unusable", reason=reason, note="the swarm goes on without a draft model")
                return
            if loop.time() - began > SOUND_AFTER_S:
                pause_s = FIRST_PAUSE_S
            if not self._is_stopped:
                log.warning("draft_process_ended", reason=reason, restart_s=pause_s)
                await asyncio.sleep(pause_s)
            pause_s = min(MAX_PAUSE_S, 2 * pause_s)

    def ask(self, action: AskDraft) -> None:
        """Send a request. Its answer, or the end of the process, is fed as an event."""
        process = self._process
        if process is None or process.stdin is None:
            return  # ``DraftGone`` is on its way
        try:
            process.stdin.write(encode_frame(action.request))
        except WireError as error:
            self._kill(str(error))
            return
        self._expect(ANSWER_TIMEOUT_S, "it did not answer")

    def stop(self) -> None:
        """End the process for good."""
        self._is_stopped = True
        self._kill("it was stopped")

    async def _run_process(self) -> tuple[str, bool]:
        """Run the process until its end. Return the reason, and whether another start would not help."""
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, start_new_session=True
            )
        except OSError as error:
            return f"it can't be started: {error}", False
        self._process, self._problem = process, ""
        try:
            self._expect(LOAD_TIMEOUT_S, "its model was not loaded in time")
            assert process.stdout is not None
            unusable = await self._receive(process.stdout)
            if unusable is not None:
                return unusable, True
            with suppress(TimeoutError):
                async with asyncio.timeout(EXIT_TIMEOUT_S):
                    await process.wait()
            return self._problem or f"exit code {process.returncode}", False
        finally:
            self._process = None
            self._cancel_timer()
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
                await process.wait()

    async def _receive(self, pipe: asyncio.StreamReader) -> str | None:
        """Feed the process's messages until its end; return why its model can't be used, if that is the end."""
        while True:
            try:
                head = await pipe.readexactly(LENGTH_BYTES)
                message = decode_message(await pipe.readexactly(body_length(head)))
            except (asyncio.IncompleteReadError, ConnectionError):
                return None
            except WireError as error:
                self._kill(str(error))
                return None
            if isinstance(message, DraftUnusable):
                return message.reason
            self._on_message(message)

    def _on_message(self, message: DraftMessage) -> None:
        if isinstance(message, DraftLoaded | Proposals):
            self._cancel_timer()
        self._feed(DraftMessageReceived(message))

    def _expect(self, within_s: float, problem: str) -> None:
        self._cancel_timer()
        self._deadline = asyncio.get_running_loop().call_later(
            within_s, self._kill, f"{problem} within {within_s:.0f} s"
        )

    def _cancel_timer(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None

    def _kill(self, problem: str) -> None:
        self._problem = self._problem or problem
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.kill()
