"""Who of the other servers takes a request, and what is known of them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from swarm.config import UpstreamSettings
from swarm.errors import ConfigError
from swarm.gateway.upstream.pool import AVOID_S, UpstreamPool, UpstreamServer, is_failure
from swarm.gateway.upstream.proxy import end_of_last_event, make_server


def server(name: str, when: Literal["never", "busy", "down"] = "never", **models: str) -> UpstreamServer:
    return UpstreamServer(name, f"http://{name}/v1", "", models, "", when)


def names(board: UpstreamPool, trouble: Literal["busy", "down"], now: float = 100.0) -> list[str]:
    return [target.server.name for target in board.overflow_targets("village", trouble, now)]


def test_each_is_asked_when_it_says() -> None:
    board = UpstreamPool([server("a"), server("b", "down"), server("c", "busy")])
    assert names(board, "busy") == ["c"]
    assert names(board, "down") == ["b", "c"]
    assert board.targets_for("village", 100.0) == []


def test_a_model_goes_to_those_that_have_it_by_their_name_for_it() -> None:
    board = UpstreamPool([server("a", gpt="x"), server("b", other="y"), server("c", gpt="z")])
    assert [(target.server.name, target.model) for target in board.targets_for("gpt", 100.0)] == [
        ("a", "x"),
        ("c", "z"),
    ]


def test_without_a_name_for_our_model_only_those_are_asked_that_have_their_own() -> None:
    own = UpstreamServer("b", "http://b/v1", "", {}, "some-8b", "busy")
    board = UpstreamPool([server("a", "busy"), own])
    assert [(target.server.name, target.model) for target in board.overflow_targets("", "busy", 1.0)] == [
        ("b", "some-8b")
    ]
    assert [target.model for target in board.overflow_targets("village", "busy", 1.0)] == ["village", "some-8b"]


def test_who_has_just_failed_comes_last_for_a_while() -> None:
    one, two = server("a", "busy"), server("b", "busy")
    board = UpstreamPool([one, two])
    board.record_failed(one, 100.0)
    assert names(board, "busy", 100.0 + AVOID_S / 2) == ["b", "a"]
    assert names(board, "busy", 100.0 + AVOID_S) == ["a", "b"]
    board.record_failed(one, 200.0)
    board.record_answered(one)
    assert names(board, "busy", 200.0) == ["a", "b"]
    assert board.counts == {("a", "failed"): 2, ("a", "answered"): 1}


def test_whoever_is_left_did_nothing_wrong() -> None:
    """Nor anything right: it was not heard out."""
    one, two = server("a", "busy"), server("b", "busy")
    board = UpstreamPool([one, two])
    board.record_client_left(one)
    assert names(board, "busy", 101.0) == ["a", "b"]
    board.record_failed(one, 102.0)
    board.record_client_left(one)
    assert names(board, "busy", 103.0) == ["b", "a"]
    assert board.counts == {("a", "left"): 2, ("a", "failed"): 1}


def test_who_breaks_off_is_avoided_too() -> None:
    one, two = server("a", "busy"), server("b", "busy")
    board = UpstreamPool([one, two])
    board.record_broke_off(one, 100.0)
    assert names(board, "busy", 101.0) == ["b", "a"]
    assert board.counts == {("a", "broke_off"): 1}


def test_what_is_a_servers_failure_and_what_the_clients() -> None:
    assert all(is_failure(status) for status in (401, 403, 404, 408, 429, 500, 502, 503))
    assert not any(is_failure(status) for status in (200, 400, 413, 422))


def test_streams_are_cut_between_events() -> None:
    assert end_of_last_event(b"data: 1\n\ndata: 2") == 9
    assert end_of_last_event(b"data: 1\r\n\r\n") == 11
    assert end_of_last_event(b"data: 1\n") == 0


def test_keys_come_from_where_the_settings_say(tmp_path: Path) -> None:
    """The environment, a file, or a credential of the service manager; what is missing is named."""
    file = tmp_path / "key"
    file.write_text("k2\n")
    file.chmod(0o600)
    settings = {
        "url": "http://x/v1",
    }
    assert make_server(UpstreamSettings(**settings, key_env="K"), {"K": "k1"}.get).key == "k1"
    assert make_server(UpstreamSettings(**settings, key_file=file), {}.get).key == "k2"
    credential = UpstreamSettings(**settings, key_file=Path("key"))
    assert make_server(credential, {"CREDENTIALS_DIRECTORY": str(tmp_path)}.get).key == "k2"
    with pytest.raises(ConfigError, match="variable K with the key of http://x/v1 is not set"):
        make_server(UpstreamSettings(**settings, key_env="K"), {}.get)
    file.chmod(0o604)
    with pytest.raises(ConfigError, match="everyone may read"):
        make_server(UpstreamSettings(**settings, key_file=file), {}.get)
    file.chmod(0o600)
    file.write_text("a\nb\n")
    with pytest.raises(ConfigError, match="holds no key"):
        make_server(UpstreamSettings(**settings, key_file=file), {}.get)
