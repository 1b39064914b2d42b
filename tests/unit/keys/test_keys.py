"""API keys: made, recognised, kept in a file of their owner's alone."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from swarm.errors import ConfigError
from swarm.keys.file import Watched, change, read
from swarm.keys.keys import Key, Limits, Ring, make, priority_named

AT = "2026-01-01T00:00:00Z"


def test_a_key_is_recognised_and_nothing_else_is() -> None:
    """By all of it; not with another's secret, another's id, or a bit less."""
    one, shown = make("one", Limits(), AT)
    two, other = make("two", Limits(), AT)
    ring = Ring([one, two])
    assert ring.find(shown) == one
    assert ring.find(other) == two
    mixed = shown.rpartition("-")[0][:21] + "-" + other[22:]
    for wrong in ("", "sk-swarm-", shown[:-1], shown + "x", mixed, shown.upper(), "x" * 100_000, "sk-swarm-é"):
        assert ring.find(wrong) is None
    assert mixed[:22] == shown[:22]  # the mixture is one key's id with the other's secret


def test_the_file_does_not_tell_a_secret(tmp_path: Path) -> None:
    """Neither the file nor its directory can be read by others, and what is in it opens nothing."""
    path = tmp_path / "own" / "keys.json"
    key, shown = make("one", Limits(60, 2, 1000, 0), AT)
    change(path, lambda ring: ring.add(key))
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert shown[22:] not in path.read_text()  # behind its id
    ring = read(path)
    assert ring is not None
    assert ring.keys == (key,)
    assert ring.find(key.hash) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys.json"
    change(path, lambda ring: ring.add(make("one", Limits(), AT)[0]))
    path.chmod(mode)
    with pytest.raises(ConfigError, match=r"others may read .* chmod 600"):
        read(path)


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    """Whoever writes there can put another file in its place."""
    path = tmp_path / "open" / "keys.json"
    change(path, lambda ring: ring.add(make("one", Limits(), AT)[0]))
    path.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write the directory"):
        read(path)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"version": 1}', '{"version": 1, "keys": [{"name": "x"}]}', "\xff"]
)
def test_what_is_no_file_of_keys_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content, encoding="latin-1")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="not a file of keys"):
        read(path)


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text('{"version": 2, "keys": []}')
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="of version 2"):
        read(path)


def test_no_file_is_no_keys(tmp_path: Path) -> None:
    assert read(tmp_path / "keys.json") is None


def test_names_are_once_and_plain() -> None:
    ring = Ring([make("one", Limits(), AT)[0]])
    with pytest.raises(ConfigError, match="a key 'one' already"):
        ring.add(make("one", Limits(), AT)[0])
    with pytest.raises(ConfigError, match="no key 'two'; there are: one"):
        ring.remove("two")
    for name in ("", "a b", "-x", "x" * 65, "x\n"):
        with pytest.raises(ConfigError, match="a key's name"):
            make(name, Limits(), AT)


def test_limits_must_make_sense() -> None:
    for limits in (
        Limits(rate_per_min=-1),
        Limits(concurrency=-1),
        Limits(tokens_per_day=-1),
        Limits(max_priority=101),
    ):
        with pytest.raises(ConfigError):
            make("one", limits, AT)
    assert priority_named("low") < priority_named("normal") < priority_named("high")
    assert priority_named("-7") == -7
    with pytest.raises(ConfigError, match="royal"):
        priority_named("royal")


def test_changes_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    """Each reads what the one before wrote."""
    path = tmp_path / "keys.json"
    keys = [make(f"k{number}", Limits(), AT)[0] for number in range(12)]
    threads = [threading.Thread(target=change, args=(path, lambda ring, key=key: ring.add(key))) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ring = read(path)
    assert ring is not None
    assert {key.name for key in ring.keys} == {key.name for key in keys}
    assert not list(tmp_path.glob(".keys.json.*"))


def _one(path: Path, name: str) -> Key:
    return change(path, lambda ring: ring.add(make(name, Limits(), AT)[0])).keys[-1]


def test_whoever_watches_sees_changes_and_survives_accidents(tmp_path: Path) -> None:
    """A file that becomes unreadable, wrong or disappears leaves the keys as they were: the door never opens."""
    path = tmp_path / "keys.json"
    watched = Watched(path)
    assert watched.ring is None
    assert watched.refresh() is None
    one = _one(path, "one")
    assert watched.refresh() == ""
    assert watched.refresh() is None
    assert watched.ring.keys == (one,)

    path.chmod(0o644)
    assert "others may read" in (watched.refresh() or "")
    assert watched.refresh() is None  # said once
    path.chmod(0o600)
    assert watched.refresh() == ""
    path.write_text("{")
    assert "not a file of keys" in (watched.refresh() or "")
    os.unlink(path)
    assert "is gone" in (watched.refresh() or "")
    assert watched.ring.keys == (one,)

    two = _one(path, "two")
    assert watched.refresh() == ""
    assert watched.ring.keys == (two,)
    change(path, lambda ring: ring.remove("two"))
    assert watched.refresh() == ""
    assert watched.ring is not None  # nobody is let in, rather than everybody
    assert watched.ring.keys == ()


def test_an_admins_key_is_kept_as_one_and_old_files_still_load(tmp_path: Path) -> None:
    """A file without such keys is as older builds write and read it: the field is not in it."""
    path = tmp_path / "keys.json"
    plain, shown = make("plain", Limits(), AT)
    change(path, lambda ring: ring.add(plain))
    assert "admin" not in path.read_text()
    ring = read(path)
    assert ring is not None
    assert [key.admin for key in ring.keys] == [False]
    assert ring.find(shown) == plain
    root, _ = make("root", Limits(), AT, admin=True)
    ring = change(path, lambda ring: ring.add(root))
    assert {key.name: key.admin for key in read(path).keys} == {"plain": False, "root": True}  # type: ignore[union-attr]


@pytest.mark.parametrize("shown", ["an unknown id", "a wrong secret", "the key"])
def test_how_long_a_look_takes_tells_nothing(monkeypatch: pytest.MonkeyPatch, shown: str) -> None:
    """Whatever is wrong with a key, one secret is hashed and one hash compared, in constant time, to its end."""
    key, secret = make("somebody", Limits(), "2026-01-01")
    texts = {
        "the key": secret,
        "a wrong secret": secret[:-43] + ("A" * 43),
        "an unknown id": f"sk-swarm-{'0' * 12}-{secret[-43:]}",
    }
    compared: list[tuple[int, int]] = []

    def compares(one: str, other: str) -> bool:
        compared.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr("swarm.keys.keys.hmac.compare_digest", compares)
    found = Ring([key]).find(texts[shown])
    assert (found is key) is (shown == "the key")
    assert compared == [(64, 64)]
