"""``swarmctl invite`` and ``swarmctl keys`` against a scripted broker: what they ask, what they print."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swarm.auth import invitation, memberships
from swarm.auth.invitation import Invitation
from swarm.ctl.main import run as swarmctl
from swarm.wire.messages import Enrolled, Invite, Report, Revoke, RotateBroker, RotateMember
from swarm.wire.transport.keys import new_pair, public_of
from tests.integration.fake_broker import FakeBroker

BROKER = "ab" * 32
MEMBERS = [
    {"name": "far", "role": "worker", "key": "1234567890abcdef", "since": 1.0, "invited_by": "", "is_rotating": False},
    {"name": "both", "role": "client", "key": "fedcba0987654321", "since": 1.0, "invited_by": "", "is_rotating": False},
]
OPEN = [{"name": "", "role": "admin", "key": "00112233aabbccdd", "since": 1.0, "uses_left": 2, "expires_in_s": 60.0}]

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(autouse=True)
def _own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("SWARM_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeBroker]:
    with FakeBroker(lambda submit, index: []).in_thread() as broker:
        body = {"members": MEMBERS, "invitations": OPEN, "key": BROKER, "locked": True}
        broker.reports["keys"] = Report(what="keys", ok=True, body=body)
        monkeypatch.setenv("SWARM_URL", broker.url)
        yield broker


@pytest.fixture
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_URL", "tcp://127.0.0.1:9")
    monkeypatch.setenv("SWARM_CLIENT__CONNECT_TIMEOUT_S", "0.2")


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert swarmctl([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def failed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert swarmctl(words) == 1
    return capsys.readouterr().err


def test_an_invitation_has_all_that_is_needed(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """The broker's addresses and key, and a secret of which the broker was told the public half alone."""
    assert swarmctl(["invite", "--role", "worker", "--uses", "3", "--for", "2h", "--name", "far"]) == 0
    line, then, service = capsys.readouterr().out.splitlines()
    read = invitation.decode(line)
    assert (read.addresses, read.broker, read.role) == (("tcp://192.0.2.1:5700",), BROKER, "worker")
    [asked] = broker.heard_of(Invite)
    assert asked == Invite(key=public_of(read.secret), role="worker", uses=3, valid_s=7200.0, name="far")
    assert then == "Good 3 times, for 2h. Run on the other machine, and paste the line there: swarm worker --join -"
    assert service == "As a service there, after joining once (docs/how-to/systemd.md): swarm systemd install"


def test_the_command_for_a_worker_has_its_device_and_memory(
    broker: FakeBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--device", "cuda:1", "--memory-limit", "8GiB")
    assert swarmctl(["invite", "--role", "worker", *flags]) == 0
    _, then, service = capsys.readouterr().out.splitlines()
    assert then.endswith("swarm worker --join - --device cuda:1 --memory-limit 8GiB")
    assert service.endswith(
        "swarm systemd install --gpu --memory-limit 8GiB, then systemctl edit swarm-worker@NAME: [Service], "
        "Environment=SWARM_WORKER__DEVICE=cuda:1"
    )
    assert shown(capsys, "invite", "--role", "worker", *flags)["run"].endswith("--device cuda:1 --memory-limit 8GiB")
    for words, error in (
        (("client", *flags), "are for --role worker"),
        (("worker", "--device", "gpu"), "--device takes cpu"),
        (("worker", "--memory-limit", "much"), "--memory-limit takes a size"),
    ):
        assert swarmctl(["invite", "--role", *words]) == 2
        assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("swarm.example", "tcp://swarm.example:5700"),
        ("swarm.example:80", "tcp://swarm.example:80"),
        ("2001:db8::1", "tcp://[2001:db8::1]:5700"),
        ("[2001:db8::1]:80", "tcp://[2001:db8::1]:80"),
    ],
)
def test_the_addresses_can_be_others(
    broker: FakeBroker, capsys: pytest.CaptureFixture[str], given: str, told: str
) -> None:
    """Behind a forwarded port, say. Without one, the broker's own port."""
    body = shown(capsys, "invite", "--role", "client", "--address", given, "--address", "192.0.2.9")
    assert invitation.decode(body["invitation"]).addresses == (told, "tcp://192.0.2.9:5700")
    assert body["run"].startswith("swarm generate --join swarm1:")


@pytest.mark.parametrize("body", [{}, {"addresses": [], "key": BROKER}, {"addresses": ["tcp://h:1"], "key": "x"}])
def test_a_broker_that_makes_no_sense_is_one_error(
    broker: FakeBroker, capsys: pytest.CaptureFixture[str], body: dict[str, Any]
) -> None:
    broker.reports["invite"] = Report(what="invite", ok=True, body=body)
    assert "another build" in failed(capsys, "invite", "--role", "worker")


def test_a_refusal_is_shown(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    broker.reports["invite"] = Report(what="invite", ok=False, body={"error": "that takes an admin's key"})
    assert "that takes an admin's key" in failed(capsys, "invite", "--role", "worker")


def test_the_list_has_both_kinds(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """Or one of them."""
    shown(capsys, "keys", "add", "alice")
    body = shown(capsys, "keys", "list")
    assert [row["name"] for row in body["keys"]] == ["alice"]
    assert (body["members"], body["invitations"], body["key"]) == (MEMBERS, OPEN, BROKER)
    assert set(shown(capsys, "keys", "list", "--api")) == {"keys"}
    assert "keys" not in shown(capsys, "keys", "list", "--machine")
    assert swarmctl(["keys", "list"]) == 0
    out = capsys.readouterr().out
    for word in ("alice", "far", "1234567890abcdef", "00112233aabbccdd"):
        assert word in out


@pytest.mark.usefixtures("nobody")
def test_without_a_broker_the_files_keys_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """And it says so; they can be revoked, too."""
    shown(capsys, "keys", "add", "alice")
    body = shown(capsys, "keys", "list")
    assert [row["name"] for row in body["keys"]] == ["alice"]
    assert "no broker answers" in body["problem"]
    assert swarmctl(["keys", "list"]) == 0
    assert "machines' keys are unknown: no broker answers" in capsys.readouterr().out
    assert "no broker answers" in failed(capsys, "keys", "revoke", "far")
    assert shown(capsys, "keys", "revoke", "alice")["kind"] == "api"


def test_a_list_that_is_refused_fails(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """API keys are shown all the same; without a broker they are enough, unless machines' keys are asked for."""
    shown(capsys, "keys", "add", "alice")
    broker.reports["keys"] = Report(what="keys", ok=False, body={"error": "that takes an admin's key"})
    assert swarmctl(["keys", "list"]) == 1
    told = capsys.readouterr()
    assert "alice" in told.out
    assert "that takes an admin's key" in told.err
    assert "that takes an admin's key" in failed(capsys, "keys", "list", "--machine", "--json")
    assert swarmctl(["keys", "list", "--api"]) == 0


@pytest.mark.usefixtures("nobody")
def test_machines_keys_alone_cannot_be_listed_without_a_broker(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no broker answers" in failed(capsys, "keys", "list", "--machine")


def test_an_expired_invitation_says_since_when(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    gone = {**OPEN[0], "name": "gone", "expires_in_s": -948.076544, "expired": True}
    body = {"members": [], "invitations": [gone, *OPEN], "key": BROKER, "locked": True}
    broker.reports["keys"] = Report(what="keys", ok=True, body=body)
    assert swarmctl(["keys", "list", "--machine"]) == 0
    out = capsys.readouterr().out
    assert "-16 min" in out
    assert "µs" not in out


def test_what_is_revoked_is_found_among_both(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """By name, or by how a machine's key begins."""
    shown(capsys, "keys", "add", "alice")
    for name in ("far", "12345678", "00112233AABB"):
        assert shown(capsys, "keys", "revoke", name) == {"revoked": name, "kind": "machine"}
    assert broker.heard_of(Revoke) == [Revoke(name=name) for name in ("far", "12345678", "00112233AABB")]
    assert shown(capsys, "keys", "revoke", "alice") == {"revoked": "alice", "kind": "api", "num_left": 0}
    assert "there is no key 'alice'" in failed(capsys, "keys", "revoke", "alice")
    assert len(broker.heard_of(Revoke)) == 3


def test_what_may_be_either_is_asked_for(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is revoked before."""
    shown(capsys, "keys", "add", "both")
    assert "--api or --machine" in failed(capsys, "keys", "revoke", "both")
    assert not broker.heard_of(Revoke)
    assert shown(capsys, "keys", "revoke", "both", "--machine")["kind"] == "machine"
    assert shown(capsys, "keys", "list", "--api")["keys"]
    assert shown(capsys, "keys", "revoke", "both", "--api")["kind"] == "api"


def test_a_machine_shows_what_it_has_joined(
    broker: FakeBroker, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """With public keys; no secret."""
    used, pair = Invitation(("tcp://h:5700",), BROKER, new_pair().secret, "client"), new_pair()
    memberships.add(tmp_path, used, pair, used.addresses, Enrolled(name="me", role="client"))
    body = shown(capsys, "keys", "show")
    assert body["key"] == BROKER
    [row] = body["joined"]
    assert (row["name"], row["role"], row["key"], row["broker"]) == ("me", "client", pair.public, BROKER)
    assert swarmctl(["keys", "show"]) == 0
    out = capsys.readouterr().out
    assert pair.public in out
    assert pair.secret not in out + json.dumps(body)


def test_the_brokers_key_is_changed_and_who_does_not_know_it_is_named(
    broker: FakeBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the old one is answered to, when all know the new one, and when somebody is shut out."""
    key, far = "cd" * 32, ["far (worker)"]
    for now, body, words in (
        (False, {"is_over": False, "behind": far, "shut_out": []}, "until these have the new one: far (worker)"),
        (False, {"is_over": True, "behind": [], "shut_out": []}, "all members have it; the old one is retired"),
        (True, {"is_over": True, "behind": [], "shut_out": far}, "locked out, because they have only the old one: far"),
    ):
        broker.reports["rotate_broker"] = Report(what="rotate_broker", ok=True, body={"key": key, **body})
        more = ["--now"] if now else []
        assert swarmctl(["keys", "rotate", "--broker", *more]) == 0
        out = capsys.readouterr().out
        assert f"is now {key[:16]}" in out
        assert words in out
        assert broker.heard_of(RotateBroker)[-1] == RotateBroker(now=now)
    assert shown(capsys, "keys", "rotate", "--broker")["shut_out"] == ["far (worker)"]
    refused = Report(what="rotate_broker", ok=False, body={"error": "a client may not change the broker's key"})
    broker.reports["rotate_broker"] = refused
    assert "a client may not" in failed(capsys, "keys", "rotate", "--broker")
    for words in (("--broker", "--machine"), ("--now",), ("alice", "--now")):
        assert swarmctl(["keys", "rotate", *words]) == 2
        assert "--broker" in capsys.readouterr().err


def test_a_members_key_is_changed_by_its_name(broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
    """Or by how it begins; an API key of the same name is not taken for it, nor the other way round."""
    shown(capsys, "keys", "add", "alice")
    for name in ("far", "12345678"):
        assert shown(capsys, "keys", "rotate", name)["kind"] == "machine"
    assert broker.heard_of(RotateMember) == [RotateMember(name="far"), RotateMember(name="12345678")]
    assert shown(capsys, "keys", "rotate", "alice")["name"] == "alice"
    assert "there is no key 'nobody'" in failed(capsys, "keys", "rotate", "nobody")
    shown(capsys, "keys", "add", "both")
    assert "--keys-file" in failed(capsys, "keys", "rotate", "both")
    assert len(broker.heard_of(RotateMember)) == 2


def test_the_list_says_who_does_not_know_the_brokers_key(
    broker: FakeBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what has expired; where all is as it should be, nothing is said of it."""
    assert swarmctl(["keys", "list"]) == 0
    out = capsys.readouterr().out
    assert "knows broker" not in out
    assert "expired" not in out
    members = [{**MEMBERS[0], "knows_broker": False}, {**MEMBERS[1], "knows_broker": True}]
    late = [{**OPEN[0], "expired": True, "expires_in_s": -60.0, "knows_broker": True}]
    for former, words in (("ef" * 8, "rotate --broker --now"), ("", "revoke them, and invite them again")):
        body = {"members": members, "invitations": late, "key": BROKER, "locked": True, "former_key": former}
        broker.reports["keys"] = Report(what="keys", ok=True, body=body)
        assert swarmctl(["keys", "list"]) == 0
        out = capsys.readouterr().out
        assert words in " ".join(out.split())
        assert "knows broker" in out
        assert "expired" in out


def test_an_admins_key_stays_one_when_it_is_rotated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """And is shown as one; others are none, and none becomes one. Each keeps its id, to which its files belong."""
    file = ("--keys-file", str(tmp_path / "keys.json"))
    assert shown(capsys, "keys", "add", "alice", *file)["admin"] is False
    assert shown(capsys, "keys", "add", "root", "--admin", *file)["admin"] is True
    before = [row["id"] for row in shown(capsys, "keys", "list", *file)["keys"]]
    for name in ("alice", "root"):
        shown(capsys, "keys", "rotate", name, *file)
    listed = shown(capsys, "keys", "list", *file)["keys"]
    assert [row["id"] for row in listed] == before
    assert {row["name"]: row["admin"] for row in listed} == {"alice": False, "root": True}


def test_a_keys_models_stay_when_it_is_rotated(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """And are listed; a key without any may use all."""
    file = ("--keys-file", str(tmp_path / "keys.json"))
    assert shown(capsys, "keys", "add", "alice", *file)["models"] == []
    assert shown(capsys, "keys", "add", "bob", "--model", "tiny", "--model", "small", *file)["models"] == [
        "tiny",
        "small",
    ]
    shown(capsys, "keys", "rotate", "bob", *file)
    listed = shown(capsys, "keys", "list", *file)["keys"]
    assert {row["name"]: row["models"] for row in listed} == {"alice": [], "bob": ["tiny", "small"]}
    assert swarmctl(["keys", "list", *file]) == 0
    assert "tiny, small" in capsys.readouterr().out
