"""Which tokens a grammar allows next: what brute force says, whatever is cached, and ends where it is satisfied."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

import swarm.demo
from swarm import grammar as grammar_module
from swarm.params import Grammar, SamplingParams
from swarm.stage.engine import grammars as module
from swarm.stage.engine.grammars import GrammarMasks
from swarm.stage.executor import SampleJob
from swarm.wire.messages import MAX_PROPOSED

FOLDER = Path(swarm.demo.__file__).parent / "village"
EOS, USER = 1, 2
WORDS = LLTokenizer((FOLDER / "tokenizer.json").read_text(), eos_token=[EOS])
SIZE = WORDS.vocab_size
PROMPT = [5, 6, 7]
CHOICES = ["yes", "yesterday", "no", "not at all", "maybe — who knows?"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "friends": {"type": "array", "items": {"enum": ["Clara", "frog"]}, "maxItems": 3},
    },
    "required": ["name", "age", "friends"],
    "additionalProperties": False,
}
GRAMMARS = (
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("json_object"),
    Grammar("regex", r"[A-Z][a-z]{2,9}( [a-z]{1,9}){0,5}\."),
    Grammar("choice", json.dumps(CHOICES)),
    Grammar("ebnf", 'start: sum\nsum: item ("+" item)*\nitem: /[0-9]{1,3}/ | "(" sum ")"\n'),
    Grammar("ebnf", 'root ::= item ("," item){0,8}\nitem ::= [a-f]+ | "<" item ">"\n'),
)


@pytest.fixture
def grammars() -> GrammarMasks:
    return GrammarMasks(FOLDER, (EOS,))


def job(grammar: Grammar, answer: list[int], **params: object) -> SampleJob:
    asked = SamplingParams(grammar=grammar, **params)  # type: ignore[arg-type]
    return SampleJob(0, asked, 3, [*PROMPT, *answer], len(PROMPT))


def ids_of(mask: object) -> list[int]:
    assert isinstance(mask, np.ndarray), mask
    return [int(each) for each in np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))]


def answered(grammars: GrammarMasks, asked: SampleJob, sequence: int = 1, words: int = SIZE) -> object:
    """Ask in one step after the other, until the grammar is compiled."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        grammars.begin_step()
        found = grammars.mask(sequence, asked, words)
        if found is not None:
            return found
        grammars.wait_for_compilation()
    raise AssertionError("it is not compiled after 30 s")


def allowed(
    grammars: GrammarMasks, grammar: Grammar, answer: list[int], sequence: int = 1, **params: object
) -> list[int]:
    return ids_of(answered(grammars, job(grammar, answer, **params), sequence))


def a_walk(grammar: Grammar, seed: int, most: int = 60) -> list[int]:
    """Tokens of an answer, drawn from what is allowed, without its end."""
    chance, grammars, answer = np.random.default_rng(seed), GrammarMasks(FOLDER, (EOS,)), list[int]()
    while len(answer) < most:
        goes_on = [token for token in allowed(grammars, grammar, answer) if token != EOS]
        if not goes_on:
            break
        answer.append(int(chance.choice(goes_on)))
    return answer


# --- brute force ------------------------------------------------------------------------------------------------------


def begins_a_choice(text: bytes) -> bool:
    return any(choice.encode().startswith(text) for choice in CHOICES)


def begins_a_word(text: bytes) -> bool:
    """Whether this is how something of ``[a-d]{2,5}(-[0-9]{1,3})?`` begins."""
    return re.fullmatch(rb"[a-d]{0,5}|[a-d]{2,5}-[0-9]{0,3}", text) is not None


@pytest.mark.parametrize(
    ("grammar", "begins", "whole"),
    [
        (
            Grammar("choice", json.dumps(CHOICES)),
            begins_a_choice,
            lambda text: text in [choice.encode() for choice in CHOICES],
        ),
        (
            Grammar("regex", "[a-d]{2,5}(-[0-9]{1,3})?"),
            begins_a_word,
            lambda text: re.fullmatch(rb"[a-d]{2,5}(-[0-9]{1,3})?", text) is not None,
        ),
    ],
    ids=["choice", "regex"],
)
@pytest.mark.parametrize("seed", range(12))
def test_the_mask_is_what_brute_force_finds(
    grammars: GrammarMasks, grammar: Grammar, begins: Callable[[bytes], bool], whole: Callable[[bytes], bool], seed: int
) -> None:
    """Every token of the vocabulary tried after every beginning: those are allowed with which some answer begins, and
    the end where the answer is whole. Where the text is certain, its usual token alone may stand for all."""
    chance, answer = np.random.default_rng(seed), list[int]()
    for _ in range(40):
        text = WORDS.decode_bytes(answer)
        fit = [t for t in range(SIZE) if not WORDS.is_special_token(t) and begins(text + WORDS.decode_bytes([t]))]
        found = allowed(grammars, grammar, answer)
        assert (EOS in found) == whole(text), text
        rest = [token for token in found if token != EOS]
        assert rest == fit or (len(rest) == 1 and rest[0] in fit), text
        if not rest:
            return
        answer.append(int(chance.choice(fit)))
    raise AssertionError("every such answer is short")


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_drawn_from_a_schema_conforms(grammars: GrammarMasks, seed: int) -> None:
    """At random to the end."""
    chance, answer = np.random.default_rng(seed), list[int]()
    while (token := int(chance.choice(allowed(grammars, GRAMMARS[0], answer)))) != EOS:
        answer.append(token)
    found = json.loads(WORDS.decode_bytes(answer))
    assert list(found) == ["name", "age", "friends"]
    assert isinstance(found["name"], str)
    assert len(found["name"]) <= 12
    assert 0 <= found["age"] <= 130
    assert len(found["friends"]) <= 3
    assert {"Clara", "frog"} >= set(found["friends"])


# --- a function of the tokens -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: f"{grammar.kind} {len(grammar.text)}")
def test_the_mask_depends_on_nothing_but_the_tokens(grammar: Grammar) -> None:
    """Read token by token; read at once after any cut; after the reader was dropped, or has read another answer, or
    more than this one; by another process, whose caches are empty: the same bits."""
    answer, other = a_walk(grammar, 1), a_walk(grammar, 2)
    steady = GrammarMasks(FOLDER, (EOS,))
    expected = [allowed(steady, grammar, answer[:cut]) for cut in range(len(answer) + 1)]
    assert len(expected) > 1
    chance = np.random.default_rng(3)
    shaken = GrammarMasks(FOLDER, (EOS,))
    for _ in range(80):
        cut = int(chance.integers(len(answer) + 1))
        harm = chance.integers(5)
        if harm == 0:
            shaken.drop(1)
        elif harm == 1:
            shaken.clear()
        elif harm == 2:
            allowed(shaken, grammar, other[: int(chance.integers(len(other) + 1))])
        elif harm == 3:
            allowed(shaken, GRAMMARS[int(chance.integers(len(GRAMMARS)))], [])
        assert allowed(shaken, grammar, answer[:cut]) == expected[cut]
    for cut in (0, len(answer) // 2, len(answer)):
        assert allowed(GrammarMasks(FOLDER, (EOS,)), grammar, answer[:cut]) == expected[cut]


def test_caches_are_bounded_and_only_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two grammars and two readers, five sequences of as many grammars get what they get with room."""
    roomy = GrammarMasks(FOLDER, (EOS,))
    walks = [a_walk(grammar, 5, 20) for grammar in GRAMMARS]
    expected = [[allowed(roomy, g, walk[:n], n) for g, walk in zip(GRAMMARS, walks, strict=True)] for n in range(20)]
    monkeypatch.setattr(module, "MAX_GRAMMARS", 2)
    monkeypatch.setattr(module, "MAX_READERS", 2)
    tight = GrammarMasks(FOLDER, (EOS,))
    for n in range(20):
        found = [allowed(tight, g, walk[:n], s) for s, (g, walk) in enumerate(zip(GRAMMARS, walks, strict=True))]
        assert found == expected[n]
    assert tight._compiler.num_cached == len(tight._readers) == 2


def test_a_grammar_that_is_not_compiled_yet_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sequence is drawn for another time; other grammars are answered meanwhile; and once it is there, its mask is
    what it would have been at once."""
    slow, really = threading.Event(), grammar_module._compile
    late = GRAMMARS[0]

    def compile_late(grammar: Grammar, words: LLTokenizer) -> LLMatcher:
        assert grammar != late or slow.wait(30)
        return really(grammar, words)

    monkeypatch.setattr(grammar_module, "_compile", compile_late)
    grammars = GrammarMasks(FOLDER, (EOS,))
    for _ in range(3):
        grammars.begin_step()
        assert grammars.mask(1, job(late, []), SIZE) is None
        assert EOS not in allowed(grammars, GRAMMARS[2], [], 2)
    slow.set()
    found = allowed(grammars, late, [])
    monkeypatch.undo()
    assert found == allowed(GrammarMasks(FOLDER, (EOS,)), late, [])


def test_a_grammar_is_compiled_once(monkeypatch: pytest.MonkeyPatch, grammars: GrammarMasks) -> None:
    """However many sequences have it, also one that can't be compiled."""
    made, really = list[Grammar](), grammar_module._compile
    monkeypatch.setattr(
        grammar_module, "_compile", lambda grammar, words: made.append(grammar) or really(grammar, words)
    )
    for sequence in range(4):
        allowed(grammars, Grammar("json_object"), [], sequence)
        assert isinstance(answered(grammars, job(Grammar("regex", "("), []), sequence + 10), str)
    assert len(made) == 2


# --- ends -------------------------------------------------------------------------------------------------------------


def tokens(text: str) -> list[int]:
    return [int(each) for each in WORDS.tokenize_str(text)]


def test_the_end_is_all_that_is_left_after_the_last_word(grammars: GrammarMasks) -> None:
    """With each token that ends an answer: the model's, and those that the request names."""
    letter = tokens("q")[0]
    whole = tokens("no")
    grammar = Grammar("choice", '["no"]')
    assert allowed(grammars, grammar, whole) == [EOS]
    assert allowed(grammars, grammar, whole, 2, stop_token_ids=(letter, USER)) == sorted([EOS, USER, letter])


def test_a_token_of_text_that_ends_the_answer_comes_at_its_end_only(grammars: GrammarMasks) -> None:
    """In the middle it would end what is not whole."""
    (a,) = tokens("a")
    grammar = Grammar("regex", "[abc]{3,4}")
    assert a in allowed(grammars, grammar, [])
    assert a not in allowed(grammars, grammar, [], stop_token_ids=(a,))
    assert a in allowed(grammars, grammar, tokens("b") * 3, stop_token_ids=(a,))


def test_min_tokens_waits_with_the_end_as_long_as_there_is_another_way(grammars: GrammarMasks) -> None:
    """It forbids the end where the grammar goes on, and does not where that can't: nothing else may be forced."""
    short, long = Grammar("regex", "x"), Grammar("regex", "x+")
    x = tokens("x")
    assert EOS in allowed(grammars, long, x)
    assert EOS not in allowed(grammars, long, x, min_tokens=5)
    assert EOS in allowed(grammars, long, x * 5, min_tokens=5)
    assert allowed(grammars, short, x, min_tokens=5) == [EOS]


@pytest.mark.parametrize("words", [SIZE - 100, SIZE, SIZE + 1, SIZE + 37, SIZE + 640])
def test_logits_of_any_width(grammars: GrammarMasks, words: int) -> None:
    """What the tokenizer doesn't know is forbidden, what the model doesn't have isn't there."""
    grammar = Grammar("regex", "(?s).{1,50}")
    found = ids_of(answered(grammars, job(grammar, []), words=words))
    assert max(found) < min(words, SIZE)
    assert [t for t in allowed(GrammarMasks(FOLDER, (EOS,)), grammar, []) if t < words] == found


def test_an_end_that_the_tokenizer_does_not_know(grammars: GrammarMasks) -> None:
    """Some models end with an id beyond their tokenizer's."""
    beyond = SIZE + 3
    found = answered(GrammarMasks(FOLDER, (beyond,)), job(Grammar("choice", '["no"]'), tokens("no")), words=SIZE + 10)
    assert ids_of(found) == [beyond]


# --- what can't go on -------------------------------------------------------------------------------------------------


def reason(grammars: GrammarMasks, grammar: Grammar, answer: list[int], **params: object) -> str:
    found = answered(grammars, job(grammar, answer, **params))
    assert isinstance(found, str), found
    return found


def test_what_cannot_be_followed_is_told_with_its_kind(grammars: GrammarMasks, tmp_path: Path) -> None:
    """One that doesn't compile, an answer that isn't of it, a model without an end or a tokenizer."""
    assert reason(grammars, Grammar("regex", "(a"), []).startswith("grammar (regex): ")
    assert "can't be followed beyond 0 tokens" in reason(grammars, Grammar("choice", '["no"]'), tokens("x"))
    endless = GrammarMasks(FOLDER, ())
    assert "no token that ends an answer" in reason(endless, Grammar("choice", '["no"]'), tokens("no"))
    assert ids_of(answered(endless, job(Grammar("choice", '["no"]'), tokens("no"), stop_token_ids=(USER,))))
    assert "tokenizer.json" in reason(GrammarMasks(tmp_path, (EOS,)), Grammar("json_object"), [])


def test_a_grammar_that_grows_without_bound_is_cut_off(grammars: GrammarMasks) -> None:
    """With a reason, after a few tokens; others are served as before."""
    grammar, answer = Grammar("ebnf", 'start: a\na: "x"+ | a{0,50} "y"? a{0,50}\n'), list[int]()
    while len(answer) < 300 and not isinstance(found := answered(grammars, job(grammar, answer)), str):
        answer.append(ids_of(found)[-1])
    assert isinstance(found, str)
    assert re.match(r"grammar \(ebnf\): it can't be followed beyond \d+ tokens of the answer: .* max is ", found)
    assert allowed(grammars, Grammar("json_object"), [], 2) == allowed(GrammarMasks(FOLDER, (EOS,)), GRAMMARS[1], [])


# --- forced tokens ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: str(grammar.kind))
@pytest.mark.parametrize("seed", range(3))
def test_forced_tokens_follow_and_change_no_mask(grammar: Grammar, seed: int) -> None:
    """Each mask allows exactly the next forced token, and is the same where no forced tokens were asked for."""
    chance, answer = np.random.default_rng(seed), list[int]()
    asking, plain = GrammarMasks(FOLDER, (EOS,)), GrammarMasks(FOLDER, (EOS,))
    forced: tuple[int, ...] = ()
    while len(answer) < 50:
        found = allowed(asking, grammar, answer)
        assert found == allowed(plain, grammar, answer)
        if forced:
            assert found == [forced[0]]
        token = int(chance.choice(found))
        expected = forced[1:]
        forced = asking.forced_tokens(1, SamplingParams(grammar=grammar), token)
        if token == EOS:
            assert forced == ()
            return
        assert forced[: len(expected)] == expected
        answer.append(token)


def test_forced_tokens_of_a_long_text_are_bounded(grammars: GrammarMasks) -> None:
    """As many as a step may have proposals."""
    grammar = Grammar("choice", json.dumps(["x" + "abcdefgh " * 100, "y"]))
    found = allowed(grammars, grammar, [])
    token = next(token for token in found if WORDS.decode_bytes([token]) == b"x")
    forced = grammars.forced_tokens(1, SamplingParams(grammar=grammar), token)
    assert len(forced) == MAX_PROPOSED
    assert ("abcdefgh " * 100).startswith(WORDS.decode_str(list(forced)))


def test_nothing_is_forced_after_an_end_or_without_a_reader(grammars: GrammarMasks) -> None:
    grammar = Grammar("choice", '["yesterday morning"]')
    params = SamplingParams(grammar=grammar, stop_token_ids=(7,))
    assert grammars.forced_tokens(1, params, 5) == ()
    first = allowed(grammars, grammar, [])[0]
    assert grammars.forced_tokens(1, params, EOS) == grammars.forced_tokens(1, params, 7) == ()
    assert grammars.forced_tokens(1, params, first) != ()
