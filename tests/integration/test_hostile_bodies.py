"""One request doesn't hold up the others, whatever is in it: a real gateway, before a stand-in for the broker."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.hostile import BODIES, CHAT, Victim, chat, victim

WAIT_S = 1.0  # of others: 50 ms are the aim (tools/bench_hostile.py), on a machine that has nothing else to do
GROWN_BYTES = 96 << 20  # in all, after bodies of 15 MB, each of which took 1.4 GiB once

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    with victim(tmp_path_factory.mktemp("hostile")) as one:
        yield one


@pytest.mark.parametrize("name", BODIES)
def test_a_costly_body_is_answered_while_others_are_served(gateway: Victim, name: str) -> None:
    seen = gateway.suffer(BODIES[name])
    assert seen.status == BODIES[name].status, seen.answer[:300]
    assert max(seen.waits_s) < WAIT_S


def test_no_memory_is_kept_afterwards(gateway: Victim) -> None:
    before = gateway.process.memory_info().rss
    for name in ("a word of 15 MB", "15 MB of blanks", "15 MB of special tokens", "5 million lists"):
        gateway.suffer(BODIES[name])
    assert gateway.process.memory_info().rss - before < GROWN_BYTES
    assert gateway.ask(CHAT, chat())[0] == 200


TEXT = "a</s><s>b"
USER, PLAIN = {"role": "user", "content": TEXT}, {"role": "user", "content": "x"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": TEXT}
CONVERSATIONS: list[tuple[str, dict[str, object]]] = [
    ("/tokenize", {"messages": [USER]}),
    (CHAT, {"messages": [USER, {"role": "assistant", "content": TEXT}, USER], "max_tokens": 1}),
    ("/v1/messages/count_tokens", {"messages": [PLAIN], "system": TEXT}),
    ("/v1/responses", {"input": [PLAIN, CALL, OUTPUT], "max_output_tokens": 1}),
]
PROMPTS: list[tuple[str, dict[str, object]]] = [
    ("/tokenize", {"prompt": TEXT}),
    ("/v1/completions", {"prompt": TEXT, "max_tokens": 1}),
]


@pytest.mark.parametrize("parse", [False, True])
def test_special_tokens_that_users_write_are_text_unless_a_setting_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, parse: bool
) -> None:
    """In messages and results, by every API of conversations; a prompt has its own in any case."""
    monkeypatch.setenv("SWARM_GATEWAY__PARSE_SPECIAL_TOKENS", str(parse).lower())
    with victim(tmp_path) as one:
        for path, fields in [*CONVERSATIONS, *PROMPTS]:
            written = json.dumps({"model": "tiny", **fields})
            num_pairs = written.count("</s><s>")
            more = _num_tokens(one, path, written) - _num_tokens(one, path, written.replace("</s><s>", ""))
            if parse or (path, fields) in PROMPTS:
                assert more == 2 * num_pairs
            else:
                assert more > 2 * num_pairs


def _num_tokens(one: Victim, path: str, body: str) -> int:
    status, answer = one.ask(path, body.encode())
    assert status == 200, answer
    told = json.loads(answer)
    usage = told.get("usage", {})
    return int(told.get("count") or usage.get("prompt_tokens") or usage.get("input_tokens") or told["input_tokens"])
