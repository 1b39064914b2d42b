"""What others say on the network is taken as what it is: anything."""

from __future__ import annotations

import errno
import importlib.util
from collections.abc import Sequence

import pytest

from swarm.auth import discovery
from swarm.auth.discovery import SERVICE, Announcement, parse_announcement
from swarm.errors import ConfigError

zeroconf = pytest.importorskip("zeroconf", reason="no zeroconf (swarm-llm[discover])")
KEY = "ab" * 32


def said(
    name: str = "office-abababab",
    port: int = 5700,
    key: bytes | None = KEY.encode(),
    addresses: Sequence[str] = ("192.0.2.1", "2001:db8::1"),
) -> Announcement | None:
    properties = {} if key is None else {b"key": key}
    return parse_announcement(
        zeroconf.ServiceInfo(
            SERVICE, f"{name}.{SERVICE}", port=port, properties=properties, parsed_addresses=list(addresses)
        )
    )


def test_what_is_said_of_a_broker() -> None:
    assert said() == Announcement("office-abababab", KEY, ("tcp://192.0.2.1:5700", "tcp://[2001:db8::1]:5700"))


@pytest.mark.parametrize("key", [None, b"", b"ab", KEY.upper().encode(), KEY.encode() + b"0", b"\xff" * 64])
def test_who_has_no_key_is_none_of_ours(key: bytes | None) -> None:
    assert said(key=key) is None


def test_who_is_nowhere_is_none_of_ours() -> None:
    assert said(addresses=[]) is None
    assert said(port=0) is None


def test_a_name_writes_nothing_on_a_terminal() -> None:
    """Whatever bytes it has, and however many addresses."""
    found = said("\u202e evil; name", addresses=[f"192.0.2.{i}" for i in range(40)])
    assert found is not None
    assert found.name == "-evil-name"
    assert len(found.addresses) == 8


class Network:
    """One on which nobody can be told anything."""

    def __init__(self, error: Exception, fails_at: str) -> None:
        self.error, self.fails_at, self.said = error, fails_at, list[str]()

    def __call__(self, **_: object) -> Network:
        return self._do("open") or self

    def _do(self, what: str) -> None:
        self.said.append(what)
        if what == self.fails_at:
            raise self.error

    async def async_register_service(self, *_: object, **__: object) -> None:
        self._do("register")

    async def async_close(self) -> None:
        self._do("close")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (zeroconf.NonUniqueNameException(), "NonUniqueNameException"),
        (zeroconf.EventLoopBlocked("it stands still"), "it stands still"),
        (zeroconf.NotRunningException(), "NotRunningException"),
        (OSError(errno.ENODEV, "No such device"), "No such device"),
        (PermissionError(errno.EPERM, "Operation not permitted"), "not permitted"),
        (TimeoutError(), "TimeoutError"),
    ],
)
@pytest.mark.parametrize("at", ["open", "register"])
async def test_who_cant_tell_the_network_says_so_in_a_line(
    error: Exception, words: str, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the package or the system raises; what was opened is closed."""
    network = Network(error, at)
    monkeypatch.setattr("zeroconf.asyncio.AsyncZeroconf", network)
    with pytest.raises(ConfigError, match=words):
        await discovery.announce("office", ["192.0.2.1"], 5700, KEY)
    assert network.said == (["open"] if at == "open" else ["open", "register", "close"])


async def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"swarm-llm\[discover\]"):
        await discovery.discover(0.1)
