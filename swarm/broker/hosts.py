"""Hosts: running ``swarm up``s that can start more workers when ``swarmctl join`` asks for some."""

from __future__ import annotations

from swarm.broker.actions import Action, SayClient
from swarm.wire.messages import HostDone, HostHello, Join, Report, StartWorkers

MAX_TICKETS = 64  # joins that a host has not answered yet


class Hosts:
    """Who can start workers, and who asked for some."""

    def __init__(self, out: list[Action]) -> None:
        self._out = out
        self._hosts: dict[bytes, HostHello] = {}
        self._askers: dict[int, bytes] = {}
        self._next_ticket = 1

    def hello(self, client: bytes, message: HostHello) -> None:
        """A host says that it is there (again); one that was restarted takes its former self's place."""
        self._hosts = {c: h for c, h in self._hosts.items() if (h.host, h.pid) != (message.host, message.pid)}
        self._hosts[client] = message

    def join(self, client: bytes, message: Join) -> None:
        if not self._hosts:
            reason = "no `swarm up` is connected that could start a worker: run `swarm worker --url …` on the machine"
            self._out.append(SayClient(client, Report(what="join", ok=False, body={"error": reason})))
            return
        ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
        self._askers[ticket] = client
        while len(self._askers) > MAX_TICKETS:
            del self._askers[next(iter(self._askers))]
        host = list(self._hosts)[-1]
        order = StartWorkers(ticket=ticket, count=message.count, memory_limit=message.memory_limit)
        self._out.append(SayClient(host, order))

    def done(self, message: HostDone) -> None:
        client = self._askers.pop(message.ticket, None)
        if client is None:
            return
        body: dict[str, object] = {"started": list(message.started)}
        if message.error:
            body["error"] = message.error
        self._out.append(SayClient(client, Report(what="join", ok=not message.error, body=body)))

    def unreachable(self, client: bytes) -> None:
        self._hosts.pop(client, None)
