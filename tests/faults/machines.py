"""A swarm on machines of its own: the broker, each worker and the client in a network namespace each, let in by keys.

The test itself is the client's machine: its thread is in that namespace while the swarm lives.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from swarm import AsyncClient
from swarm.auth import invitation
from swarm.auth.access import ROLES
from swarm.cli.joining import join
from swarm.wire.messages import Invite, Role
from swarm.wire.transport.keys import new_pair
from tests.faults.bench import Swarm
from tests.faults.linux import inside
from tests.faults.zygote import HOSTNAME_VARIABLE, NAMESPACE_VARIABLE, Zygote
from tests.integration.hosts import Host, network

PORT = 5700
WORKERS = ("w0", "w1", "w2")


class Machines(Swarm):
    """``hosts``: where the broker (``a``) is, each worker (by its name) and whoever asks (``laptop``)."""

    def __init__(
        self,
        model: Path,
        logs: Path,
        zygote: Zygote,
        hosts: Mapping[str, Host],
        *,
        options: dict[str, str] | None = None,
        broker: str = "a",
    ) -> None:
        self.hosts, self._broker = hosts, broker
        # Tests count on all workers: objective auto would leave some out after a quiet minute.
        options = {"SWARM_PLAN__OBJECTIVE": "throughput"} | (options or {})
        super().__init__(model, logs, zygote, options, state=hosts[broker].home / "broker")
        self.port = PORT
        self.url = self.url_at(hosts[broker].address)
        self._invitation = ""

    @staticmethod
    def url_at(address: str) -> str:
        return f"tcp://{address}:{PORT}"

    def start(self, num_workers: int) -> None:
        self.start_broker(num_workers)
        self._invitation = self.invite("worker", uses=50)
        for name in WORKERS[:num_workers]:
            self.start_worker(name)

    def start_broker(self, min_workers: int = 1, **environment: str) -> None:
        host = self.hosts[self._broker]
        listen = {"SWARM_BROKER__LISTEN": f'["{host.address}"]'}
        super().start_broker(min_workers, **listen, **self._at(self._broker), **environment)

    def start_worker(self, name: str, *more: str, faults: str = "", **environment: str) -> None:
        """It joins by invitation; a later one there is the machine's that has joined."""
        here = self._at(name) | environment
        super().start_worker(name, *more, "--join", self._invitation, faults=faults, **here)

    def _start(self, name: str, arguments: list[str], more: Mapping[str, str]) -> Any:
        if "--join" in arguments:  # the invitation says where to
            at = arguments.index("--url")
            arguments = [*arguments[:at], *arguments[at + 2 :]]
        return super()._start(name, arguments, more)

    def _at(self, host: str) -> dict[str, str]:
        """Every machine has a name of its own, so that cores count as its own, and ways as ways."""
        of = self.hosts[host]
        own = {HOSTNAME_VARIABLE: of.name, "XDG_STATE_HOME": str(of.home / "state")}
        return {NAMESPACE_VARIABLE: of.namespace} | own

    def invite(self, role: Role, uses: int = 1) -> str:
        """As ``swarmctl invite`` on the broker's machine."""
        return invite_at(self.hosts[self._broker], role, uses)

    def let_in(self, host: str, role: Role = "client") -> None:
        """Let somebody on that machine in, as ``swarm generate --join`` does."""
        let_in(self.hosts[host], self.invite(role))


def invite_at(broker: Host, role: Role, uses: int = 1) -> str:
    """Invite somebody, on the broker's machine; `Unavailable` until it listens."""
    with inside(broker.namespace):
        return asyncio.run(_invitation(role, uses))


def let_in(host: Host, line: str) -> None:
    """Have that machine enrol by an invitation."""
    with inside(host.namespace):
        join(line, host.home / "state" / "swarm", name=host.name, roles=ROLES)


async def _invitation(role: Role, uses: int) -> str:
    pair = new_pair()
    async with AsyncClient(f"tcp://127.0.0.1:{PORT}", connect_timeout_s=60.0) as client:
        body = await client.invite(Invite(key=pair.public, role=role, uses=uses, valid_s=3600.0, name=""))
    addresses: Any = body["addresses"]
    return invitation.encode(invitation.Invitation(tuple(addresses), str(body["key"]), pair.secret, role))


@contextmanager
def at(host: Host) -> Iterator[None]:
    """Be on that machine: what is started and asked is in its network, and known by its keys."""
    known_by = {NAMESPACE_VARIABLE: host.namespace, "XDG_STATE_HOME": str(host.home / "state")}
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, known_by))
        stack.enter_context(inside(host.namespace))
        yield


@contextmanager
def machines(
    model: Path, folder: Path, zygote: Zygote, options: dict[str, str] | None = None, more: Sequence[str] = ()
) -> Iterator[Machines]:
    """Three workers serve, and the test is on the client's machine."""
    with network(folder, "a", *WORKERS, "laptop", *more) as hosts:
        logs = folder / "logs"
        logs.mkdir()
        with Machines(model, logs, zygote, hosts, options=options) as swarm:
            swarm.start(3)
            swarm.let_in("laptop")
            with at(hosts["laptop"]):
                yield swarm
