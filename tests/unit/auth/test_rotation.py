"""A machine's key is changed: wherever it stops half-way, one key that counts is in the file, and it can go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.auth import memberships
from swarm.auth.invitation import Invitation
from swarm.auth.memberships import JoinedSwarm
from swarm.auth.registry import KeyRegistry
from swarm.auth.rotation import CredentialStore, rotate
from swarm.errors import ConfigError, Unavailable
from swarm.wire.messages import Enrol, Enrolled, Invite
from swarm.wire.transport.keys import new_pair

NOW = 1_000_000.0
STEPS = ("nothing", "told, and the answer lost", "told", "kept", "knocked")


class Stopped(Exception):
    """The power is cut."""


class Broker:
    """Its roll, and where it (or the way to it) stops."""

    def __init__(self, joined: JoinedSwarm, stops_at: str = "") -> None:
        roll = KeyRegistry().invite(Invite(key="11" * 32, role="worker"), NOW)
        self.roll, _ = roll.enrol("11" * 32, Enrol(key=joined.pair.public, name="far"), NOW)
        self.stops_at = stops_at

    def tell(self, joined: JoinedSwarm, key: str) -> None:
        self._stop("nothing")
        assert joined.next is not None
        own = joined if self.counts(joined.pair.public) else None
        self.roll = self.roll.rotate(own.pair.public if own else key, key) if own else self.roll
        if not self.counts(key):
            raise Unavailable("turned away")
        self._stop("told, and the answer lost")

    def knock(self, joined: JoinedSwarm) -> None:
        self._stop("kept")
        assert self.counts(joined.pair.public)
        self.roll = self.roll.record_use(joined.pair.public)
        self._stop("knocked")

    def counts(self, key: str) -> bool:
        return self.roll.role_of(key, NOW) == "worker"

    def _stop(self, at: str) -> None:
        if self.stops_at == at:
            raise Stopped


@pytest.fixture
def joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JoinedSwarm:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)
    invitation = Invitation(("tcp://h:5700",), "ab" * 32, new_pair().secret, "worker")
    return memberships.add(tmp_path, invitation, new_pair(), invitation.addresses, Enrolled(name="far", role="worker"))


def the_one(state: Path) -> JoinedSwarm:
    (found,) = memberships.read_all(state)
    return found


def test_the_new_key_counts_and_the_old_one_does_not(tmp_path: Path, joined: JoinedSwarm) -> None:
    broker = Broker(joined)
    successor = rotate(CredentialStore(tmp_path, joined), broker.tell, broker.knock)
    assert the_one(tmp_path) == successor
    assert successor.next is None
    assert successor.pair != joined.pair
    assert broker.counts(successor.pair.public)
    assert not broker.counts(joined.pair.public)


@pytest.mark.parametrize("at", ["nothing", "told, and the answer lost", "kept", "knocked"])
def test_it_can_stop_anywhere(tmp_path: Path, joined: JoinedSwarm, at: str) -> None:
    """What is in the file counts at every moment; said again, it ends well, with the key that was announced if it was
    not kept yet."""
    broker = Broker(joined, stops_at=at)
    with pytest.raises(Stopped):
        rotate(CredentialStore(tmp_path, joined), broker.tell, broker.knock)
    assert broker.counts(the_one(tmp_path).pair.public)
    broker.stops_at = ""
    announced = the_one(tmp_path).next
    successor = rotate(CredentialStore(tmp_path, the_one(tmp_path)), broker.tell, broker.knock)
    assert announced in (None, successor.secret)
    assert the_one(tmp_path) == successor
    assert broker.counts(successor.pair.public)
    assert not broker.counts(joined.pair.public)


def test_who_runs_with_the_old_key_finds_the_new_one(tmp_path: Path, joined: JoinedSwarm) -> None:
    home = CredentialStore(tmp_path, joined)
    assert home.newer() is None
    broker = Broker(joined)
    successor = rotate(CredentialStore(tmp_path, joined), broker.tell, broker.knock)
    assert home.newer() == successor
    assert CredentialStore(tmp_path, successor).newer() is None
    next(iter((tmp_path / "joined").iterdir())).chmod(0o644)
    assert home.newer() is None  # others may have read it


def test_a_key_that_was_handed_over_is_not_changed_here(
    tmp_path: Path, joined: JoinedSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = (tmp_path / "joined").iterdir()
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    file.rename(credentials / memberships.CREDENTIAL)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(credentials))
    assert the_one(tmp_path) == joined
    broker = Broker(joined, stops_at="nothing")
    with pytest.raises(ConfigError, match="change it there"):
        rotate(CredentialStore(tmp_path, joined), broker.tell, broker.knock)


def test_the_brokers_new_key_is_kept_beside_ones_own(tmp_path: Path, joined: JoinedSwarm) -> None:
    """In the same file, and by whoever asks; a change of this machine's own key loses nothing of it, nor the other way
    round, whatever each has read before."""
    home, other = CredentialStore(tmp_path, joined), CredentialStore(tmp_path, joined)
    kept = home.set_broker_key("cd" * 32)
    assert (home.newer(), home.membership) == (None, kept)
    assert other.newer() == kept == the_one(tmp_path)
    assert (other.switch_to_newer(), other.switch_to_newer(), other.membership) == (kept, None, kept)
    assert (kept.broker, kept.secret) == ("cd" * 32, joined.secret)
    assert kept.endpoint == f"tcp://{'cd' * 32}@h:5700"
    broker = Broker(joined)
    successor = rotate(CredentialStore(tmp_path, joined), broker.tell, broker.knock)
    assert (successor.broker, successor.next) == ("cd" * 32, None)
    home.set_broker_key("ef" * 32)
    assert home.switch_to_newer() == the_one(tmp_path)
    assert (the_one(tmp_path).broker, the_one(tmp_path).secret) == ("ef" * 32, successor.secret)


def test_where_the_brokers_key_cant_be_kept_that_is_said(
    tmp_path: Path, joined: JoinedSwarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the file of what was handed over, which goes first, also if another one lies here."""
    (file,) = (tmp_path / "joined").iterdir()
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    (credentials / memberships.CREDENTIAL).write_bytes(file.read_bytes())
    (credentials / memberships.CREDENTIAL).chmod(0o600)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(credentials))
    with pytest.raises(ConfigError, match="change it there"):
        CredentialStore(tmp_path, joined).set_broker_key("cd" * 32)
    monkeypatch.delenv("CREDENTIALS_DIRECTORY")
    assert the_one(tmp_path) == joined
