"""Tests of ``broker.speculation.suffix``."""

from __future__ import annotations

import random

import pytest

from swarm.broker.speculation.suffix import (
    MAX_MATCH,
    MAX_STRENGTH,
    MIN_MATCH,
    ChainIndex,
    SuffixLimits,
    SuffixProposer,
)
from swarm.broker.state import Request, Sequence, SequenceState
from swarm.params import SamplingParams
from swarm.wire.messages import Submit


def running(
    tokens: list[int], number: int = 1, tenant: str = "", prompt: int | None = None, adapter: str = ""
) -> Sequence:
    """Return a running sequence whose first ``prompt`` tokens are its prompt; all of them by default."""
    params = SamplingParams(max_tokens=1000, adapter=adapter)
    submit = Submit(request_id=f"r{number}", prompt=tuple(tokens[:prompt]), params=params, seed=1)
    request = Request(submit, None, 0.0, None, tenant)
    return Sequence(number, request, 0, 0, list(tokens), 10_000, state=SequenceState.RUNNING)


def longest_suffix(tokens: list[int]) -> tuple[int, int]:
    """Return the length and the last position of the longest suffix that occurred before; the latest of equals."""
    end = len(tokens) - 1
    best = (0, -1)
    for position in range(end):
        length = 0
        while length < min(position + 1, MAX_MATCH) and tokens[position - length] == tokens[end - length]:
            length += 1
        if length >= MIN_MATCH and length >= best[0]:
            best = (length, position)
    return best


def test_proposes_what_followed_the_suffix_before() -> None:
    proposer = SuffixProposer()
    assert proposer.propose(running([1, 2, 3, 4, 5, 6, 9, 2, 3, 4]), 3) == (5, 6, 9)


def test_answers_of_another_adapter_are_not_proposed() -> None:
    proposer = SuffixProposer()
    proposer.remember("", [1, 2, 3, 4, 5], "red")
    assert proposer.propose(running([1, 2, 3]), 2) == ()
    assert proposer.propose(running([1, 2, 3], 2, adapter="red"), 2) == (4, 5)


def test_the_longest_match_wins_over_a_later_one() -> None:
    text = [7, 1, 2, 3, 50, 8, 1, 2, 3, 60, 7, 1, 2, 3]
    assert SuffixProposer().propose(running(text), 1) == (50,)


def test_the_latest_of_equally_long_matches_wins() -> None:
    text = [7, 1, 2, 3, 50, 7, 1, 2, 3, 60, 7, 1, 2, 3]
    assert SuffixProposer().propose(running(text), 1) == (60,)


def test_text_that_did_not_occur_before_gives_no_proposal() -> None:
    assert SuffixProposer().propose(running(list(range(100))), 8) == ()
    assert SuffixProposer().propose(running([5, 6]), 8) == ()


def test_a_loop_is_continued_beyond_the_end_of_the_text() -> None:
    assert SuffixProposer().propose(running([9, 1, 2, 3, 1, 2, 3, 1, 2, 3]), 8) == (1, 2, 3, 1, 2, 3, 1, 2)


def test_a_proposal_goes_on_behind_a_token_that_differs_from_the_matched_text() -> None:
    proposer = SuffixProposer()
    sequence = running([1, 2, 3, 4, 5, 6, 7, 8, 9, 50, 1, 2, 3])
    assert proposer.propose(sequence, 4) == (4, 5, 6, 7)
    sequence.tokens += [4, 60]  # in place of 5
    assert proposer.propose(sequence, 4) == (6, 7, 8, 9)
    assert proposer.strength(1) == 0
    sequence.tokens += [6, 7]
    assert proposer.propose(sequence, 2) == (8, 9)


def test_a_second_token_that_differs_ends_it() -> None:
    proposer = SuffixProposer()
    sequence = running([1, 2, 3, 4, 5, 6, 7, 8, 9, 50, 1, 2, 3])
    proposer.propose(sequence, 4)
    sequence.tokens += [4, 60, 61]
    assert proposer.propose(sequence, 4) == ()
    del sequence.tokens[12:]  # cut by a stop string
    assert proposer.propose(sequence, 4) == ()


@pytest.mark.parametrize("seed", range(8))
def test_a_match_is_the_longest_of_all_while_there_are_few_candidates(seed: int) -> None:
    chance = random.Random(seed)
    text = [chance.randrange(12) for _ in range(400)]
    index = ChainIndex(text)
    for end in range(4, len(text)):
        index.extend(end - 1)
        match = index.find(text[:end])
        assert (match.length, match.position) == longest_suffix(text[:end])


def test_strength_grows_with_the_match_and_falls_with_disagreement() -> None:
    proposer = SuffixProposer()

    def strength(text: list[int]) -> int:
        sequence = running(text, random.randrange(1 << 30))
        assert proposer.propose(sequence, 1)
        return proposer.strength(sequence.id)

    short = strength([1, 2, 3, 50, 60, 1, 2, 3])
    undecided = strength([1, 2, 3, 50, 60, 1, 2, 3, 70, 61, 1, 2, 3])
    long = strength([*range(20), 50, 60, *range(20)])
    longest = strength([*range(100), 50, 60, *range(100)])
    assert 0 <= undecided < short < long < longest == MAX_STRENGTH


def test_answers_of_the_same_tenant_are_proposed_and_those_of_others_are_not() -> None:
    proposer = SuffixProposer()
    first = running([1, 2, *range(10, 40)], 1, "a", prompt=2)
    proposer.propose(first, 4)
    first.end("stop", "", 1.0)
    proposer.forget(first.id)
    assert proposer.propose(running([5, 10, 11, 12], 2, "a"), 4) == (13, 14, 15, 16)
    assert proposer.propose(running([5, 10, 11, 12], 3, "b"), 4) == ()
    assert proposer.propose(running([5, 37, 38, 39], 4, "a"), 4) == ()  # nothing follows the end of an answer


def test_an_answer_that_did_not_end_by_itself_is_not_kept() -> None:
    proposer = SuffixProposer()
    for number, ends in enumerate(("cancelled", None)):
        sequence = running([1, 2, *range(10, 40)], number, prompt=2)
        proposer.propose(sequence, 4)
        if ends:
            sequence.end("cancelled", "", 1.0)
        proposer.forget(sequence.id)
    assert proposer.num_tokens == 0


def test_a_prompt_is_indexed_while_it_is_computed() -> None:
    """Before the first proposal, and at most so many tokens in each step, whoever they belong to."""
    proposer = SuffixProposer(SuffixLimits(step_tokens=100))
    first, second = running(list(range(150)), 1), running(list(range(150)), 2)
    counts = []
    for _ in range(4):
        proposer.begin_step([first, second])
        counts.append(proposer.num_tokens)
    assert counts == [100, 200, 300, 300]
    first.tokens.extend([70, 71, 72])
    assert proposer.propose(first, 2) == (73, 74)


def test_a_cached_prompt_is_indexed_in_the_steps_of_its_answer() -> None:
    proposer = SuffixProposer(SuffixLimits(step_tokens=100, least_tokens=10))
    sequence, other = running([*range(1000), 500, 501, 502]), running([1, 2, 3, 4], 2)
    counts = []
    for _ in range(12):
        proposer.begin_step([])
        proposer.propose(sequence, 1)
        proposer.propose(sequence, 1)
        counts.append(proposer.num_tokens)
        proposer.propose(other, 1)
        assert proposer.num_tokens <= counts[-1] + 4
    assert counts[:3] == [110, 224, 334]  # a lookup has ten in any case
    assert proposer.propose(sequence, 2) == (503, 504)


def test_the_sequences_of_a_request_share_the_index_of_their_prompt() -> None:
    """It stays until the last one has ended."""
    proposer = SuffixProposer()
    first = running([*range(100), 300, 40, 41, 42], 1, prompt=100)
    second = Sequence(2, first.request, 1, 0, [*range(100), 50, 51, 52], 10_000, state=SequenceState.RUNNING)
    assert proposer.propose(first, 2) == (43, 44)
    assert proposer.num_tokens == 103
    assert proposer.propose(second, 2) == (53, 54)
    assert proposer.num_tokens == 105
    first.end("cancelled", "", 1.0)
    proposer.forget(1)
    assert proposer.propose(second, 2) == (53, 54)
    second.end("cancelled", "", 1.0)
    proposer.forget(2)
    assert proposer.num_tokens == 0


def test_prompt_and_answer_are_one_text() -> None:
    """A match may end in either and begin in the other, and both count for its certainty."""
    proposer = SuffixProposer()
    across = running([8, 1, 2, 3, 60, 61, 1, 2, 3], 1, prompt=3)
    assert proposer.propose(across, 2) == (60, 61)
    agreed = running([1, 2, 3, 50, 9, 1, 2, 3, 50, 7, 1, 2, 3], 2, prompt=5)
    torn = running([1, 2, 3, 50, 9, 1, 2, 3, 60, 7, 1, 2, 3], 3, prompt=5)
    assert (proposer.propose(agreed, 1), proposer.propose(torn, 1)) == ((50,), (60,))
    assert proposer.strength(3) < proposer.strength(2)
    longest = running([7, 1, 2, 3, 50, 8, 1, 2, 3, 60, 7, 1, 2, 3], 4, prompt=5)
    assert proposer.propose(longest, 1) == (50,)


def test_memory_has_a_bound() -> None:
    proposer = SuffixProposer(SuffixLimits(max_tokens=2000, max_tenant_tokens=600))
    chance = random.Random(1)
    alive: list[Sequence] = []
    for number in range(200):
        sequence = running([chance.randrange(9) for _ in range(chance.randrange(4, 300))], number, f"t{number % 7}", 2)
        alive.append(sequence)
        for each in alive:
            proposer.propose(each, 4)
        assert proposer.num_tokens <= 2000
        if len(alive) > 6:
            ended = alive.pop(0)
            ended.end("length", "", 1.0)
            proposer.forget(ended.id)
    for each in alive:
        proposer.forget(each.id)
    assert 0 < proposer.num_tokens <= 2000


def test_the_oldest_answers_of_a_tenant_are_dropped_first() -> None:
    proposer = SuffixProposer(SuffixLimits(max_tenant_tokens=100))
    for begin in (0, 1000, 2000, 3000):
        proposer.remember("", list(range(begin, begin + 40)))
    assert proposer.propose(running([3000, 3001, 3002], 1), 1) == (3003,)
    assert proposer.propose(running([2, 3, 4], 2), 1) == ()


def test_an_answer_cut_by_a_stop_string_is_indexed_anew() -> None:
    proposer = SuffixProposer()
    sequence = running([1, 2, 3, 4, 5, 6, 7, 8, 9], prompt=3)
    proposer.propose(sequence, 1)
    sequence.logprobs = [()] * 6
    sequence.truncate_answer(2)
    sequence.tokens.extend([1, 2, 3])
    assert proposer.propose(sequence, 4) == (4, 5, 1, 2)
