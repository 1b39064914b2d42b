"""Hosts: running ``swarm up`` processes that can start more workers when ``swarmctl join`` asks for some."""

from __future__ import annotations

from swarm.broker.actions import Outbox, SendToClient
from swarm.broker.state import HostRegistry
from swarm.wire.messages import HostDone, HostHello, Join, Report, StartWorkers

MAX_TICKETS = 64  # joins that a host has not answered yet


class HostManager:
    """Has hosts start workers, and reports the result to the client that asked. Owns ``state.hosts``."""

    def __init__(self, registry: HostRegistry, out: Outbox) -> None:
        self._registry = registry
        self._out = out

    def on_hello(self, client: bytes, message: HostHello) -> None:
        """Register a host. A host that has reconnected takes the place of its former connection."""
        former = [c for c, h in self._registry.connected.items() if (h.host, h.pid) == (message.host, message.pid)]
        for connection in former:
            del self._registry.connected[connection]
        self._registry.connected[client] = message
        for ticket in self._registry.tickets.values():
            if ticket.host in former:
                ticket.host = client  # the same process on a new connection: it may still answer

    def join(self, client: bytes, message: Join) -> None:
        if not self._registry.connected:
            reason = (
                "no `swarm up` is connected that could start a worker. On the broker's machine, run "
                f"`{_worker_command(message)}` with the swarm's --url and --model, or `systemctl start "
                "swarm-worker@NAME`; on another one, what `swarmctl invite --role worker` prints"
            )
            self._refuse(client, reason)
            return
        host = list(self._registry.connected)[-1]  # The host that registered last.
        ticket = self._registry.register_join(client, host)
        if len(self._registry.tickets) > MAX_TICKETS:
            oldest = self._registry.tickets.pop(next(iter(self._registry.tickets)))
            self._refuse(oldest.asker, "the host has not answered, and too many have asked since: look at its log")
        order = StartWorkers(
            ticket=ticket, count=message.count, memory_limit=message.memory_limit, device=message.device
        )
        self._out.append(SendToClient(host, order))

    def on_done(self, message: HostDone) -> None:
        ticket = self._registry.tickets.pop(message.ticket, None)
        if ticket is None:
            return
        body: dict[str, object] = {"started": list(message.started)}
        if message.error:
            body["error"] = message.error
        self._out.append(SendToClient(ticket.asker, Report(what="join", ok=not message.error, body=body)))

    def on_client_gone(self, client: bytes) -> None:
        """Handle a client that is gone. If it was a host, clients that wait for it to start workers get an error."""
        host = self._registry.connected.pop(client, None)
        if host is None:
            return
        for number in [n for n, ticket in self._registry.tickets.items() if ticket.host == client]:
            reason = f"the `swarm up` on {host.host} (pid {host.pid}) went away before it answered: ask again"
            self._refuse(self._registry.tickets.pop(number).asker, reason)

    def _refuse(self, asker: bytes, reason: str) -> None:
        self._out.append(SendToClient(asker, Report(what="join", ok=False, body={"error": reason})))


def _worker_command(message: Join) -> str:
    """Return the command that starts such a worker beside the broker."""
    device = f" --device {message.device}" if message.device else ""
    limit = f" --memory-limit {message.memory_limit}" if message.memory_limit else ""
    return f"swarm worker{device}{limit}"
