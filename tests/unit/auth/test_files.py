"""What is on disk: for the owner alone, whole or as before, and refused with words when it is something else."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from swarm.auth import memberships
from swarm.auth.broker_keys import BrokerKeys, load_or_make
from swarm.auth.invitation import Invitation
from swarm.auth.memberships import JoinedSwarm
from swarm.auth.registry import KeyRegistry, RegistryRefusal
from swarm.auth.registry_file import RegistryFile
from swarm.errors import ConfigError
from swarm.wire.messages import Enrol, Enrolled, Invite, Role
from swarm.wire.transport.keys import KeyPair, new_pair, public_of

NOW = 1_000_000.0
BROKER = "ab" * 32


@pytest.fixture(autouse=True)
def _no_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CREDENTIALS_DIRECTORY", raising=False)


def a_roll() -> KeyRegistry:
    roll = KeyRegistry().invite(Invite(key="11" * 32, role="worker", uses=2, name="far"), NOW)
    roll, _ = roll.enrol("11" * 32, Enrol(key="22" * 32), NOW)
    return roll.rotate("22" * 32, "33" * 32)


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


# --- the machine's own key --------------------------------------------------------------------------------------------


def test_a_key_is_made_once(tmp_path: Path) -> None:
    """In a file and a directory of its owner's alone; afterwards it is the same."""
    path = tmp_path / "locked" / "broker.key"
    pair = load_or_make(path)
    assert load_or_make(path) == pair
    assert public_of(pair.secret) == pair.public
    assert (mode_of(path), mode_of(path.parent)) == (0o600, 0o700)
    assert [each.name for each in path.parent.iterdir()] == ["broker.key"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o602])
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "broker.key"
    load_or_make(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=r"others may read .* chmod 600"):
        load_or_make(path)


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "open" / "broker.key"
    load_or_make(path)
    path.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write the directory"):
        load_or_make(path)


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"a" * 63, b"a" * 65, b"g" * 64, b"A" * 64, b"a" * 5000])
def test_what_is_no_key_is_refused(tmp_path: Path, content: bytes) -> None:
    """And stays where it is: nothing is made in its place."""
    path = tmp_path / "broker.key"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"broker\.key"):
        load_or_make(path)
    assert path.read_bytes() == content


def test_a_key_from_systemd_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one among the credentials, the file is used."""
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    own = load_or_make(tmp_path / "own" / "broker.key")
    pair = new_pair()
    (tmp_path / "swarm.key").write_text(pair.secret + "\n")
    (tmp_path / "swarm.key").chmod(0o400)
    assert load_or_make(tmp_path / "own" / "broker.key") == pair != own
    (tmp_path / "swarm.key").chmod(0o444)
    with pytest.raises(ConfigError, match="others may read"):
        load_or_make(tmp_path / "own" / "broker.key")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who owns credentials")
def test_systemd_lets_roots_group_read_a_credential_and_no_other_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So its access lists look; the same on another file is refused."""
    path = tmp_path / "swarm.key"
    path.write_text(new_pair().secret)
    path.chmod(0o440)
    with pytest.raises(ConfigError, match="others may read"):
        load_or_make(path)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert load_or_make(path).secret == path.read_text()


# --- the broker's own key ---------------------------------------------------------------------------------------------


def test_the_brokers_key_is_changed_without_a_gap(tmp_path: Path) -> None:
    """Both count until the old one is put away; a start at any step finds what counted."""
    own = BrokerKeys(tmp_path / "locked")
    (old,) = own.pairs
    assert (own.public, own.former) == (old.public, None)
    own.begin_rotation()
    new, second = own.pairs
    assert (second, own.public, own.former) == (old, new.public, old.public)
    own.begin_rotation()
    again = BrokerKeys(tmp_path / "locked")
    assert again.pairs == own.pairs == (new, old)
    assert {each.name: mode_of(each) for each in (tmp_path / "locked").iterdir()} == {
        "broker.key": 0o600,
        "broker.next": 0o600,
    }
    again.finish_rotation()
    assert again.pairs == BrokerKeys(tmp_path / "locked").pairs == (new,)
    assert [each.name for each in (tmp_path / "locked").iterdir()] == ["broker.key"]
    again.finish_rotation()
    assert again.pairs == (new,)


def test_a_disk_that_refuses_leaves_the_brokers_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At both steps, with words, in memory and on disk; the next attempt succeeds."""
    own = BrokerKeys(tmp_path / "locked")
    before = own.pairs

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("swarm.private_files.os.fsync", full)
        with pytest.raises(ConfigError, match="No space left"):
            own.begin_rotation()
    assert own.pairs == BrokerKeys(tmp_path / "locked").pairs == before
    own.begin_rotation()
    both = own.pairs
    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(ConfigError, match=r"No space left.*both stay valid"):
            own.finish_rotation()
    assert own.pairs == BrokerKeys(tmp_path / "locked").pairs == both
    own.finish_rotation()
    assert own.pairs == both[:1]


def test_a_brokers_key_that_was_handed_over_is_not_changed_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "swarm.key").write_text(new_pair().secret)
    (tmp_path / "swarm.key").chmod(0o400)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    with pytest.raises(ConfigError, match="change it there"):
        BrokerKeys(tmp_path / "locked").check_changeable()


# --- the roll ---------------------------------------------------------------------------------------------------------


def test_a_roll_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Members, announced keys, invitations and their uses."""
    path = tmp_path / "locked" / "roll.json"
    file, roll = RegistryFile(path), a_roll()
    assert file.registry.keys == set()
    file.write(roll)
    again = RegistryFile(path).registry
    assert (again.members, again.invited) == (roll.members, roll.invited)
    assert (mode_of(path), mode_of(path.parent)) == (0o600, 0o700)


def test_a_full_disk_leaves_the_old_roll(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On disk and in memory; who asked is told; the next one may succeed."""
    path = tmp_path / "roll.json"
    file, old = RegistryFile(path), a_roll()
    file.write(old)
    before = path.read_bytes()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("swarm.private_files.os.fsync", full)
        with pytest.raises(RegistryRefusal, match=r"No space left .* nothing has changed"):
            file.write(old.revoke("22" * 8, NOW))
    assert file.registry is old
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["roll.json"]


def test_a_half_written_roll_is_refused(tmp_path: Path) -> None:
    """Wherever it ends: an empty roll would forget who was revoked, and who is known."""
    path = tmp_path / "roll.json"
    RegistryFile(path).write(a_roll())
    whole = path.read_bytes().rstrip()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match="is not a key registry"):
            RegistryFile(path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[]", "not a key registry"),
        (b"\xff", "not a key registry"),
        (b'{"version": 2}', "of version 2"),
        (b'{"version": 1, "members": [], "invited": [], "more": 1}', "not a key registry"),
        (
            b'{"version": 1, "members": [{"name": "a/b", "role": "admin", "key": "x", "since": 1}]}',
            "not a key registry",
        ),
    ],
)
def test_what_is_no_roll_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "roll.json"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=words):
        RegistryFile(path)


def test_a_roll_with_a_key_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "roll.json"
    RegistryFile(path).write(a_roll())
    path.write_text(path.read_text().replace("33" * 32, "11" * 32))
    with pytest.raises(ConfigError, match=r"roll\.json: .* twice"):
        RegistryFile(path)


def test_a_roll_that_others_may_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "roll.json"
    RegistryFile(path).write(a_roll())
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="others may read"):
        RegistryFile(path)


# --- what was joined --------------------------------------------------------------------------------------------------


def join(state: Path, name: str, role: Role = "client", host: str = "h") -> tuple[Invitation, JoinedSwarm]:
    invitation = Invitation((f"tcp://{host}:5700",), BROKER, new_pair().secret, role)
    return invitation, memberships.add(
        state, invitation, new_pair(), invitation.addresses, Enrolled(name=name, role=role)
    )


def test_what_was_joined_is_found(tmp_path: Path) -> None:
    """The last one, or by address or name; in the roles that are asked for."""
    assert memberships.find(tmp_path) is None
    _, a = join(tmp_path, "a", "worker", host="x")
    _, b = join(tmp_path, "b", "client", host="y")
    assert memberships.find(tmp_path) == b
    assert memberships.find(tmp_path, roles=("worker",)) == a
    assert memberships.find(tmp_path, roles=("admin",)) is None
    for url in ("tcp://x:5700", "a", a.endpoint):
        assert memberships.find(tmp_path, url) == a
    assert a.endpoint == f"tcp://{BROKER}@x:5700"
    assert a.pair == KeyPair(public_of(a.secret), a.secret)
    for url in ("tcp://127.0.0.1:5700", "tcp://x:5701", "c", f"tcp://{'cd' * 32}@x:5700"):
        assert memberships.find(tmp_path, url) is None


def test_an_invitation_that_was_used_here_is_known(tmp_path: Path) -> None:
    """And another one is not."""
    invitation, own = join(tmp_path, "a")
    join(tmp_path, "b")
    assert memberships.find_by_invitation(tmp_path, invitation) == own
    assert memberships.find_by_invitation(tmp_path, invitation._replace(secret=new_pair().secret)) is None


def test_keys_that_were_joined_with_are_their_owners_alone(tmp_path: Path) -> None:
    join(tmp_path, "a")
    [path] = (tmp_path / "joined").iterdir()
    assert (mode_of(path), mode_of(path.parent)) == (0o600, 0o700)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"others may read .* join again"):
        memberships.find(tmp_path)


def test_a_broker_names_no_path(tmp_path: Path) -> None:
    """Whatever it calls us, the file is in its folder."""
    join(tmp_path, "../../evil")
    assert [path.name for path in tmp_path.iterdir()] == ["joined"]
    assert [path.name for path in (tmp_path / "joined").iterdir()] == [f"client-{BROKER[:8]}.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '"\xff"'])
def test_what_does_not_say_what_was_joined_is_refused(tmp_path: Path, content: str) -> None:
    _, own = join(tmp_path, "a")
    [path] = (tmp_path / "joined").iterdir()
    path.write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match="is not a valid membership"):
        memberships.find(tmp_path, own.name)


def test_what_systemd_hands_over_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For hosts whose services have no state of their own."""
    _, a = join(tmp_path, "a")
    [path] = (tmp_path / "joined").iterdir()
    path.rename(tmp_path / "swarm.joined")
    _, b = join(tmp_path, "b")
    assert memberships.find(tmp_path) == b
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert memberships.find(tmp_path) == a
    assert memberships.find(tmp_path, "b") == b


def test_the_state_directory_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/var/x")
    assert memberships.default_state_dir() == Path("/var/x/swarm")
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/u")
    assert memberships.default_state_dir() == Path("/home/u/.local/state/swarm")
