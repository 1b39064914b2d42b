"""Grammars are compiled before a request is made."""

from __future__ import annotations

import pytest

from swarm.client.text import grammar as module
from swarm.client.text.grammar import GrammarChecker
from swarm.errors import InvalidRequest
from swarm.params import Grammar, SamplingParams
from tests.integration.fake_broker import EOS, tiny_tokenizer


def asked(kind: str, text: str, **params: object) -> SamplingParams:
    return SamplingParams(grammar=Grammar(kind, text), **params)  # type: ignore[arg-type]


def refused(checker: GrammarChecker, params: SamplingParams) -> str:
    with pytest.raises(InvalidRequest) as caught:
        checker.check(params)
    assert caught.value.code == "grammar"
    return str(caught.value)


def test_what_can_be_followed_passes_and_what_cannot_is_named() -> None:
    """As often as it is asked."""
    checker = GrammarChecker(tiny_tokenizer(), (EOS,))
    checker.check(SamplingParams())
    for _ in range(2):
        checker.check(asked("regex", "[a-z]+"))
        assert "unclosed group" in refused(checker, asked("regex", "("))


def test_a_model_must_be_able_to_read_and_to_end() -> None:
    """Without a tokenizer nobody knows what tokens say; without an end a whole answer can't stop."""
    assert "no tokenizer" in refused(GrammarChecker(None, (EOS,)), asked("json_object", ""))
    endless = GrammarChecker(tiny_tokenizer(), ())
    assert "no token that ends an answer" in refused(endless, asked("json_object", ""))
    endless.check(asked("json_object", "", stop_token_ids=(EOS,)))


def test_a_grammar_is_compiled_once_while_it_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of a thousand prompts costs one; and what is remembered is bounded."""
    made = []
    monkeypatch.setattr(module, "compile_grammar", lambda grammar, _: made.append(grammar))
    monkeypatch.setattr(module, "MAX_GRAMMARS", 3)
    checker = GrammarChecker(tiny_tokenizer(), (EOS,))
    for _ in range(1000):
        checker.check(asked("regex", "a"))
    assert len(made) == 1
    for text in "bcd":
        checker.check(asked("regex", text))
    checker.check(asked("regex", "d"))
    assert len(made) == 4
    checker.check(asked("regex", "a"))
    assert len(made) == 5
