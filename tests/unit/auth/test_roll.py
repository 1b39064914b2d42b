"""The roll: who comes in, how often, for how long, under which name, and who is out again."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints
from unittest.mock import Mock

import pytest

from swarm.auth import registry as rolls
from swarm.auth.permissions import deny_reason
from swarm.auth.registry import KeyRegistry, Member, OpenInvitation, RegistryRefusal
from swarm.errors import ConfigError
from swarm.wire.messages import ClientMessage, Describe, Enrol, Invite, Query, Revoke, Role, Rotate

NOW = 1_000_000.0


def key(number: int) -> str:
    return f"{number:08x}" * 8


def invited(number: int = 1, role: Role = "worker", **more: Any) -> KeyRegistry:
    return KeyRegistry().invite(Invite(key=key(number), role=role, **more), NOW)


def joined(*names: str) -> KeyRegistry:
    """Members with keys 1, 2, 3, …"""
    roll = invited(1000, uses=len(names))
    for number, name in enumerate(names, 1):
        roll, _ = roll.enrol(key(1000), Enrol(key=key(number), name=name), NOW)
    return roll


def names(roll: KeyRegistry) -> list[str]:
    return [member.name for member in roll.members]


def test_an_invitation_lets_in_as_often_as_it_says() -> None:
    """Once, unless told otherwise; then its key is nobody's."""
    roll = invited(uses=2)
    for number in (2, 3):
        assert roll.role_of(key(1), NOW) == "invited"
        assert roll.role_of(key(number), NOW) is None
        roll, enrolled = roll.enrol(key(1), Enrol(key=key(number)), NOW)
        assert (roll.role_of(key(number), NOW), enrolled.role) == ("worker", "worker")
        assert roll.name_of(key(number)) == enrolled.name
    assert roll.role_of(key(1), NOW) is None
    with pytest.raises(RegistryRefusal, match="has been used"):
        roll.enrol(key(1), Enrol(key=key(4)), NOW)


def test_an_invitation_expires() -> None:
    """To the second; and is swept by the next change."""
    roll = invited(valid_s=60)
    assert roll.role_of(key(1), NOW + 59) == "invited"
    assert roll.role_of(key(1), NOW + 60) is None
    with pytest.raises(RegistryRefusal, match="has expired"):
        roll.enrol(key(1), Enrol(key=key(2)), NOW + 60)


def shown(roll: KeyRegistry, now: float) -> dict[object, object]:
    """The invitations that are listed: the beginning of the key, and whether it has expired."""
    rows = roll.report(now)["invitations"]
    assert isinstance(rows, list)
    return {row["key"]: row["expired"] for row in rows if isinstance(row, dict)}


def test_what_has_expired_is_shown_for_a_day() -> None:
    """Who wonders why it did not work shall see it; it opens nothing, and is in nobody's way."""
    roll = invited(valid_s=60, name="far")
    assert shown(roll, NOW + 59) == {key(1)[:16]: False}
    roll = roll.invite(Invite(key=key(2), role="client", name="far"), NOW + 61)
    assert shown(roll, NOW + 61) == {key(1)[:16]: True, key(2)[:16]: False}
    assert roll.role_of(key(1), NOW + 61) is None
    assert roll.role_of(key(1), NOW + 86_400) is None
    assert roll.revoke("far", NOW + 61).role_of(key(2), NOW + 61) is None  # the one that is meant
    assert shown(roll, NOW + 60 + 86_399)[key(1)[:16]] is True
    assert key(1)[:16] not in shown(roll, NOW + 60 + 86_400)
    later = roll.invite(Invite(key=key(3), role="client"), NOW + 60 + 86_400)
    assert key(1) not in {each.key for each in later.invited}


def test_few_that_have_expired_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest ones."""
    monkeypatch.setattr(rolls, "MAX_EXPIRED", 2)
    roll = KeyRegistry()
    for number in range(1, 6):
        roll = roll.invite(Invite(key=key(number), role="client", valid_s=number), NOW)
    roll = roll.invite(Invite(key=key(9), role="client"), NOW + 5)
    assert [each.key for each in roll.invited] == [key(4), key(5), key(9)]


def test_who_says_it_again_uses_nothing_up() -> None:
    """Its answer may have been lost; the same key by another invitation is refused."""
    roll = invited(uses=2).invite(Invite(key=key(5), role="admin"), NOW)
    roll, first = roll.enrol(key(1), Enrol(key=key(2), name="b"), NOW)
    again, second = roll.enrol(key(1), Enrol(key=key(2), name="b"), NOW)
    assert (again, second) == (roll, first)
    with pytest.raises(RegistryRefusal, match="in use"):
        roll.enrol(key(5), Enrol(key=key(2)), NOW)
    with pytest.raises(RegistryRefusal, match="one of your own"):
        roll.enrol(key(1), Enrol(key=key(5)), NOW)


def test_only_an_invitation_enrols() -> None:
    """Not a member's key, none, or an unknown one."""
    for with_key in ("", key(1), key(9)):
        with pytest.raises(RegistryRefusal):
            joined("a").enrol(with_key, Enrol(key=key(5)), NOW)


def test_names_are_once() -> None:
    """Who wants one that is taken, or that another machine may give to its workers, gets a number; what can't be in a
    name is not."""
    roll = joined("a", "a", "a-2", "a", "x/../y z", "", "…", "é" * 64, "n" * 64, "n" * 64)
    plain = ["a", "a.2", "a.2.2", "a.3", "x-..-y-z", "worker", "worker.2", "worker.3"]
    assert names(roll) == [*plain, "n" * 64, "n" * 62 + ".2"]


def test_the_inviter_names_who_comes() -> None:
    """Before what it calls itself; a wrong name is refused at once."""
    roll, enrolled = invited(name="far").enrol(key(1), Enrol(key=key(2), name="near"), NOW)
    assert enrolled.name == "far"
    for wrong in ("a/b", "-a", "a b", "key:x"):
        with pytest.raises(RegistryRefusal, match="a name is"):
            roll.invite(Invite(key=key(3), role="worker", name=wrong), NOW)


def test_revoked_by_name_or_by_how_the_key_begins() -> None:
    """Members and invitations alike; the others stay."""
    roll = joined("a", "b", "c").invite(Invite(key=key(7), role="client", name="d"), NOW)
    assert names(roll.revoke("b", NOW)) == ["a", "c"]
    assert names(roll.revoke(key(3)[:8], NOW)) == ["a", "b"]
    assert roll.revoke("b", NOW).role_of(key(2), NOW) is None
    for called in ("d", key(7)[:16]):
        assert roll.revoke(called, NOW).role_of(key(7), NOW) is None
    assert names(roll.revoke("d", NOW)) == names(roll)


def test_what_may_mean_several_is_refused_with_words() -> None:
    """They are listed with their keys; nobody is taken at random."""
    roll = joined("a").invite(Invite(key=key(7), role="client", name="a"), NOW)
    with pytest.raises(
        RegistryRefusal, match=f"2 keys: worker a {key(1)[:16]}, an invitation for a client, a {key(7)[:16]}"
    ):
        roll.revoke("a", NOW)
    for nobody in ("z", "", key(1)[:7]):
        with pytest.raises(RegistryRefusal, match="there is no"):
            roll.revoke(nobody, NOW)


def test_a_name_like_anothers_key_does_not_protect_it() -> None:
    """Whoever calls itself by how another's key begins makes it ambiguous, and more digits settle it."""
    roll = joined("a", key(1)[:8])
    with pytest.raises(RegistryRefusal, match="2 keys"):
        roll.revoke(key(1)[:8], NOW)
    assert names(roll.revoke(key(1)[:9], NOW)) == [key(1)[:8]]


def test_a_key_is_changed_without_a_gap() -> None:
    """Old and new count until the new one has knocked; then the new one alone."""
    roll = joined("a")
    both = roll.rotate(key(1), key(5))
    assert both.role_of(key(1), NOW) == both.role_of(key(5), NOW) == "worker"
    assert both.name_of(key(5)) == "a"
    assert both.rotate(key(1), key(5)) is both
    assert both.record_use(key(1)) is both
    done = both.record_use(key(5))
    assert (done.role_of(key(1), NOW), done.role_of(key(5), NOW)) == (None, "worker")
    assert done.record_use(key(5)) is done
    assert both.keys - done.keys == {key(1)}


def test_an_announced_key_can_be_announced_anew() -> None:
    """The one that was never used counts no more."""
    roll = joined("a").rotate(key(1), key(5)).rotate(key(1), key(6))
    assert roll.role_of(key(5), NOW) is None
    assert roll.role_of(key(6), NOW) == "worker"


def test_whoever_is_revoked_loses_both_keys() -> None:
    roll = joined("a").rotate(key(1), key(5))
    assert roll.revoke("a", NOW).keys == set()
    assert roll.revoke(key(5), NOW).keys == set()


def test_an_invitation_that_is_asked_for_again_is_the_same() -> None:
    """The broker's answer may have been lost."""
    roll = invited(uses=2)
    assert roll.invite(Invite(key=key(1), role="worker", uses=2), NOW + 1) is roll


def test_nobody_takes_anothers_key() -> None:
    """Not a member's, an announced one, or an invitation's."""
    roll = joined("a", "b").rotate(key(2), key(5)).invite(Invite(key=key(6), role="admin"), NOW)
    assert roll.rotate(key(1), key(1)) is roll  # said again
    for taken in (key(2), key(5), key(6)):
        with pytest.raises(RegistryRefusal, match="in use"):
            roll.rotate(key(1), taken)
        with pytest.raises(RegistryRefusal, match="in use"):
            roll.invite(Invite(key=taken, role="client"), NOW)
    for nobody in ("", key(6), key(9)):
        with pytest.raises(RegistryRefusal, match="no key that could be changed"):
            roll.rotate(nobody, key(8))


def test_a_key_that_was_revoked_stays_so() -> None:
    """It is taken neither as another member's next one, nor as an invitation's, nor by another invitation."""
    roll = joined("a", "b").revoke("b", NOW).invite(Invite(key=key(7), role="worker"), NOW)
    with pytest.raises(RegistryRefusal, match="was revoked"):
        roll.rotate(key(1), key(2))
    with pytest.raises(RegistryRefusal, match="was revoked"):
        roll.invite(Invite(key=key(2), role="admin"), NOW)
    with pytest.raises(RegistryRefusal, match="was revoked"):
        roll.enrol(key(7), Enrol(key=key(2)), NOW)


def test_there_are_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of members and of open invitations; expired ones don't count."""
    monkeypatch.setattr(rolls, "MAX_MEMBERS", 2)
    monkeypatch.setattr(rolls, "MAX_INVITED", 2)
    roll = joined("a", "b").invite(Invite(key=key(7), role="client", valid_s=10), NOW)
    with pytest.raises(RegistryRefusal, match="2 keys are registered"):
        roll.enrol(key(7), Enrol(key=key(5)), NOW)
    roll = roll.invite(Invite(key=key(8), role="client"), NOW)
    with pytest.raises(RegistryRefusal, match="2 invitations"):
        roll.invite(Invite(key=key(9), role="client"), NOW)
    assert shown(roll.invite(Invite(key=key(9), role="client"), NOW + 10), NOW + 10) == {
        key(7)[:16]: True,
        key(8)[:16]: False,
        key(9)[:16]: False,
    }


def test_lists_show_no_whole_key() -> None:
    roll = joined("a").rotate(key(1), key(5)).invite(Invite(key=key(7), role="client", name="d", uses=3), NOW)
    assert roll.report(NOW + 1) == {
        "members": [
            {
                "name": "a",
                "role": "worker",
                "key": key(1)[:16],
                "since": NOW,
                "invited_by": key(1000)[:16],
                "is_rotating": True,
                "knows_broker": True,
            }
        ],
        "invitations": [
            {
                "name": "d",
                "role": "client",
                "key": key(7)[:16],
                "since": NOW,
                "uses_left": 3,
                "expires_in_s": 3599.0,
                "expired": False,
                "knows_broker": True,
            }
        ],
    }


def test_a_roll_has_each_name_and_key_once() -> None:
    """A file that says otherwise is refused: who would it be?"""
    a = Member("a", "worker", key(1), NOW)
    for members, open_ in (
        ([a, Member("b", "admin", key(1), NOW)], []),
        ([a, Member("a", "admin", key(2), NOW)], []),
        ([a, Member("b", "admin", key(2), NOW, "", key(1))], []),
        ([a], [OpenInvitation(key(1), "admin", 1, NOW, NOW)]),
    ):
        with pytest.raises(ConfigError, match="twice"):
            KeyRegistry(members, open_)


def test_who_knows_the_broker_by_which_key() -> None:
    """Who came before it had another one, knows the old one; until it has shown otherwise. Invitations never do."""
    roll = joined("a", "b").invite(Invite(key=key(7), role="client", name="c"), NOW)
    assert roll.members_without_key(key(51), NOW) == []  # it never had another one
    roll = roll.set_default_broker_key(key(50))
    assert roll.members_without_key(key(50), NOW) == []
    assert roll.members_without_key(key(51), NOW) == ["a (worker)", "b (worker)", "the invitation c (for a client)"]
    roll = roll.record_broker_key(key(1), key(51)).set_default_broker_key(key(50))
    assert roll.record_broker_key(key(1), key(51)) is roll.record_broker_key(key(9), key(51)) is roll
    assert roll.members_without_key(key(51), NOW) == ["b (worker)", "the invitation c (for a client)"]
    assert roll.members_without_key(key(51), NOW + 3600) == ["b (worker)"]
    members, _ = roll.report(NOW, key(51)).values()
    assert isinstance(members, list)
    assert [row["knows_broker"] for row in members if isinstance(row, dict)] == [True, False]
    both = roll.rotate(key(1), key(5))
    assert both.record_use(key(5)).members_without_key(key(51), NOW) == [
        "b (worker)",
        "the invitation c (for a client)",
    ]


def test_a_member_is_told_to_change_its_key_until_it_has() -> None:
    """By its name or how its key begins; it counts meanwhile."""
    roll = joined("a", "b").invite(Invite(key=key(7), role="client", name="c"), NOW)
    ordered = roll.request_rotation("b")
    assert ordered.request_rotation(key(2)[:8]) is ordered
    assert [ordered.must_rotate(key(number)) for number in (1, 2, 7, 9)] == [False, True, False, False]
    announced = ordered.rotate(key(2), key(5))
    assert announced.must_rotate(key(5))
    assert announced.role_of(key(2), NOW) == "worker"
    assert not announced.record_use(key(5)).must_rotate(key(5))
    for nobody in ("c", key(7)[:16], "z"):
        with pytest.raises(RegistryRefusal, match="there is no"):
            roll.request_rotation(nobody)


# --- rights ----------------------------------------------------------------------------------------------------------

CLIENTS = {
    "Submit",
    "LookUp",
    "GetRequest",
    "Attach",
    "Ack",
    "Stop",
    "Cancel",
    "Detach",
    "Describe",
    "GetAsset",
    "Query",
    "Rotate",
    "BrokerKeyKept",
}
ASKED = {"status", "nodes", "plan", "stats", "requests", "trace"}
EVERY: tuple[type[Any], ...] = get_args(ClientMessage)
MAY = {
    "client": CLIENTS,
    "gateway": CLIENTS,
    "worker": {"Describe", "Rotate", "BrokerKeyKept"},
    "admin": {kind.__name__ for kind in EVERY} - {"Enrol"},
    "invited": {"Enrol"},
    None: set[str](),
}


def any_of(kind: type[Any]) -> Any:
    """A message of this kind: what it says does not matter, but what is asked for does."""
    return Query(what="status") if kind is Query else Mock(spec=kind)


@pytest.mark.parametrize("role", MAY)
def test_who_may_say_what(role: str | None) -> None:
    """Every message there is; who is refused is told why."""
    assert {kind.__name__ for kind in EVERY if not deny_reason(role, any_of(kind))} == MAY[role]


def test_questions_that_are_an_admins() -> None:
    """About keys and recoveries, say."""
    every = get_args(get_type_hints(Query)["what"])
    assert len(every) > len(ASKED)
    for role in ("client", "gateway"):
        assert {what for what in every if not deny_reason(role, Query(what=what))} == ASKED
    assert not [what for what in every if deny_reason("admin", Query(what=what))]
    assert "ask for keys: that takes an admin" in deny_reason("client", Query(what="keys"))


def test_refusals_say_what_helps() -> None:
    assert "--join" in deny_reason("invited", Describe())
    assert "swarmctl invite" in deny_reason(None, Describe())
    assert "admin" in deny_reason("client", Revoke(name="x"))
    assert "admin" in deny_reason("worker", Invite(key=key(1), role="admin"))
    assert not deny_reason("worker", Rotate(key=key(1)))
