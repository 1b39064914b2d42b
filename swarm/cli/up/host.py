"""Communication of ``swarm up`` with the broker: offers to start workers, and follows the swarm's state.

The broker may be away, restarting, or too busy to answer; that is not an error here. Queries are repeated, and a broker
that has forgotten this host is registered again by the hello that is sent every ``HELLO_S``.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from typing import Any, Literal

import zmq

from swarm.cli.output import ConsoleProgress
from swarm.cli.up.runner import Feed
from swarm.cli.up.summary import GENERATE, format_loading, format_plan, format_serving
from swarm.cli.up.supervisor import AnswerRequest, SwarmServing, WorkersJoined, WorkersRequested
from swarm.errors import WireError
from swarm.wire.codec import CLIENT, SERVER
from swarm.wire.dealer import ConnectionEvent, DealerChannel
from swarm.wire.messages import HostDone, HostHello, Json, Query, Report, ServerMessage, StartWorkers
from swarm.wire.sockets import Frames

HELLO_S = 2.0
LOADING_POLL_S = 0.25  # a user is watching the progress
SERVING_POLL_S = 2.0


class HostConnection:
    """A :class:`~swarm.cli.up.runner.Host` over the clients' port."""

    def __init__(self, url: str, progress: ConsoleProgress, how_to_stop: str, example: str = GENERATE) -> None:
        """``how_to_stop`` is a line for the user, ``example`` a command that uses the model, if there is one."""
        self._url = url
        self._progress = progress
        self._how_to_stop, self._example = how_to_stop, example
        self._channel: DealerChannel | None = None
        self._reports: dict[str, Json] = {}  # last report of each kind
        self._serving = False
        self._tickets: set[int] = set()  # of pending requests for workers
        self._shown_epoch: object = None  # epoch of the plan that was shown last

    async def run(self, feed: Feed) -> None:
        """Offer to start workers and follow the swarm, until cancelled."""
        context = zmq.Context()
        identity = f"host-{os.getpid()}-{os.urandom(4).hex()}".encode()
        self._channel = DealerChannel(context, self._url, identity, SERVER.frame_limit_bytes)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._poll())
                group.create_task(self._listen(self._channel, feed))
        finally:
            self._channel.close()
            self._channel = None
            context.term()

    def answer(self, answer: AnswerRequest) -> None:
        """Send the answer to the broker. If it is lost, the requester's time limit ends its wait."""
        self._tickets.discard(answer.ticket)
        self._send(HostDone(ticket=answer.ticket, started=answer.started, error=answer.error))

    def _send(self, message: HostHello | HostDone | Query) -> None:
        if self._channel is not None:
            self._channel.send(CLIENT.encode(message))

    async def _poll(self) -> None:
        said_hello_at = -HELLO_S
        while True:
            if time.monotonic() - said_hello_at >= HELLO_S:
                said_hello_at = time.monotonic()
                self._send_hello()
            self._query("nodes")
            self._query("status")
            is_calm = self._serving and not self._tickets
            await asyncio.sleep(SERVING_POLL_S if is_calm else LOADING_POLL_S)

    def _send_hello(self) -> None:
        self._send(HostHello(host=socket.gethostname()[:128] or "localhost", pid=os.getpid()))

    def _query(self, what: Literal["status", "nodes", "plan"]) -> None:
        self._send(Query(what=what))

    async def _listen(self, channel: DealerChannel, feed: Feed) -> None:
        async for event in channel:
            if event is ConnectionEvent.CONNECTED:
                self._send_hello()
            elif not isinstance(event, ConnectionEvent):
                self._handle(event, feed)

    def _handle(self, frames: Frames, feed: Feed) -> None:
        try:
            message: ServerMessage = SERVER.decode(frames)[0]
        except WireError as error:
            self._progress.print_line(f"the broker sent an invalid message: {error}")
            return
        if isinstance(message, StartWorkers):
            self._tickets.add(message.ticket)
            feed(WorkersRequested(message.ticket, message.count, message.memory_limit, message.device))
        elif isinstance(message, Report) and message.ok:
            self._reports[message.what] = message.body
            if message.what == "status":
                self._follow_status(message.body)
            elif message.what == "nodes":
                self._report_joined(message.body, feed)
            elif message.what == "plan":
                self._show_plan(message.body, feed)

    def _report_joined(self, nodes: Json, feed: Feed) -> None:
        workers: list[dict[str, Any]] = nodes.get("workers") or []  # type: ignore[assignment]
        names = tuple(str(worker["name"]) for worker in workers if worker["state"] not in ("out", "left"))
        if names:
            feed(WorkersJoined(names))

    def _follow_status(self, status: Json) -> None:
        serving = status.get("state") == "serving"
        if serving and status.get("epoch") != self._shown_epoch:
            self._query("plan")
        elif not serving:
            if self._serving:
                self._progress.print_line("the swarm does not serve now")
            self._progress.set_status(format_loading(status, self._reports.get("nodes", {})))
        self._serving = serving

    def _show_plan(self, plan: Json, feed: Feed) -> None:
        if plan.get("state") != "serving" or plan.get("epoch") == self._shown_epoch:
            return  # two queries were sent before the first answer came
        self._progress.clear_status()
        if self._shown_epoch is None:
            lines = format_serving(plan, self._reports["status"], self._url, self._how_to_stop, self._example)
        else:
            lines = [f"serving with a new plan (epoch {plan.get('epoch')})", *format_plan(plan)]
        self._shown_epoch = plan.get("epoch")
        rows: list[dict[str, Any]] = plan.get("stages") or []  # type: ignore[assignment]
        stages = [{"worker": row.get("worker"), "layers": row.get("layers")} for row in rows]
        model = self._reports["status"].get("model")
        event = {"event": "serving", "url": self._url, "model": model, "epoch": plan.get("epoch"), "stages": stages}
        self._progress.report(lines, event)
        feed(SwarmServing())
