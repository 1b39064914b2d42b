"""API keys: made, recognised, kept in a file of their owner's alone."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from swarm.api_keys.file import ReloadingKeyFile, read_keys, update_keys
from swarm.api_keys.keys import ApiKey, KeyLimits, KeySet, make_key, parse_priority
from swarm.errors import ConfigError
from swarm.gateway.completion.service import Caller

AT = "2026-01-01T00:00:00Z"


def test_a_key_is_recognised_and_nothing_else_is() -> None:
    """By all of it; not with another's secret, another's id, or a bit less."""
    one, shown = make_key("one", KeyLimits(), AT)
    two, other = make_key("two", KeyLimits(), AT)
    ring = KeySet([one, two])
    assert ring.find(shown) == one
    assert ring.find(other) == two
    mixed = shown.rpartition("-")[0][:21] + "-" + other[22:]
    for wrong in ("", "sk-swarm-", shown[:-1], shown + "x", mixed, shown.upper(), "x" * 100_000, "sk-swarm-é"):
        assert ring.find(wrong) is None
    assert mixed[:22] == shown[:22]  # the mixture is one key's id with the other's secret


def test_a_key_has_not_the_tenant_of_requests_without_one() -> None:
    """Such tenants' batches run without looking at a key."""
    assert Caller().tenant == "http"
    with pytest.raises(ConfigError, match="the name 'http' stands for requests without a key: choose another name"):
        make_key("http", KeyLimits(), AT)


def test_the_file_does_not_tell_a_secret(tmp_path: Path) -> None:
    """Neither the file nor its directory can be read by others, and what is in it opens nothing."""
    path = tmp_path / "own" / "keys.json"
    key, shown = make_key("one", KeyLimits(60, 2, 1000, 0), AT)
    update_keys(path, lambda ring: ring.add(key))
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert shown[22:] not in path.read_text()  # behind its id
    ring = read_keys(path)
    assert ring is not None
    assert ring.keys == (key,)
    assert ring.find(key.hash) is None


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "keys.json"
    update_keys(path, lambda ring: ring.add(make_key("one", KeyLimits(), AT)[0]))
    path.chmod(mode)
    with pytest.raises(ConfigError, match=r"others may read .* chmod 600"):
        read_keys(path)


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    """Whoever writes there can put another file in its place."""
    path = tmp_path / "open" / "keys.json"
    update_keys(path, lambda ring: ring.add(make_key("one", KeyLimits(), AT)[0]))
    path.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="others may write the directory"):
        read_keys(path)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"version": 1}', '{"version": 1, "keys": [{"name": "x"}]}', "\xff"]
)
def test_what_is_no_file_of_keys_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content, encoding="latin-1")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="not a file of keys"):
        read_keys(path)


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text('{"version": 2, "keys": []}')
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="of version 2"):
        read_keys(path)


def test_no_file_is_no_keys(tmp_path: Path) -> None:
    assert read_keys(tmp_path / "keys.json") is None


def test_names_are_once_and_plain() -> None:
    ring = KeySet([make_key("one", KeyLimits(), AT)[0]])
    with pytest.raises(ConfigError, match="a key 'one' already"):
        ring.add(make_key("one", KeyLimits(), AT)[0])
    with pytest.raises(ConfigError, match="no key 'two'; there are: one"):
        ring.remove("two")
    for name in ("", "a b", "-x", "x" * 65, "x\n"):
        with pytest.raises(ConfigError, match="a key's name"):
            make_key(name, KeyLimits(), AT)


def test_limits_must_make_sense() -> None:
    for limits in (
        KeyLimits(rate_per_min=-1),
        KeyLimits(concurrency=-1),
        KeyLimits(tokens_per_day=-1),
        KeyLimits(max_priority=101),
    ):
        with pytest.raises(ConfigError):
            make_key("one", limits, AT)
    assert parse_priority("low") < parse_priority("normal") < parse_priority("high")
    assert parse_priority("-7") == -7
    with pytest.raises(ConfigError, match="royal"):
        parse_priority("royal")


def test_changes_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    """Each reads what the one before wrote."""
    path = tmp_path / "keys.json"
    keys = [make_key(f"k{number}", KeyLimits(), AT)[0] for number in range(12)]
    threads = [threading.Thread(target=update_keys, args=(path, lambda ring, key=key: ring.add(key))) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ring = read_keys(path)
    assert ring is not None
    assert {key.name for key in ring.keys} == {key.name for key in keys}
    assert not list(tmp_path.glob(".keys.json.*"))


def _one(path: Path, name: str) -> ApiKey:
    return update_keys(path, lambda ring: ring.add(make_key(name, KeyLimits(), AT)[0])).keys[-1]


def test_whoever_watches_sees_changes_and_survives_accidents(tmp_path: Path) -> None:
    """A file that becomes unreadable, wrong or disappears leaves the keys as they were: the door never opens."""
    path = tmp_path / "keys.json"
    watched = ReloadingKeyFile(path)
    assert watched.keys is None
    assert watched.refresh() is None
    one = _one(path, "one")
    assert watched.refresh() == ""
    assert watched.refresh() is None
    assert watched.keys.keys == (one,)

    path.chmod(0o644)
    assert "others may read" in (watched.refresh() or "")
    assert watched.refresh() is None  # said once
    path.chmod(0o600)
    assert watched.refresh() == ""
    path.write_text("{")
    assert "not a file of keys" in (watched.refresh() or "")
    os.unlink(path)
    assert "is gone" in (watched.refresh() or "")
    assert watched.keys.keys == (one,)

    two = _one(path, "two")
    assert watched.refresh() == ""
    assert watched.keys.keys == (two,)
    update_keys(path, lambda ring: ring.remove("two"))
    assert watched.refresh() == ""
    assert watched.keys is not None  # nobody is let in, rather than everybody
    assert watched.keys.keys == ()


def test_an_admins_key_is_kept_as_one_and_old_files_still_load(tmp_path: Path) -> None:
    """A file without such keys is as older builds write and read it: the field is not in it."""
    path = tmp_path / "keys.json"
    plain, shown = make_key("plain", KeyLimits(), AT)
    update_keys(path, lambda ring: ring.add(plain))
    assert "admin" not in path.read_text()
    ring = read_keys(path)
    assert ring is not None
    assert [key.admin for key in ring.keys] == [False]
    assert ring.find(shown) == plain
    root, _ = make_key("root", KeyLimits(), AT, admin=True)
    ring = update_keys(path, lambda ring: ring.add(root))
    assert {key.name: key.admin for key in read_keys(path).keys} == {"plain": False, "root": True}  # type: ignore[union-attr]


@pytest.mark.parametrize("shown", ["an unknown id", "a wrong secret", "the key"])
def test_how_long_a_look_takes_tells_nothing(monkeypatch: pytest.MonkeyPatch, shown: str) -> None:
    """Whatever is wrong with a key, one secret is hashed and one hash compared, in constant time, to its end."""
    key, secret = make_key("somebody", KeyLimits(), "2026-01-01")
    texts = {
        "the key": secret,
        "a wrong secret": secret[:-43] + ("A" * 43),
        "an unknown id": f"sk-swarm-{'0' * 12}-{secret[-43:]}",
    }
    compared: list[tuple[int, int]] = []

    def compares(one: str, other: str) -> bool:
        compared.append((len(one), len(other)))
        return one == other

    monkeypatch.setattr("swarm.api_keys.keys.hmac.compare_digest", compares)
    found = KeySet([key]).find(texts[shown])
    assert (found is key) is (shown == "the key")
    assert compared == [(64, 64)]
