"""How long a text may be before it is tokenized, and that bounds hold for every text."""

from __future__ import annotations

import json
import random
import unicodedata
from typing import Any

import pytest
from tokenizers import Tokenizer

from swarm.client.text.spelling import Spelling
from swarm.client.text.vocabulary import (
    CHARS_PER_TOKEN,
    MAX_CHARS,
    PIECE_CHARS,
    Vocabulary,
    load_tokenizer,
    longest_token_bytes,
)
from swarm.demo import model_path
from swarm.errors import InvalidRequest, PromptTooLong
from tests.integration.fake_broker import tiny_tokenizer

VILLAGE = (model_path() / "tokenizer.json").read_bytes()


def village(**changes: Any) -> Tokenizer:
    described = json.loads(VILLAGE)
    model = changes.pop("model", {})
    return load_tokenizer(json.dumps({**described, **changes, "model": {**described["model"], **model}}).encode(), "x")


def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return Vocabulary(tokenizer, Spelling(()))


def texts() -> list[str]:
    source = random.Random(7)
    alphabets = ("ab ", " ", "\n", "the cat ", "\u212a\U0001d400e\u0301 ", "🙂é", "<|user|>a")
    return ["".join(source.choices(alphabet, k=source.randint(1, 300))) for alphabet in alphabets for _ in range(40)]


@pytest.mark.parametrize("form", [None, "NFC", "NFD", "NFKC", "NFKD", "Lowercase"])
def test_no_token_stands_for_more_bytes_than_was_proven(form: str | None) -> None:
    tokenizer = village(normalizer=None if form is None else {"type": form})
    most = longest_token_bytes(tokenizer)
    assert most is not None
    for text in texts():
        assert len(tokenizer.encode(text, add_special_tokens=False).ids) * most >= len(text.encode())


@pytest.mark.parametrize(("form", "factor"), [("NFC", 3), ("NFD", 3), ("NFKC", 4), ("NFKD", 4)])
def test_normal_forms_shrink_no_character_by_more(form: Any, factor: int) -> None:
    """Alone; with others, what they are composed of is longer still."""
    for code in range(0x110000):
        if not 0xD800 <= code < 0xE000:
            shrunk = len(unicodedata.normalize(form, chr(code)).encode())
            assert shrunk * factor >= len(chr(code).encode())


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "StripAccents"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "StripAccents"}]}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"model": {"vocab": {"a": 0, "b": 1}, "merges": []}},
    ],
)
def test_where_text_can_vanish_nothing_is_proven(changes: dict[str, Any]) -> None:
    assert longest_token_bytes(village(**changes)) is None


def test_white_space_that_belongs_to_a_token_proves_nothing() -> None:
    described = json.loads(VILLAGE)
    described["added_tokens"][1]["rstrip"] = True
    assert longest_token_bytes(load_tokenizer(json.dumps(described).encode(), "x")) is None


def test_what_cannot_fit_is_refused_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    one = vocabulary(village())
    assert one.token_bytes == 13
    monkeypatch.setattr("swarm.client.text.vocabulary._encode", None)
    with pytest.raises(PromptTooLong, match="at least 78 tokens; at most 77 fit") as told:
        one.encode("x" * (77 * 13 + 1), most=77)
    assert (told.value.code, told.value.least_tokens) == ("context", 78)


def test_without_a_proof_the_tokens_of_pieces_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no more of them than it takes."""
    one = vocabulary(village(normalizer={"type": "StripAccents"}))
    assert one.token_bytes is None
    seen: list[int] = []
    monkeypatch.setattr("swarm.client.text.vocabulary._encode", lambda _, text: seen.append(len(text)) or [1] * 1000)
    with pytest.raises(PromptTooLong, match="more than 3000 tokens") as told:
        one.encode("x" * (20 * PIECE_CHARS), most=3000)
    assert told.value.least_tokens == 3001
    assert seen == [PIECE_CHARS] * 4


def test_what_takes_too_much_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one = vocabulary(village(normalizer={"type": "StripAccents"}))
    monkeypatch.setattr("swarm.client.text.vocabulary._encode", lambda *_, **__: [1])
    assert one.encode("x" * MAX_CHARS, most=100) == (1,)
    with pytest.raises(InvalidRequest, match=f"at most {MAX_CHARS} are read"):
        one.encode("x" * (MAX_CHARS + 2 * PIECE_CHARS), most=100)
    assert one.encode("x" * (MAX_CHARS + 2 * PIECE_CHARS), most=MAX_CHARS // CHARS_PER_TOKEN * 2) == (1,)


@pytest.mark.parametrize("tokenizer", [village(), tiny_tokenizer()])
def test_the_quick_way_gives_the_same_tokens(tokenizer: Tokenizer) -> None:
    one = vocabulary(tokenizer)
    for text in texts():
        for special in (True, False):
            assert (
                list(one.encode(text, add_special_tokens=special))
                == tokenizer.encode(text, add_special_tokens=special).ids
            )


def test_half_a_character_is_refused_however_long_the_text_is() -> None:
    for text in ("a\ud800", "é" * 200_000 + "\ud800"):
        with pytest.raises(InvalidRequest, match="not valid Unicode"):
            vocabulary(village()).encode(text)
