"""The broker's lock: what it answers about keys, and what it has done about them."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path

import pytest

from swarm.auth.broker_keys import BrokerKeys
from swarm.auth.key_proof import prove
from swarm.auth.registry_file import RegistryFile
from swarm.broker.auth import access as locks
from swarm.broker.auth.access import AccessControl
from swarm.config import Settings
from swarm.wire.messages import (
    BrokerKey,
    BrokerKeyKept,
    ClientMessage,
    Describe,
    Enrol,
    Enrolled,
    Invite,
    Json,
    Malformed,
    Query,
    Report,
    Revoke,
    Rotate,
    RotateBroker,
    RotateKey,
    RotateMember,
    ServerMessage,
)
from swarm.wire.transport.keys import KeyPair, new_pair
from tests.unit.growing import Growing

LAPTOP = new_pair()
INVITATION, OWN, NEXT = new_pair().public, LAPTOP.public, new_pair().public


@pytest.fixture
def lost() -> list[str]:
    return []


async def said(opened: AccessControl, key: str, message: ClientMessage) -> ServerMessage | None:
    """What is answered, once the disk has it; None: the core's to answer."""
    answers: list[ServerMessage] = []
    is_taken = opened.handle_client_message(key, message, answers.append)
    await settle(opened)
    assert len(answers) == (is_taken and not isinstance(message, BrokerKeyKept))
    return answers[0] if answers else None


async def enrolled(opened: AccessControl, invitation: str, pair: KeyPair, name: str = "") -> ServerMessage | None:
    """What is answered to whoever makes this pair known, and holds it."""
    proof = prove(pair, invitation, opened.broker_keys.pairs[-1].public)
    return await said(opened, invitation, Enrol(key=pair.public, name=name, proof=proof))


async def settle(opened: AccessControl) -> None:
    """Until nothing waits to be written."""
    while opened.writer.is_busy:
        await opened.writer.run_next()


@pytest.fixture
async def opened(tmp_path: Path, lost: list[str], monkeypatch: pytest.MonkeyPatch) -> AccessControl:
    """With a client that has joined."""
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    monkeypatch.setattr(locks, "resolve_own", lambda listen: ("192.0.2.1",))  # whatever addresses this machine has
    made = AccessControl(Settings.model_validate({"broker": {"listen": ["192.0.2.1"]}}), tmp_path / "locked")
    made.on_key_lost = lost.append
    assert isinstance(await said(made, "", Invite(key=INVITATION, role="client")), Report)
    assert isinstance(await enrolled(made, INVITATION, LAPTOP, "laptop"), Enrolled)
    return made


async def rotated(opened: AccessControl, key: str, successor: str) -> tuple[bool, str]:
    answer = await said(opened, key, Rotate(key=successor))
    assert isinstance(answer, Report)
    return answer.ok, str(answer.body.get("error", ""))


async def test_who_knocks_with_its_new_key_does_without_the_old_one(opened: AccessControl, lost: list[str]) -> None:
    """Whatever it says then, also what it may not say; before, both count."""
    assert await rotated(opened, OWN, NEXT) == (True, "")
    assert await said(opened, OWN, Describe()) is None
    assert lost == []
    refused = await said(opened, NEXT, Query(what="keys"))
    assert isinstance(refused, Report)
    assert not refused.ok
    assert lost == [OWN]
    assert opened.account(NEXT) == opened.account(NEXT)
    assert opened.account(NEXT) is not None
    assert "revoked" in str(await said(opened, OWN, Describe())) or "not registered" in str(
        await said(opened, OWN, Describe())
    )


async def test_nobody_has_the_disk_written_all_the_time(
    opened: AccessControl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One change of a key for each member in a while; said again, it is the same one."""
    now = [1000.0]
    monkeypatch.setattr(locks.time, "monotonic", lambda: now[0])
    assert await rotated(opened, OWN, NEXT) == (True, "")
    assert await rotated(opened, OWN, NEXT) == (True, "")
    written = (tmp_path / "locked" / "roll.json").read_bytes()
    ok, why = await rotated(opened, OWN, new_pair().public)
    assert (ok, "wait 10 seconds" in why) == (False, True)
    assert (tmp_path / "locked" / "roll.json").read_bytes() == written
    now[0] += locks.ROTATE_EVERY_S
    assert await rotated(opened, OWN, new_pair().public) == (True, "")


@pytest.mark.parametrize(
    ("key", "name", "is_taken"),
    [
        ("far", "far", True),
        ("far", "far-17", True),
        ("far", "near", False),
        ("far", "farther", False),
        ("far", "far.2", False),  # another member's
        ("far", "laptop", False),  # a client has no workers, and this one none of that name
        ("far.2", "far.2", True),
        ("far.2", "far", False),
        ("far.2", "far-2", False),
        ("", "w0", True),  # on the broker's own machine
    ],
)
async def test_a_worker_is_called_as_its_machine_is(opened: AccessControl, key: str, name: str, is_taken: bool) -> None:
    """Else it could drive out another's, as a process that was started anew."""
    keys = {"": ""}
    for _ in range(2):
        invitation, own = new_pair().public, new_pair()
        await said(opened, "", Invite(key=invitation, role="worker"))
        answer = await enrolled(opened, invitation, own, "far")
        assert isinstance(answer, Enrolled)
        keys[answer.name] = own.public
    assert sorted(keys) == ["", "far", "far.2"]
    reason = opened.name_error(keys[key], name)
    assert (reason == "") is is_taken
    assert is_taken or f"registered as {key}:" in reason


async def test_who_joins_is_not_called_as_workers_that_are_here(opened: AccessControl) -> None:
    """Nor so that it might call a worker like one of them; it gets another name. A client has no workers."""
    opened.local_workers = lambda: ["w0", "vm-17"]
    found = {}
    for role, wanted in (("worker", "w0"), ("worker", "vm"), ("worker", "w1"), ("client", "w0")):
        invitation = new_pair().public
        await said(opened, "", Invite(key=invitation, role=role))
        answer = await enrolled(opened, invitation, new_pair(), wanted)
        assert isinstance(answer, Enrolled)
        found[role, wanted] = answer.name
    assert found == {
        ("worker", "w0"): "w0.2",
        ("worker", "vm"): "vm.2",
        ("worker", "w1"): "w1",
        ("client", "w0"): "w0",
    }


async def test_who_was_revoked_stays_out(opened: AccessControl, lost: list[str]) -> None:
    """Not by what is left of its invitation, not with its key by another one; and nobody gets its name, and with it its
    requests."""
    invitation, own = new_pair().public, new_pair()
    await said(opened, "", Invite(key=invitation, role="client", uses=3))
    assert await enrolled(opened, invitation, own, "alice") == Enrolled(name="alice", role="client")
    await said(opened, "", Revoke(name="alice"))
    assert set(lost) == {own.public, invitation}
    assert not isinstance(await enrolled(opened, invitation, own, "alice"), Enrolled)
    another = new_pair().public
    await said(opened, "", Invite(key=another, role="client"))
    refused = await enrolled(opened, another, own, "alice")
    assert isinstance(refused, Malformed)
    assert "was revoked" in refused.reason
    assert await enrolled(opened, another, new_pair(), "alice") == Enrolled(name="alice.2", role="client")


async def test_who_enrols_a_key_must_hold_it(opened: AccessControl) -> None:
    """Without a proof, with one of another key, of another invitation, or to another broker, nothing changes; with the
    right one it is taken, by the same invitation."""
    invitation, victim, own, other = (new_pair() for _ in range(4))
    await said(opened, "", Invite(key=invitation.public, role="worker"))
    wrong = (
        "",
        prove(own, invitation.public, opened.broker_keys.public),
        prove(victim, new_pair().public, opened.broker_keys.public),
        prove(victim, invitation.public, other.public),
        "0" * 168,
    )
    for proof in wrong:
        refused = await said(opened, invitation.public, Enrol(key=victim.public, name="shadow", proof=proof))
        assert isinstance(refused, Malformed)
        assert "has not proved that it holds the secret half" in refused.reason
    assert await enrolled(opened, invitation.public, victim, "far") == Enrolled(name="far", role="worker")


async def test_a_key_of_low_order_or_in_another_spelling_proves_nothing(opened: AccessControl) -> None:
    """What anybody can compute with, and a second number for the same point."""
    await said(opened, "", Invite(key=NEXT, role="worker"))
    same = (int.from_bytes(bytes.fromhex(OWN), "little") + (1 << 255)).to_bytes(32, "little").hex()
    for key in ("00" * 32, "01" + "00" * 31, same):
        proof = prove(LAPTOP, NEXT, opened.broker_keys.public)
        assert isinstance(await said(opened, NEXT, Enrol(key=key, proof=proof)), Malformed)


async def test_the_broker_s_own_keys_are_nobody_s(opened: AccessControl) -> None:
    """Those of its file, the one to come, and that of this life: they can be no member's, no invitation's, and no
    successor's."""
    await said(opened, "", RotateBroker())
    own = [*opened.broker_keys.pairs, opened.process_pair]
    assert len(own) == 3
    await said(opened, "", Invite(key=NEXT, role="client", uses=9))
    for pair in own:
        refused = await enrolled(opened, NEXT, pair, "shadow")
        assert isinstance(refused, Malformed)
        assert "the broker's own key" in refused.reason
        assert await rotated(opened, OWN, pair.public) == (False, "this is the broker's own key: make one of your own")
        report = await said(opened, "", Invite(key=pair.public, role="client"))
        assert isinstance(report, Report)
        assert not report.ok


async def test_what_has_expired_stays_so_when_the_clock_goes_back(
    opened: AccessControl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a restart on a machine that boots in 1970."""
    now = [2e9]
    monkeypatch.setattr("swarm.auth.registry_file.time.time", lambda: now[0])
    invitation = new_pair().public
    await said(opened, "", Invite(key=invitation, role="client", valid_s=60.0))
    now[0] += 61
    assert not isinstance(await enrolled(opened, invitation, new_pair()), Enrolled)
    await said(opened, "", Invite(key=new_pair().public, role="client"))  # something is written
    now[0] = 5.0
    assert not isinstance(await enrolled(opened, invitation, new_pair()), Enrolled)
    again = RegistryFile(tmp_path / "locked" / "roll.json")
    assert again.now() == 2e9 + 61


# --- the broker's own key ---------------------------------------------------------------------------------------------


def keys_in(tmp_path: Path) -> set[str]:
    """That the broker would answer to if it were started now."""
    return {pair.public for pair in BrokerKeys(tmp_path / "locked").pairs}


async def body(opened: AccessControl, message: ClientMessage, key: str = "") -> Json:
    answer = await said(opened, key, message)
    assert isinstance(answer, Report)
    return {"ok": answer.ok, **answer.body}


async def knows(opened: AccessControl) -> dict[object, object]:
    """Who is listed as one who knows the broker's key."""
    members = (await body(opened, Query(what="keys")))["members"]
    assert isinstance(members, list)
    return {row["name"]: row["knows_broker"] for row in members if isinstance(row, dict)}


def knock(opened: AccessControl, key: str, door: str) -> None:
    """As a door does when somebody has come in."""
    lock = opened.bind_addresses("127.0.0.1", "client")[1].auth
    assert lock is not None
    assert lock.on_authenticated is not None
    assert door in {pair.public for pair in lock.pairs}
    lock.on_authenticated(key, door)


async def test_the_old_key_is_answered_to_until_all_know_the_new_one(opened: AccessControl, tmp_path: Path) -> None:
    """Who has it on its disk and says so, or has knocked at it; whoever is off is waited for, and shown."""
    pair, invitation = new_pair(), new_pair().public
    far = pair.public
    await said(opened, "", Invite(key=invitation, role="worker"))
    await enrolled(opened, invitation, pair, "far")
    told: list[str] = []
    opened.on_broker_key_changed = lambda: told.append(opened.broker_keys.public)
    old = opened.broker_keys.public
    begun = await body(opened, RotateBroker())
    new = opened.broker_keys.public
    assert (begun["key"], begun["is_over"], begun["behind"]) == (new, False, ["laptop (client)", "far (worker)"])
    assert told == [new]
    assert keys_in(tmp_path) == {old, new} != {old}
    assert await knows(opened) == {"laptop": False, "far": False}
    assert opened.pending_messages(far) == [BrokerKey(key=new)]
    assert opened.pending_messages("") == []
    await said(opened, OWN, BrokerKeyKept(key=old))  # of before
    assert await knows(opened) == {"laptop": False, "far": False}
    await said(opened, OWN, BrokerKeyKept(key=new))
    assert await knows(opened) == {"laptop": True, "far": False}
    assert (await body(opened, RotateBroker()))["behind"] == ["far (worker)"]
    assert opened.broker_keys.public == new  # said again, it is the same one
    knock(opened, far, old)
    await settle(opened)
    assert keys_in(tmp_path) == {old, new}
    knock(opened, far, new)
    await settle(opened)
    assert keys_in(tmp_path) == {new}
    assert opened.pending_messages(far) == []
    assert await knows(opened) == {"laptop": True, "far": True}


async def test_a_broker_that_is_started_again_goes_on_with_its_keys(opened: AccessControl, tmp_path: Path) -> None:
    """At each step: who knew the new key still does, who did not is still waited for."""
    settings = Settings.model_validate({"broker": {"listen": ["192.0.2.1"]}})
    old = opened.broker_keys.public
    await said(opened, "", RotateBroker())
    new = opened.broker_keys.public
    again = AccessControl(settings, tmp_path / "locked")
    assert (again.broker_keys.public, again.broker_keys.former) == (new, old)
    again.drop_former_key()
    await settle(again)
    assert await knows(again) == {"laptop": False}
    assert again.broker_keys.former == old
    await said(again, OWN, BrokerKeyKept(key=new))
    assert again.broker_keys.former is None
    last = AccessControl(settings, tmp_path / "locked")
    assert (last.broker_keys.pairs, await knows(last)) == (again.broker_keys.pairs, {"laptop": True})


async def test_who_knocks_at_the_old_key_after_all_is_waited_for(opened: AccessControl) -> None:
    """Another process of that machine, say, that was told nothing yet."""
    old = opened.broker_keys.public
    pair, invitation = new_pair(), new_pair().public
    far = pair.public
    await said(opened, "", Invite(key=invitation, role="worker"))
    await enrolled(opened, invitation, pair, "far")
    await said(opened, "", RotateBroker())
    new = opened.broker_keys.public
    await said(opened, OWN, BrokerKeyKept(key=new))
    knock(opened, OWN, old)
    assert (await knows(opened))["laptop"] is False
    knock(opened, far, new)
    await settle(opened)
    assert opened.broker_keys.former == old
    await said(opened, OWN, BrokerKeyKept(key=new))
    assert opened.broker_keys.former is None


async def test_who_does_not_know_the_new_key_is_named_when_it_is_shut_out(
    opened: AccessControl, tmp_path: Path
) -> None:
    """By the last word of who governs; and shown afterwards, too."""
    refused = await body(opened, RotateBroker(now=True))
    assert (refused["ok"], "run the command without --now first" in str(refused["error"])) == (False, True)
    await said(opened, "", RotateBroker())
    new = opened.broker_keys.public
    over = await body(opened, RotateBroker(now=True))
    assert (over["is_over"], over["shut_out"]) == (True, ["laptop (client)"])
    assert keys_in(tmp_path) == {new}
    assert await knows(opened) == {"laptop": False}
    assert (await body(opened, Query(what="keys")))["former_key"] == ""


async def test_invitations_are_good_for_as_long_as_their_key_is_answered_to(
    opened: AccessControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ones of before are waited for until they are used or have expired; later ones name the new key."""
    now = [2e9]
    monkeypatch.setattr("swarm.auth.registry_file.time.time", lambda: now[0])
    before, after = new_pair().public, new_pair().public
    await said(opened, "", Invite(key=before, role="worker", valid_s=60, name="far"))
    await said(opened, "", RotateBroker())
    new = opened.broker_keys.public
    await said(opened, OWN, BrokerKeyKept(key=new))
    assert (await body(opened, RotateBroker()))["behind"] == ["the invitation far (for a worker)"]
    assert (await body(opened, Invite(key=after, role="client")))["key"] == new
    assert opened.pending_messages(before) == [BrokerKey(key=new)]
    now[0] += 61
    opened.drop_former_key()
    await settle(opened)
    assert opened.broker_keys.former is None


async def test_who_joins_by_the_old_key_is_waited_for(opened: AccessControl) -> None:
    """It has been told the new one on the way, and shows it by knocking."""
    before, pair = new_pair().public, new_pair()
    await said(opened, "", Invite(key=before, role="worker"))
    await said(opened, "", RotateBroker())
    new = opened.broker_keys.public
    await said(opened, OWN, BrokerKeyKept(key=new))
    assert isinstance(await enrolled(opened, before, pair, "far"), Enrolled)
    assert opened.broker_keys.former is not None
    knock(opened, pair.public, new)
    await settle(opened)
    assert opened.broker_keys.former is None


async def test_only_who_governs_changes_others_keys(opened: AccessControl) -> None:
    for message in (RotateBroker(), RotateBroker(now=True), RotateMember(name="laptop")):
        refused = await body(opened, message, OWN)
        assert (refused["ok"], "admin" in str(refused["error"])) == (False, True)
    assert opened.broker_keys.former is None


async def test_a_brokers_key_of_systemd_is_not_changed_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: AccessControl
) -> None:
    (tmp_path / "swarm.key").write_text(new_pair().secret)
    (tmp_path / "swarm.key").chmod(0o400)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    made = AccessControl(Settings.model_validate({"broker": {"listen": ["192.0.2.1"]}}), tmp_path / "locked")
    refused = await body(made, RotateBroker())
    assert (refused["ok"], "change it there" in str(refused["error"])) == (False, True)
    assert made.broker_keys.former is None


async def test_a_member_that_is_off_is_told_to_change_its_key_when_it_knocks(
    opened: AccessControl, tmp_path: Path
) -> None:
    """Also after a restart of the broker; until it has."""
    ordered: list[str] = []
    opened.on_rotation_ordered = ordered.append
    assert (await body(opened, RotateMember(name="laptop")))["name"] == "laptop"
    assert ordered == [OWN]
    again = AccessControl(Settings.model_validate({"broker": {"listen": ["192.0.2.1"]}}), tmp_path / "locked")
    assert again.pending_messages(OWN) == [RotateKey()]
    assert await rotated(again, OWN, NEXT) == (True, "")
    assert again.pending_messages(OWN) == [RotateKey()]
    await said(again, NEXT, Describe())
    assert again.pending_messages(NEXT) == []
    unknown = await body(again, RotateMember(name="nobody"))
    assert (unknown["ok"], "there is no" in str(unknown["error"])) == (False, True)


# --- the disk ---------------------------------------------------------------------------------------------------------


def slow(monkeypatch: pytest.MonkeyPatch, is_through: threading.Event) -> Growing[int]:
    """A disk that takes its time, until it is let through; what it was asked for."""
    asked = Growing[int]()
    fsync = os.fsync

    def wait(fd: int) -> None:
        asked.append(fd)
        is_through.wait(2.0)  # who waits in the loop would wait for ever
        fsync(fd)

    monkeypatch.setattr("swarm.private_files.os.fsync", wait)
    return asked


async def test_a_slow_disk_holds_up_nobody_but_who_asked(
    opened: AccessControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop turns; nothing counts and nobody is answered before the disk has it; answers come in order."""
    is_through = threading.Event()
    asked = slow(monkeypatch, is_through)
    answers = Growing[str]()
    running = asyncio.create_task(opened.writer.run())
    for number in range(3):
        invitation = Invite(key=new_pair().public, role="worker", name=f"far{number}")
        assert opened.handle_client_message("", invitation, lambda answer: answers.append(str(answer)))
    assert opened.handle_client_message("", Revoke(name="laptop"), lambda answer: answers.append(str(answer)))
    await asked.has(1)
    for _ in range(100):
        await asyncio.sleep(0)
    assert answers == []
    assert await core_is_asked(opened, OWN)  # it is revoked when that is written
    is_through.set()
    await answers.has(4)
    assert [word in answer for word, answer in zip(("far0", "far1", "far2", "laptop"), answers, strict=True)] == [
        True
    ] * 4
    assert not await core_is_asked(opened, OWN)
    running.cancel()


async def core_is_asked(opened: AccessControl, key: str) -> bool:
    """May who has this key ask what is the core's to answer?"""
    return not opened.handle_client_message(key, Describe(), lambda answer: None)


async def test_what_the_disk_refuses_is_not_so(opened: AccessControl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asked is told; what waits behind it is carried out as if it had not been said."""

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    answers: list[ServerMessage] = []
    with monkeypatch.context() as patch:
        patch.setattr("swarm.private_files.os.fsync", full)
        assert opened.handle_client_message("", Revoke(name="laptop"), answers.append)
        await opened.writer.run_next()
    assert opened.handle_client_message("", RotateMember(name="laptop"), answers.append)
    await settle(opened)
    refused, done = answers
    assert isinstance(refused, Report)
    assert "No space left" in str(refused.body["error"])
    assert isinstance(done, Report)
    assert done.ok
    assert opened.account(OWN) is not None


async def test_few_changes_wait_for_the_disk(opened: AccessControl, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are told to come again."""
    monkeypatch.setattr("swarm.broker.auth.writer.MAX_WAITING", 2)
    answers: list[ServerMessage] = []
    for _ in range(3):
        assert opened.handle_client_message("", Invite(key=new_pair().public, role="client"), answers.append)
    (refused,) = answers
    assert isinstance(refused, Report)
    assert "in a moment" in str(refused.body["error"])
    await settle(opened)
    assert len(answers) == 3
