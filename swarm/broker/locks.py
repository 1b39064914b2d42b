"""Access control of the broker's sockets: which key may connect where, and the messages about keys. A shell around the
key registry.

Without addresses beyond loopback there is none (``open_lock`` returns None): every local peer has all permissions. With
it, local peers still have; from elsewhere only registered keys are accepted, each with the permissions of its role.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Final

from swarm.broker.changes import Change, Changes, Done
from swarm.broker.events import Account
from swarm.errors import ConfigError
from swarm.lock import rights
from swarm.lock.file import RollFile
from swarm.lock.ownkeys import OwnKeys
from swarm.lock.possession import NOT_PROVEN, is_proven
from swarm.lock.roll import Refusal, Roll
from swarm.log import Damper, get_logger
from swarm.wire.addresses import own, with_port
from swarm.wire.channel import Place
from swarm.wire.door.keys import Lock, new_pair
from swarm.wire.messages import (
    BrokerKey,
    BrokerKeyKept,
    ClientMessage,
    Enrol,
    Invite,
    Join,
    Json,
    Malformed,
    Query,
    Rejected,
    Report,
    Revoke,
    Rotate,
    RotateBroker,
    RotateMember,
    RotateYours,
    ServerMessage,
    ShowSettings,
    Steer,
    StopWorker,
    Submit,
)

if TYPE_CHECKING:
    from swarm.config import Settings

SERVED: Final = frozenset({"client", "gateway", "worker", "admin", "invited"})  # roles accepted at the clients' socket
ROTATE_EVERY_S: Final = 10.0  # least time between two key changes of a member
LOCKED: Final = "locked"  # directory of the keys, in the state directory
log = get_logger(__name__)


def open_lock(settings: Settings) -> Locks | None:
    """Read or make the broker's keys, if other machines are to be served; else None. Raises ConfigError."""
    if not settings.broker.listen:
        return None
    if settings.state_dir is None:
        raise ConfigError("broker.listen serves other machines by keys, which must outlive the broker: set --state-dir")
    return Locks(settings, settings.state_dir / LOCKED)


class Locks:
    """Access control by keys (see the module). ``lost``: called with each key that is no longer valid. ``renewed``:
    called when the broker has another key. ``ordered``: called with each key of a member that must change it. ``here``:
    returns the names of workers on the broker's own machine."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        self.own = OwnKeys(directory)
        # key pair of the sockets announced at join, and of connections to workers; made for this process
        self.life = new_pair()
        self.addresses = own(settings.broker.listen)
        self.lost: Callable[[str], None] = lambda key: None
        self.renewed: Callable[[], None] = lambda: None
        self.ordered: Callable[[str], None] = lambda key: None
        self.here: Callable[[], Collection[str]] = tuple
        port = settings.broker.port
        self._told = tuple(with_port(host, port) for host in settings.broker.advertise or self.addresses)
        self._file = RollFile(directory / "roll.json")
        self.changes = Changes(self._file, self._lost)
        self._admitted: dict[str, frozenset[str]] = {}  # by socket: the keys that may connect
        self._rotated_at: dict[str, float] = {}  # by name: time of a member's latest key change, if recent
        self._damper = Damper()
        # keys that connected to the broker's old key, and have not confirmed the new one since
        self._late: set[str] = set()

    # --- sockets -----------------------------------------------------------------------------------------------------

    def places(self, local: str, door: str) -> list[Place]:
        """Return where a socket listens, with the keys that may connect; clients and control also at loopback, without
        keys."""
        if door == "client":
            lock = self._lock(lambda key: self._role(key) in SERVED)
        elif door == "worker":
            lock = self._lock(lambda key: self._role(key) == "worker", self.is_named_by)
        else:
            heard = Lock(self.life, lambda key: key in self._admitted.get(door, ()), says_no=False)
            return [Place(host, heard) for host in (local, *self.addresses)]
        return [Place(local), *(Place(host, lock) for host in self.addresses)]

    def _lock(self, opens: Callable[[str], bool], names: Callable[[str, bytes], bool] | None = None) -> Lock:
        return Lock(self.own.pairs[0], opens, answers=lambda: self.own.pairs, came=self._came, names=names)

    def admit(self, door: str, keys: frozenset[str]) -> None:
        """Accept only these keys at the socket from now on."""
        self._admitted[door] = keys

    def _lost(self, key: str) -> None:
        self.lost(key)

    def _role(self, key: str) -> str | None:
        return self._file.roll.role_of(key, self._file.now())

    def owner(self, key: str) -> str:
        """Return the member whose key this is; empty: no key, or one that is not registered any more."""
        return self._file.roll.name_of(key)

    def is_held_to(self, key: str) -> bool:
        """Whether the key's client is limited to its share of the broker's CPU time. Gateways speak for many users,
        admins may do all."""
        return bool(key) and self._role(key) not in ("gateway", "admin")

    def is_named_by(self, key: str, identity: bytes) -> bool:
        """Whether this key's owner may use this identity for a worker's connection: the worker's name, followed by a
        random part."""
        name = identity.decode(errors="replace").rpartition("-")[0]
        return not key or self.owner(key) == self._file.roll.owner_of(name) != ""

    def why_not_called(self, key: str, name: str) -> str:
        """Return why a worker with this key may not have this name; empty: it may. Local workers may have any."""
        own, owner = self.owner(key), self._file.roll.owner_of(name)
        if not key or own == owner != "":
            return ""
        if not own:
            return "the key of this machine was revoked"
        return f"this machine is registered as {own}: its workers must be named {own} or {own}-SOMETHING, not {name}"

    # --- the broker's own key ----------------------------------------------------------------------------------------

    def _came(self, key: str, door: str) -> None:
        """Record a connection from ``key``, whose owner authenticated the broker by the broker's key ``door``."""
        if door == self.own.public:
            self.keeps(key, door)
        elif self._file.roll.name_of(key):
            self._late.add(key)

    def keeps(self, key: str, broker: str) -> None:
        """Record that this key's owner has stored the broker's key, as it reports or as its connection shows."""
        if broker != self.own.public:
            return
        self._late.discard(key)
        if self._file.roll.keeps(key, broker) is not self._file.roll:
            self._by_itself(
                f"keeps {key}", lambda roll, now: Done(roll.keeps(key, broker), after=self.put_away_if_known)
            )
        self.put_away_if_known()

    def put_away_if_known(self) -> None:
        """Drop the broker's former key once all members and holders of invitations have the new one."""
        if self.own.former is not None and not self._behind():
            self._by_itself("put away", self._put_away_if_known)

    def _put_away_if_known(self, roll: Roll, now: float) -> Done:
        """Drop the former key, unless a member lacks the new one by now; none did when this change was queued."""
        return self._finished(roll) if self.own.former is not None and not self._behind() else Done(roll)

    def _behind(self) -> list[str]:
        """Return the members and invitations that lack the new key, as text."""
        roll, now = self._file.roll, self._file.now()
        self._late = {key for key in self._late if roll.name_of(key)}
        behind = roll.behind(self.own.public, now)
        late = sorted({f"{roll.name_of(key)} ({roll.role_of(key, now)})" for key in self._late})
        return behind + [each for each in late if each not in behind]

    @property
    def _own_keys(self) -> frozenset[str]:
        return frozenset(pair.public for pair in (*self.own.pairs, self.life))

    def _change_own(self, roll: Roll, *, is_last_word: bool) -> Done:
        if self.own.former is not None:
            return self._finished(roll) if is_last_word else Done(roll, self._told_of_own())
        if is_last_word:
            raise Refusal("the broker has only one key, and none to drop: run the command without --now first")
        try:
            self.own.demand_own()
        except ConfigError as error:
            raise Refusal(str(error)) from None
        return Done(roll.known_as(self.own.public), None, self.own.begin, self._begun)

    def _begun(self) -> None:
        log.warning("broker_key_changes", key=self.own.public[:16], behind=len(self._behind()))
        self.renewed()
        self.put_away_if_known()

    def _finished(self, roll: Roll) -> Done:
        behind = self._behind()

        def after() -> None:
            self._late.clear()
            log.warning("broker_key_changed", key=self.own.public[:16], shut_out=behind)

        body: Json = {"key": self.own.public, "is_over": True, "behind": [], "shut_out": list(behind)}
        return Done(roll, Report(what="rotate_broker", ok=True, body=body), self.own.finish, after)

    def _told_of_own(self) -> Report:
        behind = self._behind()
        is_over = self.own.former is None or not behind
        body: Json = {"key": self.own.public, "is_over": is_over, "behind": list(behind), "shut_out": []}
        return Report(what="rotate_broker", ok=True, body=body)

    def to_say(self, key: str) -> list[BrokerKey | RotateYours]:
        """Return the messages that a peer with this key must get when it connects."""
        said: list[BrokerKey | RotateYours] = []
        if key and self.own.former is not None:
            said.append(BrokerKey(key=self.own.public))
        if key and self._file.roll.must_rotate(key):
            said.append(RotateYours())
        return said

    # --- client messages ---------------------------------------------------------------------------------------------

    def account(self, key: str) -> Account | None:
        """Return the account of a peer that connected with this key; None: a local peer, or an admin."""
        role = self._role(key) if key else "admin"
        return None if role == "admin" else Account(f"key:{self._file.roll.name_of(key)}", role == "gateway")

    def takes(self, key: str, message: ClientMessage, say: Callable[[ServerMessage], None]) -> bool:
        """Handle a message that is about keys, or that this key's role does not permit: ``say`` is called with the
        answer, now or when the disk has the change. Returns False for a message that the core must answer."""
        role = self._role(key) if key else "admin"
        self._knocked(key)
        if (refusal := rights.refusal(role, message)) or role is None:
            say(_refused(message, refusal or "this key was revoked"))
            return True
        if isinstance(message, BrokerKeyKept):
            self.keeps(key, message.key)
            return True
        if isinstance(message, Query) and message.what == "keys":
            say(Report(what="keys", ok=True, body=self._told_of_all()))
            return True
        if (change := self._change_for(key, message)) is None:
            return False

        def answered(outcome: ServerMessage | Refusal | None) -> None:
            if isinstance(outcome, Refusal):
                say(_refused(message, str(outcome)))
            else:
                say(self._told_of_own() if outcome is None else outcome)

        try:
            self.changes.ask(change, answered)
        except Refusal as error:
            say(_refused(message, str(error)))
        return True

    def _told_of_all(self) -> Json:
        roll = self._file.roll
        told = roll.told(self._file.now(), self.own.public)
        late = {roll.name_of(key) for key in self._late}
        members = told["members"]
        assert isinstance(members, list)
        for row in members:
            if isinstance(row, dict) and row["name"] in late:
                row["knows_broker"] = False
        former = (self.own.former or "")[:16]
        return {**told, "key": self.own.public, "former_key": former, "locked": True}

    # one return for each kind
    def _change_for(self, key: str, message: ClientMessage) -> Change | None:  # noqa: PLR0911 (one for each kind)
        match message:
            case Enrol():
                return lambda roll, now: self._enrolled(roll, now, key, message)
            case Invite():
                return lambda roll, now: self._invited(roll, now, message)
            case Revoke(name=name):
                return lambda roll, now: self._revoked(roll, now, name)
            case Rotate(key=successor):
                return lambda roll, now: self._announced(roll, key, successor)
            case RotateMember(name=name):
                return lambda roll, now: self._ordered(roll, name)
            case RotateBroker(now=is_last_word):
                return lambda roll, now: self._change_own(roll, is_last_word=is_last_word)
        return None

    def _enrolled(self, roll: Roll, now: float, key: str, message: Enrol) -> Done:
        """Register a key. A client that connected by the broker's old key gets the new one, and confirms it by its next
        connection."""
        if not is_proven(message.proof, message.key, key, self.own.pairs):
            raise Refusal(NOT_PROVEN)
        known = self.own.former or self.own.public
        new, enrolled = roll.enrol(key, message, now, broker=known, here=self.here(), reserved=self._own_keys)
        name, role = enrolled.name, enrolled.role
        return Done(new, enrolled, after=lambda: log.info("key_enrolled", name=name, role=role, key=message.key[:16]))

    def _invited(self, roll: Roll, now: float, message: Invite) -> Done:
        new = roll.invite(message, now, self.own.public, self._own_keys)
        body: Json = {
            "addresses": list(self._told),
            "key": self.own.public,
            "expires_at": now + message.valid_s,
            "name": message.name,
        }
        return Done(
            new,
            Report(what="invite", ok=True, body=body),
            after=lambda: log.info("invited", role=message.role, uses=message.uses, valid_s=message.valid_s),
        )

    def _revoked(self, roll: Roll, now: float, name: str) -> Done:
        def after() -> None:
            log.warning("key_revoked", name=name)
            self.put_away_if_known()

        return Done(
            roll.revoke(name, now), Report(what="revoke", ok=True, body={"name": name}), after=after, hangs_up=True
        )

    def _announced(self, roll: Roll, key: str, successor: str) -> Done:
        """Register a member's next key. Rate-limited, since each change is written to the disk before other members'
        changes."""
        new, report = roll.rotate(key, successor, self._own_keys), Report(what="rotate", ok=True, body={})
        if new is roll:
            return Done(roll, report)  # a repeated message
        name, now = new.name_of(key), time.monotonic()
        if now - self._rotated_at.get(name, -ROTATE_EVERY_S) < ROTATE_EVERY_S:
            raise Refusal(f"the key of {name} was changed just now: wait {ROTATE_EVERY_S:g} seconds")
        lately = {each: at for each, at in self._rotated_at.items() if now - at < ROTATE_EVERY_S}
        self._rotated_at = lately | {name: now}
        return Done(new, report, after=lambda: log.info("key_announced", name=name))

    def _ordered(self, roll: Roll, name: str) -> Done:
        new = roll.order(name)
        (member,) = (each for each in new.members if each.must_rotate and each.is_called(name))

        def after() -> None:
            log.info("key_change_ordered", name=member.name)
            for key in member.keys:
                self.ordered(key)

        return Done(new, Report(what="rotate_member", ok=True, body={"name": member.name}), after=after)

    def _knocked(self, key: str) -> None:
        """Drop a member's old key once it has connected with its new one."""
        if key and self._file.roll.knocked(key) is not self._file.roll:
            self._by_itself(f"knocked {key}", lambda roll, now: Done(roll.knocked(key), hangs_up=True))

    def _by_itself(self, name: str, change: Change) -> None:
        """Queue a change that no client asked for. If it can't be written, it is tried again later."""

        def answered(outcome: ServerMessage | Refusal | None) -> None:
            if isinstance(outcome, Refusal):
                self._not_written(outcome)

        try:
            self.changes.ask(change, answered, name)
        except Refusal as error:
            self._not_written(error)

    def _not_written(self, reason: Refusal) -> None:
        if (left_out := self._damper.asks(time.monotonic())) is not None:
            log.warning("keys_not_written", reason=str(reason), left_out=left_out)


def without_keys(message: ClientMessage) -> ServerMessage | None:
    """Answer messages about keys where the broker has none; None for other messages."""
    match message:
        case Query(what="keys"):
            return Report(what="keys", ok=True, body={"members": [], "invitations": [], "key": "", "locked": False})
        case Enrol() | Invite() | Revoke() | Rotate() | RotateBroker() | RotateMember() | BrokerKeyKept():
            text = "this broker serves its own machine only, and without keys: start it with --listen ADDRESS"
            return _refused(message, text)
    return None


def _refused(message: ClientMessage, reason: str) -> ServerMessage:
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
        case StopWorker() | Steer() | ShowSettings():
            about = {StopWorker: "stop", Steer: "steer", ShowSettings: "settings"}[type(message)]
            return Report(what=about, ok=False, body={"error": reason})
    return Malformed(reason=reason)
