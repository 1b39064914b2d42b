"""Thinking at the beginning of an answer: where it ends, what its budget forces, and that only the tokens decide."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from llguidance import LLTokenizer

import swarm.demo
from swarm.params import Grammar, SamplingParams, Thinking
from swarm.stage.engine import native_sampling
from swarm.stage.engine.batch_sampling import BatchSamples, sample_batch
from swarm.stage.engine.grammars import GrammarMasks
from swarm.stage.engine.thinking import ThinkingReaders
from swarm.stage.executor import Batch, SampleJob
from swarm.testing import fake_manifest
from swarm.wire.messages import Row

FOLDER = Path(swarm.demo.__file__).parent / "village"
EOS = 1
WORDS = LLTokenizer((FOLDER / "tokenizer.json").read_text(), eos_token=[EOS])
SIZE = WORDS.vocab_size
MANIFEST = msgspec.structs.replace(fake_manifest(vocab_size=SIZE), eos_token_ids=(EOS,))
PROMPT = [5, 6, 7]
CLOSING = tuple(WORDS.tokenize_str("</think>"))
CHOICE = Grammar("choice", json.dumps(["yes", "no"]))


def ids(text: str) -> list[int]:
    return list(WORDS.tokenize_str(text))


def by_letters(text: str) -> list[int]:
    """Tokens of one character each, as a model may write them."""
    return [token for letter in text for token in WORDS.tokenize_str(letter)]


def job(answer: list[int], thinking: Thinking, **params: object) -> SampleJob:
    asked = SamplingParams(thinking=thinking, **params)  # type: ignore[arg-type]
    return SampleJob(0, asked, 3, [*PROMPT, *answer], len(PROMPT))


def readers() -> ThinkingReaders:
    return ThinkingReaders(lambda token: WORDS.decode_bytes([token]))


def start_of(answer: list[int], thinking: Thinking) -> int | None:
    return readers().read(1, job(answer, thinking)).start


@pytest.fixture
def grammars() -> GrammarMasks:
    return GrammarMasks(FOLDER, (EOS,))


@pytest.fixture(params=["native", "python"])
def sampler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "python":
        monkeypatch.setattr(native_sampling, "supports", lambda rows: False)
    elif not native_sampling.supports(torch.zeros(1, SIZE)):
        pytest.skip("there are no native kernels")


def step(grammars: GrammarMasks, asked: SampleJob, seed: int = 0, guess: tuple[int, ...] = ()) -> BatchSamples:
    """The draws after a history, and after each token of a guess, by logits that its length decides."""
    job = SampleJob(0, asked.params, asked.seed, [*asked.history, *guess], asked.num_prompt, len(guess))
    rows = torch.stack([row_after(len(asked.history) + n, seed) for n in range(1 + len(guess))])
    batch = Batch((Row(1, 0, 1 + len(guess), True),), np.zeros(1 + len(guess), np.int64), None, (job,))
    until = time.monotonic() + 30
    while time.monotonic() < until:
        found = sample_batch(batch, rows, MANIFEST, 1, grammars)
        if not found.delayed:
            return found
    raise AssertionError("the grammar is not compiled after 30 s")


def row_after(length: int, seed: int) -> torch.Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(1000 * seed + length)) * 3


def answer(thinking: Thinking, most: int, seed: int = 0, *, fresh: bool = False, **params: object) -> list[int]:
    """An answer, drawn token by token; ``fresh``: each without what was read before, as by another worker."""
    grammars, tokens = GrammarMasks(FOLDER, (EOS,)), list[int]()
    while len(tokens) < most and (not tokens or tokens[-1] != EOS):
        found = step(grammars, job(tokens, thinking, temperature=1.0, **params), seed)
        assert not found.failed
        tokens.append(found.sampled[0].token)
        if fresh:
            grammars.clear()
    return tokens


# --- where it ends


@pytest.mark.parametrize("spell", [ids, by_letters])
@pytest.mark.parametrize("text", ["Hm.</think>yes", "</think>yes", "a</thin </think>", "</</think> </think>"])
def test_the_first_end_counts_however_it_is_spelled(text: str, spell: object) -> None:
    tokens = spell(text)  # type: ignore[operator]
    start = start_of(tokens, Thinking(("</think>",)))
    assert start is not None
    before, after = WORDS.decode_bytes(tokens[: start - 1]), WORDS.decode_bytes(tokens[:start])
    assert b"</think>" not in before
    assert b"</think>" in after


def test_no_end_is_none() -> None:
    assert start_of(ids("I think </thin, so"), Thinking(("</think>",))) is None
    assert start_of([], Thinking(("</think>",))) is None


def test_any_of_the_ends_counts() -> None:
    thinking = Thinking(("Here is my response:", "Here's my response:"))
    for text in thinking.ends:
        assert start_of(ids(f"Hm. {text}"), thinking) == len(ids(f"Hm. {text}"))


@pytest.mark.parametrize("seed", range(20))
def test_only_the_tokens_decide(seed: int) -> None:
    """Whatever a cached reader has read: the beginning, other tokens, more tokens."""
    dice, kept = random.Random(seed), readers()
    thinking = Thinking(("</think>",), budget=dice.randrange(12), closing=CLOSING)
    for _ in range(30):
        tokens = ids("Hm </think> so")[: dice.randrange(9)] + dice.choices(CLOSING, k=dice.randrange(12))
        found, fresh = kept.read(1, job(tokens, thinking)), readers().read(1, job(tokens, thinking))
        assert (found.start, found.forced) == (fresh.start, fresh.forced)


# --- budget


def test_a_used_budget_forces_the_end() -> None:
    thinking = Thinking(("</think>",), budget=3, closing=CLOSING)
    think = ids("a b c d e f")[:3]
    kept = readers()
    for number in range(3):
        assert kept.read(1, job(think[:number], thinking)).forced == ()
    for number in range(len(CLOSING)):
        found = kept.read(1, job([*think, *CLOSING[:number]], thinking))
        assert (found.start, found.forced) == (None, CLOSING[number:])
    found = kept.read(1, job([*think, *CLOSING], thinking))
    assert (found.start, found.forced) == (3 + len(CLOSING), ())
    assert kept.read(1, job([*think, *CLOSING, *think, *think], thinking)).forced == ()


def test_thinking_that_ends_with_its_budget_is_not_ended_again() -> None:
    thinking = Thinking(("</think>",), budget=len(CLOSING), closing=CLOSING)
    assert readers().read(1, job(list(CLOSING), thinking)).start == len(CLOSING)


def test_no_budget_at_all_begins_with_the_end() -> None:
    assert readers().read(1, job([], Thinking(("</think>",), budget=0, closing=CLOSING))).forced == CLOSING


@pytest.mark.usefixtures("sampler")
@pytest.mark.parametrize("seed", range(3))
def test_an_answer_ends_its_thinking_in_time(seed: int) -> None:
    """The model's own tokens until then; other workers draw the same."""
    thinking = Thinking(("</think>",), budget=9, closing=CLOSING)
    tokens = answer(thinking, 40, seed, ignore_eos=True)
    assert tuple(tokens[9 : 9 + len(CLOSING)]) == CLOSING
    free = answer(Thinking(("</think>",)), 9, seed, ignore_eos=True)
    assert tokens[:9] == free
    assert answer(thinking, 40, seed, fresh=True, ignore_eos=True) == tokens


@pytest.mark.usefixtures("sampler")
def test_what_is_forced_is_returned_to_be_proposed(grammars: GrammarMasks) -> None:
    """All of it is then drawn in one step, and equals what is drawn one by one."""
    thinking = Thinking(("</think>",), budget=4, closing=CLOSING)
    tokens = answer(thinking, 4 + len(CLOSING) + 1, ignore_eos=True)
    last = step(grammars, job(tokens[:3], thinking, temperature=1.0, ignore_eos=True))
    assert [forced.tokens for forced in last.forced] == [CLOSING]
    guess = step(grammars, job(tokens[:4], thinking, temperature=1.0, ignore_eos=True), guess=CLOSING)
    assert [drawn.token for drawn in guess.sampled] == tokens[4:]
    assert guess.forced == ()


# --- grammars


@pytest.mark.usefixtures("sampler")
@pytest.mark.parametrize("seed", range(3))
def test_a_grammar_applies_after_the_thinking(seed: int) -> None:
    thinking = Thinking(("</think>",), budget=6, closing=CLOSING)
    tokens = answer(thinking, 40, seed, grammar=CHOICE)
    assert tokens[-1] == EOS
    assert WORDS.decode_str(tokens[6 + len(CLOSING) : -1]) in ("yes", "no")
    assert answer(thinking, 40, seed, fresh=True, grammar=CHOICE) == tokens


def test_an_answer_with_a_grammar_does_not_end_within_its_thinking(grammars: GrammarMasks) -> None:
    """Its end tokens and the request's are forbidden there, nothing else."""
    asked = job(ids("Hm"), Thinking(("</think>",)), grammar=CHOICE, stop_token_ids=(9,))
    mask = grammars.thinking_mask(asked, SIZE, ())
    assert mask is not None
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    assert allowed == [token for token in range(SIZE) if token not in (EOS, 9)]
    assert grammars.thinking_mask(job(ids("Hm"), Thinking(("</think>",))), SIZE, ()) is None


def test_without_a_tokenizer_the_request_fails_alone(tmp_path: Path) -> None:
    found = step(GrammarMasks(tmp_path, (EOS,)), job([], Thinking(("</think>",))))
    assert "tokenizer.json" in found.failed[0].reason
