"""Key registry: the allow-list of members with their roles, and open invitations. Pure.

Each operation returns a new registry, or raises RegistryRefusal. Three kinds of keys are valid: a member's key; the key
that a member has announced (``rotate``), in addition to the old one, until the member has used it; and an invitation's
key, while it has uses left and has not expired, for enrolling only.

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
MAX_REVOKED: Final = 8192
MAX_NAME: Final = 64  # Characters.
MAX_EXPIRED: Final = 64  # Expired invitations that are still listed.
SHOWN_EXPIRED_S: Final = 86_400.0
SHOWN_DIGITS: Final = 16  # Digits of a key shown in lists.
_MIN_PREFIX_DIGITS: Final = 8  # Minimum length of a key prefix that identifies a key.
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_NOT_IN_NAME: Final = re.compile(r"[^A-Za-z0-9._@-]+")

_Name = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]


class RegistryRefusal(Exception):
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

    def is_identified_by(self, name: str) -> bool:
        """Whether this name or key prefix identifies the member."""
        return _is_identified_by(name, self.name, self.keys)


class OpenInvitation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Unused or partly used invitation as the broker stores it, without the secret.

    ``name``: name for the machine that uses the invitation. ``broker``: the broker's public key in the invitation.
    """

    key: PublicKey
    role: Role
    uses: int  # Enrolments left.
    expires_at: float  # Seconds since 1970.
    since: float
    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""
    broker: PublicKey | None = None


class RevokedKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A revoked key. The key is never accepted again, and the name is not given to another machine, because it was
    charged for its use."""

    name: _Name
    key: PublicKey


class KeyRegistry:
    """Immutable key registry: an allow-list of members and invitations by key."""

    __slots__ = ("_by_invitation", "_by_key", "invited", "members", "retired")

    def __init__(
        self, members: Sequence[Member] = (), invited: Sequence[OpenInvitation] = (), retired: Sequence[RevokedKey] = ()
    ) -> None:
        """Raises ConfigError for a duplicate name or key. Of revoked keys only the latest are kept."""
        self.members, self.invited, self.retired = tuple(members), tuple(invited), tuple(retired)[-MAX_REVOKED:]
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
        fitting = [each.name for each in self.members if each.role == "worker" and may_name_worker(each.name, worker)]
        return max(fitting, key=len, default="")

    # --- operations --------------------------------------------------------------------------------------------------

    def invite(
        self, message: Invite, now: float, broker: str | None = None, reserved: Collection[str] = ()
    ) -> KeyRegistry:
        """Add an invitation. ``reserved``: keys that no peer may use, the broker's own."""
        if message.name and not _NAME.fullmatch(message.name):
            raise RegistryRefusal(f"a name is 1 to {MAX_NAME} letters, digits and . _ @ -, not {message.name!r}")
        existing = self._by_invitation.get(message.key)
        if existing is not None and existing.role == message.role and now < existing.expires_at:
            return self  # A repetition, because the answer was lost.
        self._check_unused(message.key, reserved)
        open_invitations = self._open_invitations(now)
        if len(open_invitations) >= MAX_INVITED:
            raise RegistryRefusal(
                f"there are {MAX_INVITED} invitations, which is the limit: revoke some (swarmctl keys list)"
            )
        new = OpenInvitation(message.key, message.role, message.uses, now + message.valid_s, now, message.name, broker)
        return KeyRegistry(self.members, (*self._expired_invitations(now), *open_invitations, new), self.retired)

    def enrol(
        self,
        invitation: str,
        message: Enrol,
        now: float,
        *,
        broker: str | None = None,
        local_workers: Collection[str] = (),
        reserved: Collection[str] = (),
    ) -> tuple[KeyRegistry, Enrolled]:
        """Register the own key of a peer that authenticated with an invitation; costs one use. A repetition costs none.

        ``local_workers``: names of workers that belong to no member. ``reserved``: as for ``invite``.
        """
        invited = self._by_invitation.get(invitation)
        if invited is None or now >= invited.expires_at:
            raise RegistryRefusal("this invitation has been used, has expired or was revoked: ask for another")
        member = self._by_key.get(message.key)
        if member is not None and member.invited_by == invitation[:SHOWN_DIGITS]:
            return self, Enrolled(name=member.name, role=member.role)
        self._check_unused(message.key, reserved)
        if len(self.members) >= MAX_MEMBERS:
            raise RegistryRefusal(
                f"{MAX_MEMBERS} keys are registered here, which is the limit: revoke some (swarmctl keys list)"
            )
        name = self._unused_name(invited.name or message.name, invited.role, local_workers)
        new = Member(name, invited.role, message.key, now, invitation[:SHOWN_DIGITS], broker=broker)
        left = msgspec.structs.replace(invited, uses=invited.uses - 1)
        others = [left if each is invited else each for each in self._open_invitations(now)]
        open_invitations = [each for each in others if each.uses > 0]
        roll = KeyRegistry((*self.members, new), (*self._expired_invitations(now), *open_invitations), self.retired)
        return roll, Enrolled(name=name, role=invited.role)

    def revoke(self, name: str, now: float) -> KeyRegistry:
        """Revoke a member with all its keys and the invitation it used, which it may still have; or revoke an
        invitation.

        Both are identified by name or key prefix. Expired invitations are ignored.
        """
        matches: list[Member | OpenInvitation] = [each for each in self.members if each.is_identified_by(name)]
        matches += [each for each in self._open_invitations(now) if _is_identified_by(name, each.name, (each.key,))]
        revoked = _only_match(name, matches)
        if isinstance(revoked, OpenInvitation):
            return KeyRegistry(self.members, [i for i in self.invited if i is not revoked], self.retired)
        others = [i for i in self.invited if not revoked.invited_by or not i.key.startswith(revoked.invited_by)]
        retired = (*self.retired, *(RevokedKey(revoked.name, key) for key in revoked.keys))
        return KeyRegistry([m for m in self.members if m is not revoked], others, retired)

    def rotate(self, old: str, new: str, reserved: Collection[str] = ()) -> KeyRegistry:
        """Record a member's announced next key; both keys are valid until the new one is used. ``reserved``: as for
        ``invite``."""
        member = self._by_key.get(old)
        if member is None:
            raise RegistryRefusal("this connection has no key that could be changed")
        if new in (member.next, member.key):
            return self  # A repetition.
        self._check_unused(new, reserved)
        return self._replace(member, msgspec.structs.replace(member, key=old, next=new))

    def request_rotation(self, name: str) -> KeyRegistry:
        """Request that a member rotate its key when it connects next (``must_rotate``)."""
        matches: list[Member | OpenInvitation] = [each for each in self.members if each.is_identified_by(name)]
        member = _only_match(name, matches)
        assert isinstance(member, Member)
        return self if member.must_rotate else self._replace(member, msgspec.structs.replace(member, must_rotate=True))

    def must_rotate(self, key: str) -> bool:
        member = self._by_key.get(key)
        return member is not None and member.must_rotate

    def record_use(self, key: str) -> KeyRegistry:
        """Record that a peer has authenticated with this key. If it is an announced one, it replaces the old key.
        Returns this registry itself if nothing changes."""
        member = self._by_key.get(key)
        if member is None or key != member.next:
            return self
        return self._replace(member, msgspec.structs.replace(member, key=key, next=None, must_rotate=False))

    def set_default_broker_key(self, broker: str) -> KeyRegistry:
        """Record the key that the broker has had so far for all entries that have none, at its first rotation."""
        members = [each if each.broker else msgspec.structs.replace(each, broker=broker) for each in self.members]
        invited = [each if each.broker else msgspec.structs.replace(each, broker=broker) for each in self.invited]
        return KeyRegistry(members, invited, self.retired)

    def record_broker_key(self, key: str, broker: str) -> KeyRegistry:
        """Record that the owner of this key has stored this public key of the broker. Returns this registry itself if
        that is nothing new."""
        member = self._by_key.get(key)
        if member is None or member.broker == broker:
            return self
        return self._replace(member, msgspec.structs.replace(member, broker=broker))

    def members_without_key(self, broker: str, now: float) -> list[str]:
        """Describe the members and invitations that still have another key of the broker."""
        members = [f"{each.name} ({each.role})" for each in self.members if each.broker not in (None, broker)]
        return members + [
            f"the invitation {each.name or each.key[:SHOWN_DIGITS]} (for a {each.role})"
            for each in self._open_invitations(now)
            if each.broker not in (None, broker)
        ]

    def report(self, now: float, broker: str = "") -> Json:
        """Return the report of ``swarmctl keys list``. ``broker``: its public key. Expired invitations are listed for a
        day."""
        return {
            "members": [
                {
                    "name": each.name,
                    "role": each.role,
                    "key": each.key[:SHOWN_DIGITS],
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
                    "key": each.key[:SHOWN_DIGITS],
                    "since": each.since,
                    "uses_left": each.uses,
                    "expires_in_s": each.expires_at - now,
                    "expired": now >= each.expires_at,
                    "knows_broker": each.broker in (None, broker),
                }
                for each in (*self._expired_invitations(now), *self._open_invitations(now))
            ],
        }

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _check_unused(self, key: str, reserved: Collection[str]) -> None:
        """Raise RegistryRefusal for a key that is or was in use."""
        if key in reserved:
            raise RegistryRefusal("this is the broker's own key: make one of your own")
        if key in self._by_key:
            raise RegistryRefusal("this key is in use already: make another one")
        if key in self._by_invitation:
            raise RegistryRefusal("this key is in use already, as an invitation's: make one of your own")
        if any(each.key == key for each in self.retired):
            raise RegistryRefusal("this key was revoked: make another one")

    def _open_invitations(self, now: float) -> list[OpenInvitation]:
        return [each for each in self.invited if now < each.expires_at]

    def _expired_invitations(self, now: float) -> list[OpenInvitation]:
        """Return the latest invitations that expired within a day, so that a user can see why one did not work."""
        expired = [each for each in self.invited if 0 <= now - each.expires_at < SHOWN_EXPIRED_S]
        return sorted(expired, key=lambda each: each.expires_at)[-MAX_EXPIRED:]

    def _replace(self, former: Member, member: Member) -> KeyRegistry:
        return KeyRegistry([member if each is former else each for each in self.members], self.invited, self.retired)

    def _unused_name(self, requested: str, role: str, local_workers: Collection[str]) -> str:
        """Return an unused name: the wanted one after removing invalid characters, with a number if it is taken.

        A name is taken if a member has or had it, if it would be a worker name of another member, or if it would make a
        present worker look like one of this member.
        """
        cleaned = _NOT_IN_NAME.sub("-", requested).lstrip("._@-")[:MAX_NAME] or role
        taken = {each.name for each in self.members} | {each.name for each in self.retired}
        name, number = cleaned, 1
        while name in taken or (
            role == "worker" and (self.owner_of(name) or any(may_name_worker(name, worker) for worker in local_workers))
        ):
            number += 1
            end = f".{number}"
            name = cleaned.replace("-", ".")[: MAX_NAME - len(end)] + end
        return name


def may_name_worker(member: str, name: str) -> bool:
    """Whether a worker of this member may have this name. One machine may have several workers."""
    return name == member or name.startswith(f"{member}-")


def _is_identified_by(name: str, own: str, keys: Sequence[str]) -> bool:
    return bool(name) and (
        name == own or (len(name) >= _MIN_PREFIX_DIGITS and any(key.startswith(name.lower()) for key in keys))
    )


def _only_match(name: str, matches: Sequence[Member | OpenInvitation]) -> Member | OpenInvitation:
    """Return the only match. Raises RegistryRefusal with a remedy if there is none or several."""
    if not matches:
        raise RegistryRefusal(f"there is no {name!r}, and no key begins with it ({_MIN_PREFIX_DIGITS} digits or more)")
    if len(matches) > 1:
        shown = ", ".join(f"{_describe_kind(each)} {each.name} {each.key[:SHOWN_DIGITS]}" for each in matches[:8])
        raise RegistryRefusal(f"{name!r} may mean {len(matches)} keys: {shown}; give the first digits of the key")
    return matches[0]


def _describe_kind(entry: Member | OpenInvitation) -> str:
    return entry.role if isinstance(entry, Member) else f"an invitation for a {entry.role},"
