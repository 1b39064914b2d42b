"""Key registry: the allow-list of members with their roles, and open invitations. Pure.

Each operation returns a new registry, or raises Refusal. Three kinds of keys are valid: a member's key; the key that a
member has announced (``rotate``), in addition to the old one, until the member has used it; and an invitation's key,
while it has uses left and has not expired, for enrolling only.

Each entry also records which public key of the broker its owner has (``broker``), because the broker rotates its key,
too.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Annotated, Final

import msgspec

from swarm.errors import ConfigError
from swarm.wire.messages import Enrol, Enrolled, Invite, Json, PublicKey, Role

MAX_MEMBERS: Final = 4096
MAX_INVITED: Final = 1024
MAX_RETIRED: Final = 8192
MAX_NAME: Final = 64  # Characters.
MAX_EXPIRED: Final = 64  # Expired invitations that are still listed.
SHOWN_EXPIRED_S: Final = 86_400.0
SHOWN: Final = 16  # Digits of a key shown in lists.
_FEWEST_DIGITS: Final = 8  # Minimum length of a key prefix that identifies a key.
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9._@-]+")

_Name = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]


class Refusal(Exception):
    """A registry operation was refused; the text is the reason, fit for the requesting user."""


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A registered machine.

    ``next``: its announced next key. ``since``: seconds since 1970. ``broker``: the broker's public key that it was
    last seen to use; None: it has only ever had one. ``must_rotate``: it shall rotate its key when it connects next.
    """

    name: _Name
    role: Role
    key: PublicKey
    since: float
    invited_by: str = ""  # First digits of the invitation's key; empty for members added otherwise.
    next: PublicKey | None = None
    broker: PublicKey | None = None
    must_rotate: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,) if self.next is None else (self.key, self.next)

    def is_called(self, name: str) -> bool:
        """Whether this name or key prefix identifies the member."""
        return _is_called(name, self.name, self.keys)


class Invited(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An open invitation as the broker stores it, without the secret. ``name``: name for the machine that uses it.
    ``broker``: the broker's public key in it."""

    key: PublicKey
    role: Role
    uses: int  # Enrolments left.
    expires_at: float  # Seconds since 1970.
    since: float
    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""
    broker: PublicKey | None = None


class Retired(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A revoked key. The key is never accepted again, and the name is not given to another machine, because it was
    charged for its use."""

    name: _Name
    key: PublicKey


class Roll:
    """Immutable key registry: an allow-list of members and invitations by key."""

    __slots__ = ("_by_invitation", "_by_key", "invited", "members", "retired")

    def __init__(
        self, members: Sequence[Member] = (), invited: Sequence[Invited] = (), retired: Sequence[Retired] = ()
    ) -> None:
        """Raises ConfigError for a duplicate name or key. Of revoked keys only the latest are kept."""
        self.members, self.invited, self.retired = tuple(members), tuple(invited), tuple(retired)[-MAX_RETIRED:]
        self._by_key = {key: member for member in self.members for key in member.keys}  # Includes announced next keys.
        self._by_invitation = {each.key: each for each in self.invited}
        keys = [key for member in self.members for key in member.keys] + [each.key for each in self.invited]
        for what in (keys, [member.name for member in self.members]):
            if twice := [value for value, count in Counter(what).items() if count > 1]:
                raise ConfigError(f"{twice[0]!r} is in the registry twice")

    @property
    def keys(self) -> frozenset[str]:
        """Return all valid keys, including those of invitations."""
        return frozenset(self._by_key) | frozenset(self._by_invitation)

    def role_of(self, key: str, now: float) -> str | None:
        """Return the role of this key now, or "invited"; None if it is not valid."""
        if (member := self._by_key.get(key)) is not None:
            return member.role
        invited = self._by_invitation.get(key)
        return "invited" if invited is not None and now < invited.expires_at else None

    def name_of(self, key: str) -> str:
        """Return the member's name for this key; empty if no member has it."""
        member = self._by_key.get(key)
        return "" if member is None else member.name

    def owner_of(self, worker: str) -> str:
        """Return the member that this worker name belongs to (the longest matching member name); empty if none."""
        fitting = [each.name for each in self.members if each.role == "worker" and is_called(each.name, worker)]
        return max(fitting, key=len, default="")

    # --- operations
    # ------------------------------------------------------------------------------------------------------

    def invite(self, message: Invite, now: float, broker: str | None = None, reserved: Collection[str] = ()) -> Roll:
        """Add an invitation. ``reserved``: keys that no peer may use, the broker's own."""
        if message.name and not _NAME.fullmatch(message.name):
            raise Refusal(f"a name is 1 to {MAX_NAME} letters, digits and . _ @ -, not {message.name!r}")
        known = self._by_invitation.get(message.key)
        if known is not None and known.role == message.role and now < known.expires_at:
            return self  # A repetition, because the answer was lost.
        self._check_unused(message.key, reserved)
        open_ = self._open(now)
        if len(open_) >= MAX_INVITED:
            raise Refusal(f"there are {MAX_INVITED} invitations, which is the limit: revoke some (swarmctl keys list)")
        new = Invited(message.key, message.role, message.uses, now + message.valid_s, now, message.name, broker)
        return Roll(self.members, (*self._expired(now), *open_, new), self.retired)

    def enrol(
        self,
        invitation: str,
        message: Enrol,
        now: float,
        *,
        broker: str | None = None,
        here: Collection[str] = (),
        reserved: Collection[str] = (),
    ) -> tuple[Roll, Enrolled]:
        """Register the own key of a peer that authenticated with an invitation; costs one use. A repetition costs none.

        ``local_workers``: names of workers that belong to no member. ``reserved``: as for ``invite``.
        """
        invited = self._by_invitation.get(invitation)
        if invited is None or now >= invited.expires_at:
            raise Refusal("this invitation has been used, has expired or was revoked: ask for another")
        member = self._by_key.get(message.key)
        if member is not None and member.invited_by == invitation[:SHOWN]:
            return self, Enrolled(name=member.name, role=member.role)
        self._check_unused(message.key, reserved)
        if len(self.members) >= MAX_MEMBERS:
            raise Refusal(
                f"{MAX_MEMBERS} keys are registered here, which is the limit: revoke some (swarmctl keys list)"
            )
        name = self._free(invited.name or message.name, invited.role, here)
        new = Member(name, invited.role, message.key, now, invitation[:SHOWN], broker=broker)
        left = msgspec.structs.replace(invited, uses=invited.uses - 1)
        others = [left if each is invited else each for each in self._open(now)]
        open_ = [each for each in others if each.uses > 0]
        roll = Roll((*self.members, new), (*self._expired(now), *open_), self.retired)
        return roll, Enrolled(name=name, role=invited.role)

    def revoke(self, name: str, now: float) -> Roll:
        """Revoke a member with all its keys and the invitation it used, which it may still have; or revoke an
        invitation.

        Both are identified by name or key prefix. Expired invitations are ignored.
        """
        found: list[Member | Invited] = [each for each in self.members if each.is_called(name)]
        found += [each for each in self._open(now) if _is_called(name, each.name, (each.key,))]
        gone = _the_one(name, found)
        if isinstance(gone, Invited):
            return Roll(self.members, [i for i in self.invited if i is not gone], self.retired)
        others = [i for i in self.invited if not gone.invited_by or not i.key.startswith(gone.invited_by)]
        retired = (*self.retired, *(Retired(gone.name, key) for key in gone.keys))
        return Roll([m for m in self.members if m is not gone], others, retired)

    def rotate(self, old: str, new: str, reserved: Collection[str] = ()) -> Roll:
        """Record a member's announced next key; both keys are valid until the new one is used. ``reserved``: as for
        ``invite``."""
        member = self._by_key.get(old)
        if member is None:
            raise Refusal("this connection has no key that could be changed")
        if new in (member.next, member.key):
            return self  # A repetition.
        self._check_unused(new, reserved)
        return self._with(member, msgspec.structs.replace(member, key=old, next=new))

    def order(self, name: str) -> Roll:
        """Request that a member rotate its key when it connects next (``must_rotate``)."""
        found: list[Member | Invited] = [each for each in self.members if each.is_called(name)]
        member = _the_one(name, found)
        assert isinstance(member, Member)
        return self if member.must_rotate else self._with(member, msgspec.structs.replace(member, must_rotate=True))

    def must_rotate(self, key: str) -> bool:
        member = self._by_key.get(key)
        return member is not None and member.must_rotate

    def knocked(self, key: str) -> Roll:
        """Record that a peer has authenticated with this key. If it is an announced one, it replaces the old key.
        Returns this registry itself if nothing changes."""
        member = self._by_key.get(key)
        if member is None or key != member.next:
            return self
        return self._with(member, msgspec.structs.replace(member, key=key, next=None, must_rotate=False))

    def known_as(self, broker: str) -> Roll:
        """Record the key that the broker has had so far for all entries that have none, at its first rotation."""
        members = [each if each.broker else msgspec.structs.replace(each, broker=broker) for each in self.members]
        invited = [each if each.broker else msgspec.structs.replace(each, broker=broker) for each in self.invited]
        return Roll(members, invited, self.retired)

    def keeps(self, key: str, broker: str) -> Roll:
        """Record that the owner of this key has stored this public key of the broker. Returns this registry itself if
        that is nothing new."""
        member = self._by_key.get(key)
        if member is None or member.broker == broker:
            return self
        return self._with(member, msgspec.structs.replace(member, broker=broker))

    def behind(self, broker: str, now: float) -> list[str]:
        """Describe the members and invitations that still have another key of the broker."""
        members = [f"{each.name} ({each.role})" for each in self.members if each.broker not in (None, broker)]
        return members + [
            f"the invitation {each.name or each.key[:SHOWN]} (for a {each.role})"
            for each in self._open(now)
            if each.broker not in (None, broker)
        ]

    def told(self, now: float, broker: str = "") -> Json:
        """Return the report of ``swarmctl keys list``. ``broker``: its public key. Expired invitations are listed for a
        day."""
        return {
            "members": [
                {
                    "name": each.name,
                    "role": each.role,
                    "key": each.key[:SHOWN],
                    "since": each.since,
                    "invited_by": each.invited_by,
                    "is_rotating": each.next is not None or each.must_rotate,
                    "knows_broker": each.broker in (None, broker),
                }
                for each in self.members
            ],
            "invitations": [
                {
                    "name": each.name,
                    "role": each.role,
                    "key": each.key[:SHOWN],
                    "since": each.since,
                    "uses_left": each.uses,
                    "expires_in_s": each.expires_at - now,
                    "expired": now >= each.expires_at,
                    "knows_broker": each.broker in (None, broker),
                }
                for each in (*self._expired(now), *self._open(now))
            ],
        }

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _check_unused(self, key: str, reserved: Collection[str]) -> None:
        """Raise Refusal for a key that is or was in use."""
        if key in reserved:
            raise Refusal("this is the broker's own key: make one of your own")
        if key in self._by_key:
            raise Refusal("this key is in use already: make another one")
        if key in self._by_invitation:
            raise Refusal("this key is in use already, as an invitation's: make one of your own")
        if any(each.key == key for each in self.retired):
            raise Refusal("this key was revoked: make another one")

    def _open(self, now: float) -> list[Invited]:
        return [each for each in self.invited if now < each.expires_at]

    def _expired(self, now: float) -> list[Invited]:
        """Return the latest invitations that expired within a day, so that a user can see why one did not work."""
        found = [each for each in self.invited if 0 <= now - each.expires_at < SHOWN_EXPIRED_S]
        return sorted(found, key=lambda each: each.expires_at)[-MAX_EXPIRED:]

    def _with(self, former: Member, member: Member) -> Roll:
        return Roll([member if each is former else each for each in self.members], self.invited, self.retired)

    def _free(self, wanted: str, role: str, here: Collection[str]) -> str:
        """Return an unused name: the wanted one after removing invalid characters, with a number if it is taken.

        A name is taken if a member has or had it, if it would be a worker name of another member, or if it would make a
        present worker look like one of this member.
        """
        cleaned = _NO_NAME.sub("-", wanted).lstrip("._@-")[:MAX_NAME] or role
        taken = {each.name for each in self.members} | {each.name for each in self.retired}
        name, number = cleaned, 1
        while name in taken or (
            role == "worker" and (self.owner_of(name) or any(is_called(name, worker) for worker in here))
        ):
            number += 1
            end = f".{number}"
            name = cleaned.replace("-", ".")[: MAX_NAME - len(end)] + end
        return name


def is_called(member: str, name: str) -> bool:
    """Whether a worker of this member may have this name. One machine may have several workers."""
    return name == member or name.startswith(f"{member}-")


def _is_called(name: str, own: str, keys: Sequence[str]) -> bool:
    return bool(name) and (
        name == own or (len(name) >= _FEWEST_DIGITS and any(key.startswith(name.lower()) for key in keys))
    )


def _the_one(name: str, found: Sequence[Member | Invited]) -> Member | Invited:
    """Return the only match. Raises Refusal with a remedy if there is none or several."""
    if not found:
        raise Refusal(f"there is no {name!r}, and no key begins with it ({_FEWEST_DIGITS} digits or more)")
    if len(found) > 1:
        shown = ", ".join(f"{_kind(each)} {each.name} {each.key[:SHOWN]}" for each in found[:8])
        raise Refusal(f"{name!r} may mean {len(found)} keys: {shown}; give the first digits of the key")
    return found[0]


def _kind(each: Member | Invited) -> str:
    return each.role if isinstance(each, Member) else f"an invitation for a {each.role},"
