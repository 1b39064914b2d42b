"""The roll: who is known by which key, as what, and who is invited. Pure: each verb returns a new roll, or refuses.

Three kinds of keys count: a member's; the one that a member has announced (``rotate``), beside the old one, until it
has knocked with it; an invitation's, as long as it has uses left and has not expired, and for nothing but enrolling.

Of each it is kept by which key it knows the broker (``broker``), whose own key may change too.
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
MAX_NAME: Final = 64
MAX_EXPIRED: Final = 64  # invitations that are still shown
SHOWN_EXPIRED_S: Final = 86_400.0
SHOWN: Final = 16  # digits of a key, in lists
_FEWEST_DIGITS: Final = 8  # by which a key can be named
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_NO_NAME: Final = re.compile(r"[^A-Za-z0-9._@-]+")

_Name = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")]


class Refusal(Exception):
    """What was asked for is not done; the text says why, fit to be shown to who asked."""


class Member(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``next``: the key that it will knock with, once it has announced one. ``since``: seconds since 1970. ``broker``:
    the broker's public key that it was last seen to know; None: it never had another one. ``must_rotate``: it shall
    change its key as soon as it is there."""

    name: _Name
    role: Role
    key: PublicKey
    since: float
    invited_by: str = ""
    next: PublicKey | None = None
    broker: PublicKey | None = None
    must_rotate: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.key,) if self.next is None else (self.key, self.next)

    def is_called(self, name: str) -> bool:
        """Is it meant by that name, or by how its key begins?"""
        return _is_called(name, self.name, self.keys)


class Invited(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An invitation as the broker knows it: without its secret. ``name``: what who comes by it is called. ``broker``:
    the broker's public key that is in it."""

    key: PublicKey
    role: Role
    uses: int
    expires_at: float
    since: float
    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME)] = ""
    broker: PublicKey | None = None


class Retired(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A member that was revoked. Its key is not taken again; nor is its name given to others, whose account it was."""

    name: _Name
    key: PublicKey


class Roll:
    """See the module's text. Unchangeable."""

    __slots__ = ("_by_invitation", "_by_key", "invited", "members", "retired")

    def __init__(
        self, members: Sequence[Member] = (), invited: Sequence[Invited] = (), retired: Sequence[Retired] = ()
    ) -> None:
        """Raises ConfigError if a name or a key is there twice. Of those that were revoked, the latest are kept."""
        self.members, self.invited, self.retired = tuple(members), tuple(invited), tuple(retired)[-MAX_RETIRED:]
        self._by_key = {key: member for member in self.members for key in member.keys}
        self._by_invitation = {each.key: each for each in self.invited}
        keys = [key for member in self.members for key in member.keys] + [each.key for each in self.invited]
        for what in (keys, [member.name for member in self.members]):
            if twice := [value for value, count in Counter(what).items() if count > 1]:
                raise ConfigError(f"{twice[0]!r} is in the roll twice")

    @property
    def keys(self) -> frozenset[str]:
        """All that count, also those of invitations."""
        return frozenset(self._by_key) | frozenset(self._by_invitation)

    def role_of(self, key: str, now: float) -> str | None:
        """As what this key counts now: a role, or "invited"; None: not at all."""
        if (member := self._by_key.get(key)) is not None:
            return member.role
        invited = self._by_invitation.get(key)
        return "invited" if invited is not None and now < invited.expires_at else None

    def name_of(self, key: str) -> str:
        """Whose key it is; empty: nobody's who has joined."""
        member = self._by_key.get(key)
        return "" if member is None else member.name

    def owner_of(self, worker: str) -> str:
        """Whose worker may have this name: the member's whose own name is most of it; empty: nobody's."""
        fitting = [each.name for each in self.members if each.role == "worker" and is_called(each.name, worker)]
        return max(fitting, key=len, default="")

    # --- verbs -------------------------------------------------------------------------------------------------------

    def invite(self, message: Invite, now: float, broker: str | None = None, reserved: Collection[str] = ()) -> Roll:
        """Add an invitation. ``reserved``: keys that can be nobody else's, the broker's own."""
        if message.name and not _NAME.fullmatch(message.name):
            raise Refusal(f"a name is 1 to {MAX_NAME} letters, digits and . _ @ -, not {message.name!r}")
        known = self._by_invitation.get(message.key)
        if known is not None and known.role == message.role and now < known.expires_at:
            return self  # said again, since the answer was lost
        self._check_unused(message.key, reserved)
        open_ = self._open(now)
        if len(open_) >= MAX_INVITED:
            raise Refusal(f"there are {MAX_INVITED} invitations, which is the most: revoke some (swarmctl keys list)")
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
        """Who knocked with an invitation's key makes its own known, which costs one use. Said again, it costs none.
        ``here``: names of workers that are nobody's. ``reserved``: as for ``invite``."""
        invited = self._by_invitation.get(invitation)
        if invited is None or now >= invited.expires_at:
            raise Refusal("this invitation has been used, has expired or was revoked: ask for another")
        member = self._by_key.get(message.key)
        if member is not None and member.invited_by == invitation[:SHOWN]:
            return self, Enrolled(name=member.name, role=member.role)
        self._check_unused(message.key, reserved)
        if len(self.members) >= MAX_MEMBERS:
            raise Refusal(f"{MAX_MEMBERS} keys are known here, which is the most: revoke some (swarmctl keys list)")
        name = self._free(invited.name or message.name, invited.role, here)
        new = Member(name, invited.role, message.key, now, invitation[:SHOWN], broker=broker)
        left = msgspec.structs.replace(invited, uses=invited.uses - 1)
        others = [left if each is invited else each for each in self._open(now)]
        open_ = [each for each in others if each.uses > 0]
        roll = Roll((*self.members, new), (*self._expired(now), *open_), self.retired)
        return roll, Enrolled(name=name, role=invited.role)

    def revoke(self, name: str, now: float) -> Roll:
        """Take away a member, with all its keys and the invitation by which it came, which it may still have; or an
        invitation: by its name, or how its key begins. What has expired is in nobody's way."""
        found: list[Member | Invited] = [each for each in self.members if each.is_called(name)]
        found += [each for each in self._open(now) if _is_called(name, each.name, (each.key,))]
        gone = _the_one(name, found)
        if isinstance(gone, Invited):
            return Roll(self.members, [i for i in self.invited if i is not gone], self.retired)
        others = [i for i in self.invited if not gone.invited_by or not i.key.startswith(gone.invited_by)]
        retired = (*self.retired, *(Retired(gone.name, key) for key in gone.keys))
        return Roll([m for m in self.members if m is not gone], others, retired)

    def rotate(self, old: str, new: str, reserved: Collection[str] = ()) -> Roll:
        """A member announces the key that it will knock with: both count until it has. ``reserved``: as for
        ``invite``."""
        member = self._by_key.get(old)
        if member is None:
            raise Refusal("who has no key here has none to change")
        if new in (member.next, member.key):
            return self  # said again
        self._check_unused(new, reserved)
        return self._with(member, msgspec.structs.replace(member, key=old, next=new))

    def order(self, name: str) -> Roll:
        """This member shall change its key, as soon as it is there: ``must_rotate``, until it has."""
        found: list[Member | Invited] = [each for each in self.members if each.is_called(name)]
        member = _the_one(name, found)
        assert isinstance(member, Member)
        return self if member.must_rotate else self._with(member, msgspec.structs.replace(member, must_rotate=True))

    def must_rotate(self, key: str) -> bool:
        member = self._by_key.get(key)
        return member is not None and member.must_rotate

    def knocked(self, key: str) -> Roll:
        """Somebody has knocked with this key: if it is an announced one, the old one counts no more. This roll itself
        if that changes nothing."""
        member = self._by_key.get(key)
        if member is None or key != member.next:
            return self
        return self._with(member, msgspec.structs.replace(member, key=key, next=None, must_rotate=False))

    def known_as(self, broker: str) -> Roll:
        """The broker had this key so far: so everybody knows it of whom nothing else is written."""
        members = [each if each.broker else msgspec.structs.replace(each, broker=broker) for each in self.members]
        invited = [each if each.broker else msgspec.structs.replace(each, broker=broker) for each in self.invited]
        return Roll(members, invited, self.retired)

    def keeps(self, key: str, broker: str) -> Roll:
        """Who has this key knows the broker by that one. This roll itself if that is nothing new."""
        member = self._by_key.get(key)
        if member is None or member.broker == broker:
            return self
        return self._with(member, msgspec.structs.replace(member, broker=broker))

    def behind(self, broker: str, now: float) -> list[str]:
        """Those who know the broker by another key, in words."""
        members = [f"{each.name} ({each.role})" for each in self.members if each.broker not in (None, broker)]
        return members + [
            f"the invitation {each.name or each.key[:SHOWN]} (for a {each.role})"
            for each in self._open(now)
            if each.broker not in (None, broker)
        ]

    def told(self, now: float, broker: str = "") -> Json:
        """Tell what ``swarmctl keys list`` shows. ``broker``: its public key. Expired invitations are there for a
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
        """Raise Refusal for a key that is somebody's, or was."""
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
        """Those that expired within a day, the latest ones: who wonders why one did not work shall see it."""
        found = [each for each in self.invited if 0 <= now - each.expires_at < SHOWN_EXPIRED_S]
        return sorted(found, key=lambda each: each.expires_at)[-MAX_EXPIRED:]

    def _with(self, former: Member, member: Member) -> Roll:
        return Roll([member if each is former else each for each in self.members], self.invited, self.retired)

    def _free(self, wanted: str, role: str, here: Collection[str]) -> str:
        """A name that nobody has or had, nor may give to a worker of its own: the wanted one, as far as it is one, with
        a number if it is taken. Nor one by which it could call a worker as one that is here."""
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
    """May a worker of this member have this name? There may be several of one machine."""
    return name == member or name.startswith(f"{member}-")


def _is_called(name: str, own: str, keys: Sequence[str]) -> bool:
    return bool(name) and (
        name == own or (len(name) >= _FEWEST_DIGITS and any(key.startswith(name.lower()) for key in keys))
    )


def _the_one(name: str, found: Sequence[Member | Invited]) -> Member | Invited:
    """The only one that was found. Raises Refusal that says what helps."""
    if not found:
        raise Refusal(f"nobody is called {name!r}, and no key begins like that (with {_FEWEST_DIGITS} digits or more)")
    if len(found) > 1:
        shown = ", ".join(f"{_kind(each)} {each.name} {each.key[:SHOWN]}" for each in found[:8])
        raise Refusal(f"{name!r} may mean {len(found)} keys: {shown}; say how the key begins")
    return found[0]


def _kind(each: Member | Invited) -> str:
    return each.role if isinstance(each, Member) else f"an invitation for a {each.role},"
