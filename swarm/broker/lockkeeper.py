"""Authentication service of the broker's process: has changes of keys written, sends connected peers what they need
about keys, disconnects revoked keys, and announces the broker on the network."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Final

from swarm.broker.events import Account, KeyRevoked
from swarm.broker.locks import open_lock, without_keys
from swarm.broker.requests.allowance import Allowance
from swarm.errors import ConfigError
from swarm.lock.discovery import announce, own_name
from swarm.lock.whereabouts import why_not_at
from swarm.log import Damper, get_logger
from swarm.wire.channel import AsyncPullChannel, Place, RouterChannel
from swarm.wire.codec import ORDER, SERVER
from swarm.wire.door.keys import KeyPair
from swarm.wire.messages import (
    BrokerKey,
    BrokerKeyKept,
    ClientMessage,
    Denied,
    Hello,
    RotateYours,
    ServerMessage,
    WorkerMessage,
)

if TYPE_CHECKING:
    from swarm.config import Settings

LOOK_S: Final = 5.0  # between two checks whether the old key is still needed

log = get_logger(__name__)


class LockKeeper:
    """Key management of the broker's process (see the module). Without addresses for other machines there are no keys,
    and every local peer has all permissions."""

    def __init__(self, settings: Settings) -> None:
        """Read or make the broker's keys, if other machines are to be served. Raises ConfigError."""
        self._locks = open_lock(settings)
        self._host, self._port = settings.broker.host, settings.broker.port
        self._is_discoverable = settings.broker.discoverable
        self._worker_networks = tuple(map(ipaddress.ip_network, settings.broker.worker_networks))
        # by name: sockets whose peers are checked again when keys change
        self._doors: Mapping[str, RouterChannel | AsyncPullChannel] = {}
        self._front: RouterChannel | None = None
        self._control: RouterChannel | None = None
        self._has_other_key = asyncio.Event()
        self._allowance = Allowance()
        self._damper = Damper()  # limits the log lines about clients that use it up

    # --- sockets -----------------------------------------------------------------------------------------------------

    def places(self, door: str) -> list[Place]:
        """Return the addresses at which this socket listens."""
        return [Place(self._host)] if self._locks is None else self._locks.places(self._host, door)

    def port(self, number: int) -> int | None:
        """Return the port of a socket that is announced to workers, fixed for firewalls. None, without keys: any free
        port."""
        return None if self._locks is None else self._port + number

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses at which other machines are served."""
        return () if self._locks is None else self._locks.addresses

    @property
    def pair(self) -> KeyPair | None:
        """Key pair with which the broker connects to the first stage; made for this process."""
        return None if self._locks is None else self._locks.life

    def keep(
        self,
        doors: Mapping[str, RouterChannel | AsyncPullChannel],
        front: RouterChannel,
        control: RouterChannel,
        feed: Callable[[KeyRevoked], None],
        here: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """Attach the sockets. ``feed`` receives an event for each revoked key. ``here``: returns the names of local
        workers."""
        self._doors, self._front, self._control = doors, front, control
        if self._locks is None:
            return

        def lost(key: str) -> None:
            for channel in doors.values():
                channel.reconsider()
            feed(KeyRevoked(key))

        self._locks.lost, self._locks.renewed, self._locks.ordered = lost, self._renewed, self._ordered
        self._locks.here = here

    def admit(self, door: str, keys: frozenset[str]) -> None:
        """Accept only these keys at the socket from now on."""
        if self._locks is not None:
            self._locks.admit(door, keys)
            self._doors[door].reconsider()

    # --- messages and their senders ----------------------------------------------------------------------------------

    def account(self, key: str) -> Account | None:
        """Return the account of a peer that connected with this key; None: a local peer, or an admin."""
        return self._locks.account(key) if self._locks is not None and key else None

    def owner(self, key: str) -> str:
        """Return the member whose worker this is; empty: a local worker."""
        return "" if self._locks is None else self._locks.owner(key)

    def took(self, client: bytes, key: str, seconds: float, now: float) -> None:
        """Charge a client for the time that its message has taken; beyond its budget, reading from it is paused."""
        if self._locks is None or self._front is None or not self._locks.is_held_to(key):
            return
        if rest_s := self._allowance.spent(key, seconds, now):
            self._front.rest(client, rest_s)
            if (left_out := self._damper.asks(now)) is not None:
                log.warning("client_floods", name=self._locks.owner(key), rest_s=round(rest_s, 2), left_out=left_out)

    def takes(self, client: bytes, key: str, message: ClientMessage) -> bool:
        """Handle a message about keys, or without permission: it is answered now, or when the disk has the change.
        Returns whether it did."""
        if self._locks is not None:
            return self._locks.takes(key, message, lambda answer: self._answer(client, answer))
        if (answer := without_keys(message)) is not None:
            self._answer(client, answer)
        return answer is not None

    def _answer(self, client: bytes, answer: ServerMessage) -> None:
        if self._front is not None:
            self._front.send(client, SERVER.encode(answer))

    def takes_of_worker(self, worker: bytes, key: str, message: WorkerMessage) -> bool:
        """Handle a worker's message about keys, or a Hello with a name that its key does not allow. Returns whether it
        did."""
        if isinstance(message, BrokerKeyKept):
            if self._locks is not None:
                self._locks.keeps(key, message.key)
            return True
        if self._locks is None or not isinstance(message, Hello):
            return False
        if reason := self._locks.why_not_called(key, message.name):
            log.warning("worker_denied", worker=message.name, reason=reason)
            if self._control is not None:
                self._control.send(
                    worker, ORDER.encode(Denied(reason=reason), version=self._control.version_of(worker))
                )
        return bool(reason)

    def why_not_at(self, worker: bytes, key: str, message: WorkerMessage) -> str:
        """Return why other workers may not connect to the address that a worker names; empty: they may. A peer without
        a key is on this machine and has all permissions."""
        if self._control is None or not key or not isinstance(message, Hello):
            return ""
        return why_not_at(message.endpoint, self._control.comes_from(worker), self._worker_networks)

    def greeted(self, door: RouterChannel, peer: bytes, key: str) -> None:
        """Send a peer that has connected what it missed about keys."""
        encode = SERVER.encode if door is self._front else ORDER.encode
        for message in () if self._locks is None else self._locks.to_say(key):
            door.send(peer, encode(message))

    def _renewed(self) -> None:
        self._has_other_key.set()
        if self._locks is not None:
            self._say(BrokerKey(key=self._locks.own.public), lambda key: True)

    def _ordered(self, member: str) -> None:
        self._say(RotateYours(), member.__eq__)

    def _say(self, message: BrokerKey | RotateYours, to: Callable[[str], bool]) -> None:
        for door, frames in ((self._front, SERVER.encode(message)), (self._control, ORDER.encode(message))):
            for peer, key in [] if door is None else door.known():
                if to(key) and door is not None:
                    door.send(peer, frames)  # a peer that does not read gets it when it connects again

    # --- background tasks --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Carry out changes and announcements, until cancelled."""
        if self._locks is None:
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._locks.changes.run())
            group.create_task(self._look_at_the_old_key())
            group.create_task(self._tell_the_network())

    async def _look_at_the_old_key(self) -> None:
        """Drop the old key once it is not needed any more. Polls, since invitations expire without an event."""
        while self._locks is not None:
            await asyncio.sleep(LOOK_S)
            self._locks.put_away_if_known()

    async def _tell_the_network(self) -> None:
        """Announce the broker while it runs, if configured; again after each change of its key."""
        while self._is_discoverable:
            self._has_other_key.clear()
            telling = asyncio.create_task(self._announce(), name="tell the network")
            try:
                await self._has_other_key.wait()
            finally:
                telling.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await telling

    async def _announce(self) -> None:
        """Announce the broker's addresses and key. If that fails, the broker serves nevertheless."""
        if self._locks is None:
            return
        try:
            await announce(own_name(), self._locks.addresses, self._port, self._locks.own.public)
        except ConfigError as error:
            log.warning("not_discoverable", reason=str(error))
