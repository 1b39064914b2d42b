"""Proposed tokens change no bit: the same tokens and log probabilities, keys and values as without them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import swarm.demo
from swarm.params import Grammar, SamplingParams
from swarm.stage import native
from swarm.stage.quantization.at_load import AS_STORED, Quantization
from tests.model.cutting import Cutter, random_tokens
from tests.model.models import named_config
from tests.model.stage_line import Answer, Driver, Propose, StageLine, Token, layers_of, propose_nothing

DEMO = Path(swarm.demo.__file__).parent / "village"
INT4 = Quantization(weights="int4")
PROMPTS = [random_tokens(count, seed=count, vocabulary=250) for count in (70, 33, 5)]
LONG = 30  # tokens of an answer
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Clara", "frog"]}, "age": {"type": "integer", "maximum": 130}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
JSON = Grammar("json_schema", json.dumps(SCHEMA))
PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"logprobs": 3},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "logprobs": 2},
    "penalties": {
        "temperature": 0.7,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "logit_bias": {7: 2.0, 9: -4.0},
        "logprobs": 0,
    },
    "ends": {"temperature": 1.5, "min_tokens": 12, "stop_token_ids": tuple(range(10, 60)), "logprobs": 1},
}

Guess = Callable[[Answer, Sequence[int], random.Random], Sequence[int]]


def right(answer: Answer, following: Sequence[int], chance: random.Random) -> Sequence[int]:
    return following[: chance.randint(1, 9)]


def wrong(answer: Answer, following: Sequence[int], chance: random.Random) -> Sequence[int]:
    return [(token + 1) % 250 for token in right(answer, following, chance)]


def partly_right(answer: Answer, following: Sequence[int], chance: random.Random) -> Sequence[int]:
    """Right up to some token; or nothing, so that steps with and without proposals follow each other."""
    if chance.random() < 0.2:
        return ()
    num_right = chance.randint(0, 6)
    return [*following[:num_right], *(chance.randrange(250) for _ in range(chance.randint(1, 5)))]


GUESSES: dict[str, Guess] = {"right": right, "wrong": wrong, "partly right": partly_right}


class Speculator:
    """Proposals by the answers of a run without any."""

    def __init__(self, guess: Guess, answers: dict[int, list[Token]]) -> None:
        self._guess, self._answers, self._chance = guess, answers, random.Random(5)

    def __call__(self, answer: Answer) -> Sequence[int]:
        following = [token for token, _ in self._answers[answer.sequence][len(answer.drawn) :]]
        return self._guess(answer, following, self._chance)


def requests(sampling: list[SamplingParams]) -> Iterator[Answer]:
    """A sequence for each set of parameters; the last ones begin as forks of the first, which is already running."""
    for number, params in enumerate(sampling):
        yield Answer(number + 1, params, 100 + number, PROMPTS[number % len(PROMPTS)])


def run(line: StageLine, sampling: list[SamplingParams], propose: Any = None, num_forks: int = 2) -> Driver:
    driver = Driver(line) if propose is None else Driver(line, propose)
    for answer in requests(sampling):
        driver.add(answer)
    first = driver.answers[0]
    while len(first.drawn) < 4:
        driver.step()
    for number in range(num_forks):
        driver.add(Answer(50 + number, sampling[-1], 7 + number, first.prompt, source=first))
    driver.run()
    return driver


def drawn(driver: Driver) -> dict[int, list[Token]]:
    return {answer.sequence: answer.drawn for answer in driver.answers}


def caches(line: StageLine, driver: Driver) -> dict[tuple[int, int], bytes]:
    """Keys and values of all certain positions, by stage and sequence."""
    result = {}
    for place, executor in enumerate(line.executors):
        for answer in driver.answers:
            stop = len(answer.tokens) - 1
            data = executor.read_kv(answer.sequence, layers_of(executor), 0, min(stop, answer.kv))
            result[place, answer.sequence] = np.ascontiguousarray(data.numbers).tobytes()
    return result


CASES = [
    ("llama", "float32", AS_STORED, (0, 2, 4, 6)),
    ("llama", "bfloat16", AS_STORED, (0, 4, 6)),
    ("llama", "float32", INT4, (0, 4, 6)),
    ("llama", "bfloat16", INT4, (0, 2, 4, 6)),
    ("qwen3", "bfloat16", AS_STORED, (0, 4, 6)),
    ("gemma2", "float32", AS_STORED, (0, 4, 6)),
    ("gemma3_text", "bfloat16", AS_STORED, (0, 2, 4, 6)),
    ("qwen3_moe", "float32", AS_STORED, (0, 4, 6)),
    ("gpt_oss", "bfloat16", INT4, (0, 4, 6)),
]


@pytest.mark.parametrize("case", CASES)
def test_answers_and_caches_are_the_same_with_proposals(
    cutter: Cutter, save: Callable[..., Path], case: tuple[str, str, Quantization, tuple[int, ...]]
) -> None:
    """With right, wrong and partly right ones, beside each other in a step and in forks of a running sequence."""
    kind, dtype, weights, lines = case
    if weights is INT4 and native.library() is None:
        pytest.skip(f"no native kernels: {native.unavailable_reason()}")
    folder = _saved(kind, save)
    sampling = [SamplingParams(max_tokens=LONG, **fields) for fields in PARAMS.values()]
    line = StageLine(cutter.cut(folder, lines, dtype, weights))
    plain = run(line, sampling)
    expected, held = drawn(plain), caches(line, plain)
    assert len({token for answer in expected.values() for token, _ in answer}) > 20, "the model repeats itself"
    for guess in GUESSES.values():
        line = StageLine(cutter.cut(folder, lines, dtype, weights))
        driver = run(line, sampling, Speculator(guess, expected))
        assert drawn(driver) == expected
        # positions that both have computed: the last step's may be more with proposals
        assert _common(caches(line, driver), held)
        proposed = sum(sum(answer.proposed) for answer in driver.answers)
        accepted = sum(sum(answer.accepted) for answer in driver.answers)
        assert proposed > 50
        assert accepted == (proposed if guess is right else 0 if guess is wrong else accepted)
        assert guess is not partly_right or 0.1 < accepted / proposed < 0.9


_FOLDERS: dict[str, Path] = {}


def _saved(kind: str, save: Callable[..., Path]) -> Path:
    if kind not in _FOLDERS:
        _FOLDERS[kind] = save(named_config(kind))
    return _FOLDERS[kind]


def _common(found: dict[tuple[int, int], bytes], expected: dict[tuple[int, int], bytes]) -> bool:
    assert found.keys() == expected.keys()
    return all(found[key] == expected[key] and found[key] for key in expected)


@pytest.mark.parametrize("guess", GUESSES)
def test_grammars_read_accepted_tokens_only(cutter: Cutter, guess: str) -> None:
    """The answers follow their grammars, and are the same with proposals that break them."""
    sampling = [
        SamplingParams(max_tokens=40, grammar=JSON, temperature=1.0, logprobs=2),
        SamplingParams(max_tokens=40, grammar=Grammar("regex", "[a-z]{3,9}( [a-z]{2,8}){1,6}"), min_tokens=6),
        SamplingParams(max_tokens=LONG, temperature=0.8),
        SamplingParams(max_tokens=40, grammar=JSON, min_tokens=3, presence_penalty=0.3, logprobs=1),
    ]
    expected = drawn(run(StageLine(cutter.cut(DEMO, (0, 3, 8))), sampling))
    driver = run(StageLine(cutter.cut(DEMO, (0, 3, 8))), sampling, Speculator(GUESSES[guess], expected))
    assert drawn(driver) == expected
    readers = driver.line.executors[-1]._grammars._readers
    for answer in driver.answers:
        if answer.params.grammar is not None and answer.sequence in readers:
            read = readers[answer.sequence].tokens
            assert read == [token for token, _ in answer.drawn][: len(read)]
    accepted = sum(sum(answer.accepted) for answer in driver.answers)
    assert (accepted > 0) == (guess != "wrong")


def test_forced_tokens_come_true(cutter: Cutter) -> None:
    """Tokens that the grammar forces are drawn next, with and without being proposed."""
    sampling = [SamplingParams(max_tokens=60, grammar=JSON, temperature=1.0, logprobs=1) for _ in range(3)]
    plain = run(StageLine(cutter.cut(DEMO, (0, 4, 8))), sampling)

    def propose(answer: Answer) -> Sequence[int]:
        return answer.forced[-1][1] if answer.forced and answer.forced[-1][0] == len(answer.drawn) else ()

    driver = run(StageLine(cutter.cut(DEMO, (0, 4, 8))), sampling, propose)
    assert drawn(driver) == drawn(plain)
    for each in (plain, driver):
        for answer in each.answers:
            tokens = [token for token, _ in answer.drawn]
            assert answer.forced
            for place, forced in answer.forced:
                assert tokens[place : place + len(forced)] == list(forced)[: len(tokens) - place]
    accepted = [sum(answer.accepted) / sum(answer.proposed) for answer in driver.answers]
    assert min(accepted) == 1.0


def test_a_late_grammar_accepts_nothing(cutter: Cutter, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the grammar is not compiled, the row's last certain token is as far as it gets."""
    sampling = [SamplingParams(max_tokens=30, grammar=JSON, temperature=1.0)]
    expected = drawn(run(StageLine(cutter.cut(DEMO, (0, 4, 8))), sampling))
    line = StageLine(cutter.cut(DEMO, (0, 4, 8)))
    grammars = line.executors[-1]._grammars
    driver = Driver(line, Speculator(right, expected))
    answer = driver.add(next(requests(sampling)))
    while len(answer.drawn) < 3:
        driver.step()
    real, before = type(grammars).mask, len(answer.tokens)
    monkeypatch.setattr(type(grammars), "mask", lambda *_: None)
    driver.step()
    assert (len(answer.tokens), answer.kv, answer.accepted[-1]) == (before, before, 0)
    monkeypatch.setattr(type(grammars), "mask", real)
    driver.run()
    assert answer.drawn == expected[1]


def test_a_plan_change_cuts_what_was_refused(cutter: Cutter, save: Callable[..., Path]) -> None:
    """An epoch may end right after a step with refused proposals: the next begins with the certain positions."""
    folder = _saved("llama", save)
    sampling = [SamplingParams(max_tokens=LONG, temperature=0.9, logprobs=1)]
    expected = drawn(run(StageLine(cutter.cut(folder, (0, 3, 6))), sampling, num_forks=0))
    line = StageLine(cutter.cut(folder, (0, 3, 6)))
    driver = Driver(line, Speculator(partly_right, expected))
    answer = driver.add(next(requests(sampling)))
    num_changes = 0
    while not answer.is_ended:
        driver.step()
        if answer.drawn and not answer.is_ended:
            assert all(core.sequences[1].position() == answer.end for core in line.cores)
            line.activate({1: answer.kv})
            assert all(core.sequences[1].position() == answer.kv for core in line.cores)
            num_changes += answer.kv < answer.end
            answer.is_open, answer.end = True, answer.kv
            driver.line.next_step = 1
    assert num_changes > 3
    assert answer.drawn == expected[1]


OVERFLOWS = 250  # a token whose values are not finite; no prompt has it
OVERFLOWING = [("llama", "float32"), ("gpt_oss", "bfloat16"), ("gemma3_text", "float32"), ("qwen3_moe", "bfloat16")]


def _overflowing(kind: str, save: Callable[..., Path]) -> Path:
    """Return the folder of a model whose first layer has values that are not finite for one token."""
    name = f"{kind} that overflows"
    if name not in _FOLDERS:
        folder = save(named_config(kind, tie_word_embeddings=False))
        (file,) = folder.glob("*.safetensors")
        weights = load_file(file)
        embedding, values = (weights[f"model.{name}.weight"] for name in ("embed_tokens", "layers.0.self_attn.v_proj"))
        embedding[:, 0] = embedding[OVERFLOWS] = 0.0
        embedding[OVERFLOWS, 0] = 1.0  # no other token has anything in this element
        values[:, 0] = 3e38
        save_file(weights, file, {"format": "pt"})
        _FOLDERS[name] = folder
    return _FOLDERS[name]


def with_overflow(answer: Answer, following: Sequence[int], chance: random.Random) -> Sequence[int]:
    """Right up to a token that overflows, and random behind it."""
    num_right = chance.randint(0, 2)
    return [*following[:num_right], OVERFLOWS, *(chance.randrange(250) for _ in range(chance.randint(0, 3)))]


@pytest.mark.parametrize("kernels", ["ours", "torch's"])
@pytest.mark.parametrize(("kind", "dtype"), OVERFLOWING)
def test_a_guess_that_overflows_changes_no_other_row(
    save: Callable[..., Path], kind: str, dtype: str, kernels: str
) -> None:
    """Neither rows before it in its step, nor rows that are computed in its cell later."""
    folder = _overflowing(kind, save)
    sampling = [
        SamplingParams(**(fields | {"max_tokens": LONG, "logit_bias": {OVERFLOWS: -1000.0}}))
        for fields in PARAMS.values()
    ]
    with native.disabled("to test torch's") if kernels != "ours" else nullcontext():
        cutter = Cutter()
        expected = drawn(run(StageLine(cutter.cut(folder, (0, 6), dtype)), sampling))
        driver = run(StageLine(cutter.cut(folder, (0, 6), dtype)), sampling, Speculator(with_overflow, expected))
    assert all(answer.failure is None for answer in driver.answers)
    assert drawn(driver) == expected
    assert sum(sum(answer.proposed) for answer in driver.answers) > 100


@pytest.mark.parametrize("kernels", ["ours", "torch's"])
def test_an_accepted_token_that_overflows_fails_as_without_proposals(save: Callable[..., Path], kernels: str) -> None:
    folder = _overflowing("llama", save)
    params = SamplingParams(max_tokens=LONG, temperature=0.9, logit_bias={OVERFLOWS: 3.0})
    with native.disabled("to test torch's") if kernels != "ours" else nullcontext():
        cutter = Cutter()

        def result(propose: Propose = propose_nothing) -> list[Answer]:
            driver = Driver(StageLine(cutter.cut(folder, (0, 6))), propose)
            for number in range(8):
                driver.add(Answer(number, params, 100 + number, PROMPTS[number % len(PROMPTS)]))
            driver.run()
            return driver.answers

        plain = result()
        padded = {answer.sequence: [*answer.drawn, (5, ()), (6, ())] for answer in plain}
        found = result(Speculator(right, padded))
    # the failure names its position; the driver takes no tokens of the step in which it comes
    assert [answer.failure for answer in found] == [answer.failure for answer in plain]
    assert any(answer.failure and answer.accepted and answer.accepted[-1] for answer in found)
