"""What callers write is checked before anything leaves the machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash

import swarm
from swarm.client.request import RequestSpec, batch_specs, check_attach_args, check_options, check_prompt
from swarm.client.text.assets import cache_directory, read_cached, write_cached
from swarm.errors import InvalidRequest
from swarm.params import MAX_GRAMMAR, Grammar, SamplingParams
from swarm.wire.messages import Asset


def test_keywords_override_params() -> None:
    """What neither names keeps its default."""
    wish = check_options(SamplingParams(max_tokens=5, top_k=3), {"max_tokens": 7, "stop": "x", "timeout": 2})
    assert (wish.params.max_tokens, wish.params.top_k, wish.params.stop, wish.timeout_s) == (7, 3, ("x",), 2.0)
    assert check_options(None, {}).params == SamplingParams()


def test_what_is_visible_is_never_sent() -> None:
    """It only changes the text that this client makes of the tokens."""
    wish = check_options(None, {"visible": [7, 9], "seed": 1, "request_id": "r"})
    assert wish.visible == (7, 9)
    assert wish.to_submit((1,)) == check_options(None, {"seed": 1, "request_id": "r"}).to_submit((1,))
    assert RequestSpec.from_submit(wish.to_submit((1,)), None, (5,)).visible == (5,)  # who attaches says it anew
    assert check_attach_args("r", 0, None, [5]) == (5,)
    with pytest.raises(InvalidRequest, match="visible"):
        check_attach_args("r", 0, None, "x")  # type: ignore[arg-type]


def test_params_made_by_hand_are_checked_too() -> None:
    """Their constructor takes anything."""
    with pytest.raises(InvalidRequest, match="top_k: expected `int`, got `str`"):
        check_options(SamplingParams(top_k="3"), {})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"min_tokens": 200}, "min_tokens"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"n": 0}, "n"),
        ({"timeout": -1}, "timeout"),
        ({"timeout": float("inf")}, "timeout"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"priority": 101}, "priority"),
        ({"priority": "urgent"}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"speculation": "always"}, "speculation"),
        ({"speculation": True}, "speculation"),
        ({"tenant": "x" * 129}, "tenant"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"hops": "yes"}, "hops"),
        ({"visible": [1, "x"]}, "visible[1]"),
        ({"maxtokens": 3}, "maxtokens"),
        ({"grammar": {"kind": "json"}}, "grammar.kind"),
        ({"grammar": "{}"}, "grammar"),
        ({"grammar": Grammar("ebnf", "x" * (MAX_GRAMMAR + 1))}, "grammar"),
        ({"grammar": Grammar("json_object"), "ignore_eos": True}, "ignore_eos"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], code: str) -> None:
    """The error's code and text name the option."""
    with pytest.raises(InvalidRequest) as raised:
        check_options(None, options)
    assert raised.value.code == code
    assert code in str(raised.value)


def test_classes_have_names() -> None:
    """Higher goes first; numbers between them are classes too."""
    high, normal, low = (check_options(None, {"priority": name}).priority for name in ("high", "normal", "low"))
    assert high > normal == check_options(None, {}).priority > low
    assert check_options(None, {"priority": -7, "tenant": "ada"}).to_submit((1,)).priority == -7
    assert check_options(None, {"tenant": "ada"}).to_submit((1,)).tenant == "ada"


def test_the_mode_of_speculation_is_passed_on() -> None:
    """Without one it is the broker's."""
    assert check_options(None, {}).to_submit((1,)).speculation is None
    assert check_options(None, {"speculation": "off"}).to_submit((1,)).speculation == "off"


def test_seeds_and_ids_are_drawn_unless_given() -> None:
    """Two requests without them differ; with them, they are the same request."""
    free = check_options(None, {})
    assert free.to_submit((1,)).seed != free.to_submit((1,)).seed
    assert free.to_submit((1,)).request_id != free.to_submit((1,)).request_id
    bound = check_options(None, {"seed": 3, "request_id": "a"})
    assert bound.to_submit((1,)) == bound.to_submit((1,))


def test_prompts() -> None:
    """Text stays text; ids of any integer type become a tuple; anything else is refused."""
    assert check_prompt("x") == "x"
    assert check_prompt(np.array([1, 2])) == (1, 2)  # type: ignore[arg-type]
    for wrong in ("", [], [1.5], [None], b"x", [-1], [2**31], 5):
        with pytest.raises(InvalidRequest):
            check_prompt(wrong)  # type: ignore[arg-type]


def asset(content: bytes, digest: str | None = None) -> Asset:
    return Asset("tokenizer.json", len(content), digest or xxhash.xxh3_128_hexdigest(content))


def test_assets_are_kept_by_their_digests(tmp_path: Path) -> None:
    """What was changed on disk is not read; what can't be kept harms nothing; a digest is not a path."""
    good = asset(b"content")
    assert read_cached(good, tmp_path) is None
    assert write_cached(good, b"content", tmp_path / "deep" / "er")
    assert read_cached(good, tmp_path / "deep" / "er") == b"content"
    (tmp_path / good.digest).write_bytes(b"changed")
    assert read_cached(good, tmp_path) is None
    (tmp_path / "file").write_bytes(b"")
    assert not write_cached(good, b"content", tmp_path / "file")
    assert not write_cached(asset(b"content", "../escape"), b"content", tmp_path)
    assert read_cached(asset(b"changed", f"../{tmp_path.name}/{good.digest}"), tmp_path) is None


def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SWARM_CACHE first, then XDG_CACHE_HOME, then ~/.cache."""
    monkeypatch.delenv("SWARM_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "swarm" / "assets"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "swarm" / "assets"
    monkeypatch.setenv("SWARM_CACHE", str(tmp_path / "own"))
    assert cache_directory() == tmp_path / "own" / "assets"


@pytest.mark.slow
def test_importing_the_client_is_light() -> None:
    """No torch, no transformers; and ``import swarm`` alone imports next to nothing."""
    script = (
        "import sys, swarm; assert 'zmq' not in sys.modules; swarm.Client; swarm.AsyncClient; "
        "print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_everything_exported_is_there() -> None:
    """Each name of ``__all__`` can be had; others can't."""
    for name in swarm.__all__:
        assert getattr(swarm, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = swarm.nothing


def test_each_prompt_of_a_batch_may_have_its_own_params() -> None:
    """Keywords override all of them; without params, and with one set, all prompts have the same."""
    own = [SamplingParams(max_tokens=n, temperature=0.5) for n in (1, 2, 3)]
    wishes = [wish for wish in batch_specs(own, {"temperature": 0.7}, 3) if isinstance(wish, RequestSpec)]
    assert [(wish.params.max_tokens, wish.params.temperature) for wish in wishes] == [(1, 0.7), (2, 0.7), (3, 0.7)]
    assert batch_specs(own[1], {}, 2) == [check_options(own[1], {})] * 2
    assert batch_specs(None, {"max_tokens": 4}, 1) == [check_options(None, {"max_tokens": 4})]
    assert batch_specs([], {}, 0) == []


def test_a_mistake_in_the_params_of_a_batch_is_told() -> None:
    """Too few or too many, what is no params at all, and what is wrong for all: at once. What is wrong in one set is
    that prompt's own mistake."""
    with pytest.raises(
        InvalidRequest, match="2 sets of params for 3 prompts: give one for each prompt, or one for all"
    ):
        batch_specs([SamplingParams()] * 2, {}, 3)
    with pytest.raises(InvalidRequest, match="params must be SamplingParams, or a sequence of them"):
        batch_specs({"max_tokens": 3}, {}, 1)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="unknown option"):
        batch_specs([SamplingParams()], {"maxtokens": 3}, 1)
    good, bad, no_params = batch_specs([SamplingParams(), SamplingParams(max_tokens=0), {"max_tokens": 3}], {}, 3)  # type: ignore[list-item]
    assert isinstance(good, RequestSpec)
    assert isinstance(bad, InvalidRequest)
    assert bad.code == "max_tokens"
    assert isinstance(no_params, InvalidRequest)
