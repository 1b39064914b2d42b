"""Access control of the broker's sockets: which key may connect where, and the messages about keys. A shell around the
key registry.

Without addresses beyond loopback there is none (``open_access_control`` returns None): every local peer has all
permissions. With it, local peers still have; from elsewhere only registered keys are accepted, each with the
permissions of its role.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Final

from swarm.auth import permissions
from swarm.auth.broker_keys import BrokerKeys
from swarm.auth.key_proof import NOT_PROVEN, is_proven
from swarm.auth.registry import KeyRegistry, RegistryRefusal
from swarm.auth.registry_file import RegistryFile
from swarm.broker.auth.writer import ChangeResult, KeyChange, KeyStoreWriter
from swarm.broker.events import ClientAccount
from swarm.errors import ConfigError
from swarm.log import LogRateLimiter, get_logger
from swarm.wire.addresses import resolve_own, with_port
from swarm.wire.channel import BindAddress
from swarm.wire.messages import (
    AdapterCommand,
    BrokerKey,
    BrokerKeyKept,
    ClientMessage,
    Enrol,
    Invite,
    Join,
    Json,
    Malformed,
    PlanCommand,
    Query,
    Rejected,
    Report,
    Revoke,
    Rotate,
    RotateBroker,
    RotateKey,
    RotateMember,
    ServerMessage,
    ShowSettings,
    StopWorker,
    Submit,
)
from swarm.wire.transport.keys import AuthPolicy, new_pair

if TYPE_CHECKING:
    from swarm.config import Settings

# roles accepted at the clients' socket
SERVED_ROLES: Final = frozenset({"client", "gateway", "worker", "admin", "invited"})
ROTATE_EVERY_S: Final = 10.0  # least time between two key changes of a member
KEYS_DIRECTORY: Final = "locked"  # directory of the keys, in the state directory
log = get_logger(__name__)


def open_access_control(settings: Settings) -> AccessControl | None:
    """Read or make the broker's keys, if other machines are to be served; else None. Raises ConfigError."""
    if not settings.broker.listen:
        return None
    if settings.state_dir is None:
        raise ConfigError("broker.listen serves other machines by keys, which must outlive the broker: set --state-dir")
    return AccessControl(settings, settings.state_dir / KEYS_DIRECTORY)


class AccessControl:
    """Access control by keys (see the module).

    ``on_key_lost`` is called with each key that is no longer valid, ``on_broker_key_changed`` when the broker has
    another key, ``on_rotation_ordered`` with each key of a member that must change it. ``local_workers`` returns the
    names of workers on the broker's own machine.
    """

    def __init__(self, settings: Settings, directory: Path) -> None:
        self.broker_keys = BrokerKeys(directory)
        # key pair of the sockets announced at join, and of connections to workers; made for this process
        self.process_pair = new_pair()
        self.addresses = resolve_own(settings.broker.listen)
        self.on_key_lost: Callable[[str], None] = lambda key: None
        self.on_broker_key_changed: Callable[[], None] = lambda: None
        self.on_rotation_ordered: Callable[[str], None] = lambda key: None
        self.local_workers: Callable[[], Collection[str]] = tuple
        port = settings.broker.port
        self._advertised = tuple(with_port(host, port) for host in settings.broker.advertise or self.addresses)
        self._file = RegistryFile(directory / "roll.json")
        self.writer = KeyStoreWriter(self._file, self._on_key_lost)
        self._allowed_keys: dict[str, frozenset[str]] = {}  # by socket: the keys that may connect
        self._rotated_at: dict[str, float] = {}  # by name: time of a member's latest key change, if recent
        self._log_limiter = LogRateLimiter()
        # keys that connected to the broker's old key, and have not confirmed the new one since
        self._unconfirmed: set[str] = set()

    # --- sockets -----------------------------------------------------------------------------------------------------

    def bind_addresses(self, local: str, socket: str) -> list[BindAddress]:
        """Return where a socket listens, with the keys that may connect; clients and control also at loopback, without
        keys."""
        if socket == "client":
            policy = self._make_policy(lambda key: self._role(key) in SERVED_ROLES)
        elif socket == "worker":
            policy = self._make_policy(lambda key: self._role(key) == "worker", self.may_use_identity)
        else:
            policy_for_allowed = AuthPolicy(
                self.process_pair, lambda key: key in self._allowed_keys.get(socket, ()), reject_explicitly=False
            )
            return [BindAddress(host, policy_for_allowed) for host in (local, *self.addresses)]
        return [BindAddress(local), *(BindAddress(host, policy) for host in self.addresses)]

    def _make_policy(
        self, is_authorized: Callable[[str], bool], may_use_identity: Callable[[str, bytes], bool] | None = None
    ) -> AuthPolicy:
        return AuthPolicy(
            self.broker_keys.pairs[0],
            is_authorized,
            key_pairs=lambda: self.broker_keys.pairs,
            on_authenticated=self._on_authenticated,
            may_use_identity=may_use_identity,
        )

    def allow_keys(self, socket: str, keys: frozenset[str]) -> None:
        """Set the allow-list of keys of one of the broker's sockets."""
        self._allowed_keys[socket] = keys

    def _on_key_lost(self, key: str) -> None:
        self.on_key_lost(key)

    def _role(self, key: str) -> str | None:
        return self._file.registry.role_of(key, self._file.now())

    def owner(self, key: str) -> str:
        """Return the member that has this key; empty without a key, or if the key is not registered any more."""
        return self._file.registry.name_of(key)

    def is_limited(self, key: str) -> bool:
        """Whether the key's client is limited to its share of the broker's CPU time. Gateways speak for many users,
        admins may do all."""
        return bool(key) and self._role(key) not in ("gateway", "admin")

    def may_use_identity(self, key: str, identity: bytes) -> bool:
        """Whether this key's owner may use this identity for a worker's connection: the worker's name, followed by a
        random part."""
        name = identity.decode(errors="replace").rpartition("-")[0]
        return not key or self.owner(key) == self._file.registry.owner_of(name) != ""

    def name_error(self, key: str, name: str) -> str:
        """Return why a worker with this key may not have this name; empty: it may. Local workers may have any."""
        own, owner = self.owner(key), self._file.registry.owner_of(name)
        if not key or own == owner != "":
            return ""
        if not own:
            return "the key of this machine was revoked"
        return f"this machine is registered as {own}: its workers must be named {own} or {own}-SOMETHING, not {name}"

    # --- the broker's own key ----------------------------------------------------------------------------------------

    def _on_authenticated(self, key: str, broker_key: str) -> None:
        """Record a connection from ``key``. Its owner authenticated the broker by ``broker_key``."""
        if broker_key == self.broker_keys.public:
            self.record_broker_key(key, broker_key)
        elif self._file.registry.name_of(key):
            self._unconfirmed.add(key)

    def record_broker_key(self, key: str, broker: str) -> None:
        """Record that this key's owner has stored the broker's key, as it reports or as its connection shows."""
        if broker != self.broker_keys.public:
            return
        self._unconfirmed.discard(key)
        if self._file.registry.record_broker_key(key, broker) is not self._file.registry:
            self._submit_own(
                f"keeps {key}",
                lambda roll, now: ChangeResult(roll.record_broker_key(key, broker), after=self.drop_former_key),
            )
        self.drop_former_key()

    def drop_former_key(self) -> None:
        """Drop the broker's former key once all members and holders of invitations have the new one."""
        if self.broker_keys.former is not None and not self._find_outdated():
            self._submit_own("put away", self._drop_former_key)

    def _drop_former_key(self, roll: KeyRegistry, now: float) -> ChangeResult:
        """Drop the former key. Check first, because since this change was queued a member may have appeared that lacks
        the new key."""
        return (
            self._finish_rotation(roll)
            if self.broker_keys.former is not None and not self._find_outdated()
            else ChangeResult(roll)
        )

    def _find_outdated(self) -> list[str]:
        """Return the members and invitations that lack the new key, as text."""
        roll, now = self._file.registry, self._file.now()
        self._unconfirmed = {key for key in self._unconfirmed if roll.name_of(key)}
        behind = roll.members_without_key(self.broker_keys.public, now)
        late = sorted({f"{roll.name_of(key)} ({roll.role_of(key, now)})" for key in self._unconfirmed})
        return behind + [each for each in late if each not in behind]

    @property
    def _reserved_keys(self) -> frozenset[str]:
        return frozenset(pair.public for pair in (*self.broker_keys.pairs, self.process_pair))

    def _rotate_broker_key(self, roll: KeyRegistry, *, is_final: bool) -> ChangeResult:
        if self.broker_keys.former is not None:
            return self._finish_rotation(roll) if is_final else ChangeResult(roll, self._rotation_report())
        if is_final:
            raise RegistryRefusal("the broker has only one key, and none to drop: run the command without --now first")
        try:
            self.broker_keys.check_changeable()
        except ConfigError as error:
            raise RegistryRefusal(str(error)) from None
        return ChangeResult(
            roll.set_default_broker_key(self.broker_keys.public),
            None,
            self.broker_keys.begin_rotation,
            self._on_rotation_started,
        )

    def _on_rotation_started(self) -> None:
        log.warning("broker_key_changes", key=self.broker_keys.public[:16], behind=len(self._find_outdated()))
        self.on_broker_key_changed()
        self.drop_former_key()

    def _finish_rotation(self, roll: KeyRegistry) -> ChangeResult:
        behind = self._find_outdated()

        def log_change() -> None:
            self._unconfirmed.clear()
            log.warning("broker_key_changed", key=self.broker_keys.public[:16], shut_out=behind)

        body: Json = {"key": self.broker_keys.public, "is_over": True, "behind": [], "shut_out": list(behind)}
        return ChangeResult(
            roll, Report(what="rotate_broker", ok=True, body=body), self.broker_keys.finish_rotation, log_change
        )

    def _rotation_report(self) -> Report:
        behind = self._find_outdated()
        is_over = self.broker_keys.former is None or not behind
        body: Json = {"key": self.broker_keys.public, "is_over": is_over, "behind": list(behind), "shut_out": []}
        return Report(what="rotate_broker", ok=True, body=body)

    def pending_messages(self, key: str) -> list[BrokerKey | RotateKey]:
        """Return the messages that a peer with this key must get when it connects."""
        messages: list[BrokerKey | RotateKey] = []
        if key and self.broker_keys.former is not None:
            messages.append(BrokerKey(key=self.broker_keys.public))
        if key and self._file.registry.must_rotate(key):
            messages.append(RotateKey())
        return messages

    # --- client messages ---------------------------------------------------------------------------------------------

    def account(self, key: str) -> ClientAccount | None:
        """Return the account of a peer that connected with this key; None for a local peer or an admin."""
        role = self._role(key) if key else "admin"
        return None if role == "admin" else ClientAccount(f"key:{self._file.registry.name_of(key)}", role == "gateway")

    def handle_client_message(self, key: str, message: ClientMessage, reply: Callable[[ServerMessage], None]) -> bool:
        """Answer a message about keys, or reject a message that the key's role does not permit.

        ``reply`` is called with the answer: immediately, or once the change is on the disk. Returns False for a message
        that the broker's core must answer.
        """
        role = self._role(key) if key else "admin"
        self._on_connected(key)
        if (refusal := permissions.deny_reason(role, message)) or role is None:
            reply(_refusal_message(message, refusal or "this key was revoked"))
            return True
        if isinstance(message, BrokerKeyKept):
            self.record_broker_key(key, message.key)
            return True
        if isinstance(message, Query) and message.what == "keys":
            reply(Report(what="keys", ok=True, body=self._keys_report()))
            return True
        if (change := self._change_for(key, message)) is None:
            return False

        def on_done(outcome: ServerMessage | RegistryRefusal | None) -> None:
            if isinstance(outcome, RegistryRefusal):
                reply(_refusal_message(message, str(outcome)))
            else:
                reply(self._rotation_report() if outcome is None else outcome)

        try:
            self.writer.submit(change, on_done)
        except RegistryRefusal as error:
            reply(_refusal_message(message, str(error)))
        return True

    def _keys_report(self) -> Json:
        roll = self._file.registry
        report = roll.report(self._file.now(), self.broker_keys.public)
        late = {roll.name_of(key) for key in self._unconfirmed}
        members = report["members"]
        assert isinstance(members, list)
        for row in members:
            if isinstance(row, dict) and row["name"] in late:
                row["knows_broker"] = False
        former = (self.broker_keys.former or "")[:16]
        return {**report, "key": self.broker_keys.public, "former_key": former, "locked": True}

    def _change_for(self, key: str, message: ClientMessage) -> KeyChange | None:  # noqa: PLR0911 (one for each kind)
        match message:
            case Enrol():
                return lambda roll, now: self._enrol(roll, now, key, message)
            case Invite():
                return lambda roll, now: self._invite(roll, now, message)
            case Revoke(name=name):
                return lambda roll, now: self._revoke(roll, now, name)
            case Rotate(key=successor):
                return lambda roll, now: self._register_successor(roll, key, successor)
            case RotateMember(name=name):
                return lambda roll, now: self._order_rotation(roll, name)
            case RotateBroker(now=is_last_word):
                return lambda roll, now: self._rotate_broker_key(roll, is_final=is_last_word)
        return None

    def _enrol(self, roll: KeyRegistry, now: float, key: str, message: Enrol) -> ChangeResult:
        """Register a key. A client that connected by the broker's old key gets the new one, and confirms it by its next
        connection."""
        if not is_proven(message.proof, message.key, key, self.broker_keys.pairs):
            raise RegistryRefusal(NOT_PROVEN)
        expected_key = self.broker_keys.former or self.broker_keys.public
        new, enrolled = roll.enrol(
            key, message, now, broker=expected_key, local_workers=self.local_workers(), reserved=self._reserved_keys
        )
        name, role = enrolled.name, enrolled.role
        return ChangeResult(
            new, enrolled, after=lambda: log.info("key_enrolled", name=name, role=role, key=message.key[:16])
        )

    def _invite(self, roll: KeyRegistry, now: float, message: Invite) -> ChangeResult:
        new = roll.invite(message, now, self.broker_keys.public, self._reserved_keys)
        body: Json = {
            "addresses": list(self._advertised),
            "key": self.broker_keys.public,
            "expires_at": now + message.valid_s,
            "name": message.name,
        }
        return ChangeResult(
            new,
            Report(what="invite", ok=True, body=body),
            after=lambda: log.info("invited", role=message.role, uses=message.uses, valid_s=message.valid_s),
        )

    def _revoke(self, roll: KeyRegistry, now: float, name: str) -> ChangeResult:
        def complete_revocation() -> None:
            log.warning("key_revoked", name=name)
            self.drop_former_key()

        return ChangeResult(
            roll.revoke(name, now),
            Report(what="revoke", ok=True, body={"name": name}),
            after=complete_revocation,
            disconnects=True,
        )

    def _register_successor(self, roll: KeyRegistry, key: str, successor: str) -> ChangeResult:
        """Register a member's next key. Rate-limited, since each change is written to the disk before other members'
        changes."""
        new, report = roll.rotate(key, successor, self._reserved_keys), Report(what="rotate", ok=True, body={})
        if new is roll:
            return ChangeResult(roll, report)  # a repeated message
        name, now = new.name_of(key), time.monotonic()
        if now - self._rotated_at.get(name, -ROTATE_EVERY_S) < ROTATE_EVERY_S:
            raise RegistryRefusal(f"the key of {name} was changed just now: wait {ROTATE_EVERY_S:g} seconds")
        recent = {each: at for each, at in self._rotated_at.items() if now - at < ROTATE_EVERY_S}
        self._rotated_at = recent | {name: now}
        return ChangeResult(new, report, after=lambda: log.info("key_announced", name=name))

    def _order_rotation(self, roll: KeyRegistry, name: str) -> ChangeResult:
        new = roll.request_rotation(name)
        (member,) = (each for each in new.members if each.must_rotate and each.is_identified_by(name))

        def send_orders() -> None:
            log.info("key_change_ordered", name=member.name)
            for key in member.keys:
                self.on_rotation_ordered(key)

        return ChangeResult(new, Report(what="rotate_member", ok=True, body={"name": member.name}), after=send_orders)

    def _on_connected(self, key: str) -> None:
        """Drop a member's old key once it has connected with its new one."""
        if key and self._file.registry.record_use(key) is not self._file.registry:
            self._submit_own(f"used {key}", lambda roll, now: ChangeResult(roll.record_use(key), disconnects=True))

    def _submit_own(self, name: str, change: KeyChange) -> None:
        """Queue a change that no client asked for. If it can't be written, it is tried again later."""

        def on_done(outcome: ServerMessage | RegistryRefusal | None) -> None:
            if isinstance(outcome, RegistryRefusal):
                self._log_write_error(outcome)

        try:
            self.writer.submit(change, on_done, name)
        except RegistryRefusal as error:
            self._log_write_error(error)

    def _log_write_error(self, reason: RegistryRefusal) -> None:
        if (left_out := self._log_limiter.take(time.monotonic())) is not None:
            log.warning("keys_not_written", reason=str(reason), left_out=left_out)


def answer_without_keys(message: ClientMessage) -> ServerMessage | None:
    """Answer messages about keys where the broker has none; None for other messages."""
    match message:
        case Query(what="keys"):
            return Report(what="keys", ok=True, body={"members": [], "invitations": [], "key": "", "locked": False})
        case Enrol() | Invite() | Revoke() | Rotate() | RotateBroker() | RotateMember() | BrokerKeyKept():
            text = "this broker serves its own machine only, and without keys: start it with --listen ADDRESS"
            return _refusal_message(message, text)
    return None


def _refusal_message(message: ClientMessage, reason: str) -> ServerMessage:
    match message:
        case Submit(request_id=request_id):
            return Rejected(request_id=request_id, code="forbidden", reason=reason)
        case Query(what=what):
            return Report(what=what, ok=False, body={"error": reason})
        case RotateBroker() | RotateMember():
            about = "rotate_broker" if isinstance(message, RotateBroker) else "rotate_member"
            return Report(what=about, ok=False, body={"error": reason})
        case Invite() | Revoke() | Rotate() | Join():
            return Report(what=type(message).__name__.lower(), ok=False, body={"error": reason})
        case StopWorker() | PlanCommand() | ShowSettings() | AdapterCommand():
            about = {
                StopWorker: "stop",
                PlanCommand: "steer",
                ShowSettings: "settings",
                AdapterCommand: "adapters",
            }[type(message)]
            return Report(what=about, ok=False, body={"error": reason})
    return Malformed(reason=reason)
