"""Log probabilities of a prompt: the last stage returns those of each row, and the end's message has all, each once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest

from swarm.broker.actions import Action, SendToClient, WriteEnd, WriteTokens
from swarm.broker.events import RequestRead, StepFinished
from swarm.broker.requests.durability import restore_request
from swarm.broker.state.journal_snapshot import RequestRecord, SequenceRecord
from swarm.broker.state.prefix import PrefixRules
from swarm.broker.steps.scheduler import MAX_SCORED
from swarm.params import SamplingParams
from swarm.testing import fake_prompt_row
from swarm.wire.messages import MAX_PROMPT_LOGPROB_BYTES, Finished, PromptLogprobs, Rejected, Row, Submit
from swarm.wire.prompt_logprobs import pack_logprobs, row_bytes, unpack_logprobs
from tests.unit.broker.bench import TOKEN, Bench, done_of, request_settings, said, scheduling, settings, submit


def values(prompt: Sequence[int], start: int, stop: int) -> bytes:
    """What the last stage returns for the tokens at these positions, with two alternatives."""
    return pack_logprobs(fake_prompt_row(place, prompt[place], 2) for place in range(start, stop))


def ask(num_prompt: int = 5, request_id: str = "r", **params: object) -> Submit:
    return submit(request_id, num_prompt, **({"prompt_logprobs": 2, "max_tokens": 1} | params))


def scored(bench: Bench, row: Row) -> list[PromptLogprobs]:
    """What the last stage returns for a row of a sequence that asked, and lacks some."""
    prompt = bench.state.sequences[row.sequence].request.submit.prompt
    stop = min(row.start + row.count + 1, len(prompt))
    return [PromptLogprobs(row.sequence, row.start + 1, values(prompt, row.start + 1, stop))] * (stop > row.start + 1)


def finish(bench: Bench, answer: Callable[[Bench, Row], list[PromptLogprobs]] = scored) -> list[Action]:
    """Complete the oldest step."""
    step = bench.pipe.popleft()
    done = done_of(step, TOKEN, {}, set(), ())
    drawn = {s for s, each in bench.state.sequences.items() if each.request.submit.params.max_answer}
    items = tuple(item for row in step.rows for item in answer(bench, row))
    kept = tuple(each for each in done.sampled if each.sequence in drawn)
    return bench.feed(StepFinished(msgspec.structs.replace(done, sampled=kept, prompt_logprobs=items or msgspec.UNSET)))


def finish_all(bench: Bench) -> list[Action]:
    actions: list[Action] = []
    while bench.pipe:
        actions += finish(bench)
    return actions


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_they_come_with_the_end_and_are_written_before(make_bench: Callable[..., Bench], max_tokens: int) -> None:
    """With a token, they are written with it; without one, with the end."""
    serving = make_bench(settings(requests=request_settings(has_journal=True))).serve()
    serving.held = {WriteTokens, WriteEnd}
    serving.say(ask(max_tokens=max_tokens))
    serving.feed(RequestRead("r", None))
    actions = finish(serving)
    prompt = serving.state.requests["r"].submit.prompt
    whole = values(prompt, 1, 5)
    written = [new.prompt_logprobs for a in actions if isinstance(a, WriteTokens) for new in a.tokens]
    assert written == [whole] * max_tokens
    assert [a.prompt_logprobs for a in actions if isinstance(a, WriteEnd)] == [b"" if max_tokens else whole]
    assert not [a for a in actions if isinstance(a, SendToClient)]
    [finished] = said(serving.write_out(), Finished)
    assert isinstance(finished, Finished)
    assert (finished.prompt_logprobs, finished.reason, finished.num_tokens) == (whole, "length", max_tokens)
    assert [row[0].token for row in unpack_logprobs(whole, 4)] == list(prompt[1:])


def test_a_prompt_of_one_token_has_none(serving: Bench) -> None:
    serving.say(ask(1, max_tokens=0))
    [finished] = said(finish_all(serving), Finished)
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.prompt_logprobs) == ("length", None)


def test_a_step_returns_those_of_few_tokens(make_bench: Callable[..., Bench]) -> None:
    """The last stage holds logits for each of them."""
    serving = make_bench(scheduling(step_tokens=512, prefill_chunk=512)).serve()
    for name in ("a", "b"):
        serving.say(ask(200, name))
    serving.say(submit("c", 200))
    counts = []
    while serving.pipe:
        rows = serving.pipe[0].rows
        asked = [row.count for row in rows if serving.state.sequences[row.sequence].lacks_prompt_logprobs]
        counts.append(sum(asked))
        finish(serving)
    assert max(counts) == MAX_SCORED
    assert sum(counts) >= 2 * 199


def test_a_cached_prefix_skips_no_row(serving: Bench) -> None:
    """Another request that begins alike starts from the cache, as do further continuations."""
    serving.say(submit("a", 100, max_tokens=1))
    finish_all(serving)
    serving.say(ask(100, "b"))
    assert [row.start for row in serving.pipe[0].rows] == [0]
    finish_all(serving)
    serving.say(submit("c", 100, max_tokens=1))
    assert [row.start for row in serving.pipe[0].rows] == [96]


def test_continuations_share_those_of_the_first(serving: Bench) -> None:
    serving.say(ask(n=2, max_tokens=2))
    opened = {item.sequence: item.params.prompt_logprobs for item in serving.pipe[0].open}
    assert opened == {1: 2, 2: None}
    finish(serving, lambda bench, row: scored(bench, row) if row.sequence == 1 else [])
    first, second = serving.state.requests["r"].sequences
    assert first.num_scored == 4
    assert (second.num_scored, bytes(second.prompt_logprobs), second.num_generated) == (0, b"", 1)


def test_each_counts_once_over_a_change_of_plan(serving: Bench) -> None:
    """Rows that every stage had computed are not computed again; others are, and repeat nothing."""
    serving.say(ask(400))
    finish(serving)
    [sequence] = serving.state.sequences.values()
    before = sequence.num_scored
    assert 0 < before == sequence.kv
    serving.join("w9")
    serving.lose("w1")
    serving.tick(5.0)
    serving.tick()
    assert serving.epoch > 1
    serving.state.counters.pop("misplaced_prompt_logprobs", None)
    while serving.pipe:
        finish(serving)
        serving.tick()
    assert sequence.num_scored == 399 or sequence.state.value != "ended"
    assert bytes(sequence.prompt_logprobs) == values(sequence.request.submit.prompt, 1, 1 + sequence.num_scored)
    assert "misplaced_prompt_logprobs" not in serving.state.counters


@pytest.mark.parametrize(
    "wrong",
    [
        lambda item: [],
        lambda item: [msgspec.structs.replace(item, position=item.position + 1)],  # one is missing
        lambda item: [msgspec.structs.replace(item, values=item.values[:-1])],
        lambda item: [msgspec.structs.replace(item, values=item.values * 2)],  # more than the prompt has
    ],
)
def test_a_stage_that_returns_less_ends_the_request(
    serving: Bench, wrong: Callable[[PromptLogprobs], list[PromptLogprobs]]
) -> None:
    """It must not wait for ever, nor end well without them. The text names the worker."""
    serving.say(ask())
    actions = finish(serving, lambda bench, row: [each for item in scored(bench, row) for each in wrong(item)])
    [finished] = said(actions, Finished)
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.prompt_logprobs) == ("failed", None)
    assert "returned no log probabilities of the prompt" in finished.detail


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("is_lost", [False, True])
def test_results_of_steps_may_arrive_in_another_order(
    make_bench: Callable[..., Bench], max_tokens: int, is_lost: bool
) -> None:
    """If those in front are lost with a stage, their rows are computed again, and the ones behind, too."""
    serving = make_bench(scheduling(mode="overlapped", step_tokens=64, prefill_chunk=64)).serve()
    serving.say(ask(120, max_tokens=max_tokens))
    assert len(serving.pipe) == 2
    serving.pipe.rotate()
    finish(serving)
    [sequence] = serving.state.sequences.values()
    assert (sequence.num_scored, sequence.num_generated, sequence.reason) == (0, 0, None)
    if is_lost:
        serving.lose("w1")
        serving.join("w9")
        serving.tick(5.0)
        serving.tick()
        assert serving.state.plans.is_serving
    finish_all(serving)
    assert bytes(sequence.prompt_logprobs) == values(sequence.request.submit.prompt, 1, 120)
    assert (sequence.reason, sequence.num_generated) == ("length", max_tokens)


def test_those_that_no_one_asked_for_do_not_count(serving: Bench) -> None:
    serving.say(submit("r", 5))
    finish(serving)
    assert serving.state.counters["misplaced_prompt_logprobs"] == 1
    assert not serving.state.requests["r"].sequences[0].prompt_logprobs


def test_more_than_one_message_holds_are_refused(serving: Bench) -> None:
    manifest = serving.state.manifest
    assert manifest is not None
    serving.state.manifest = msgspec.structs.replace(manifest, context=1 << 20)
    most = MAX_PROMPT_LOGPROB_BYTES // row_bytes(20, manifest.vocab_size) + 1
    [rejected] = said(serving.say(ask(most + 1, prompt_logprobs=20)), Rejected)
    assert isinstance(rejected, Rejected)
    assert rejected.code == "invalid"
    assert f"at most {most} tokens" in rejected.reason
    [rejected] = said(serving.say(ask(most, prompt_logprobs=20, n=2)), Rejected)
    assert isinstance(rejected, Rejected)
    assert f"n = 2 a prompt has at most {(most - 1) // 2 + 1} tokens" in rejected.reason


def test_without_keys_and_values_they_come_once(make_bench: Callable[..., Bench]) -> None:
    """The steps of further tokens compute the prompt again; the stages are told to return nothing for it."""
    off = scheduling(kv_cache=False).scheduler
    serving = make_bench(settings(scheduler=off, prefix=PrefixRules(is_enabled=False))).serve()
    serving.say(ask(max_tokens=2))
    assert [item.params.prompt_logprobs for item in serving.pipe[0].open] == [2]
    finish(serving)
    assert [item.params.prompt_logprobs for item in serving.pipe[0].open] == [None]
    assert serving.pipe[0].rows[0].start == 0
    finish(serving, lambda bench, row: [])
    assert serving.sequence().reason == "length"


def test_values_that_do_not_fit_the_prompt_are_an_error() -> None:
    assert unpack_logprobs(b"", 3) == []
    with pytest.raises(ValueError, match="no log probabilities of 3 tokens"):
        unpack_logprobs(b"x" * 24, 3)


@pytest.mark.parametrize(
    "params",
    [{"max_tokens": 0}, {"prompt_logprobs": 21}, {"prompt_logprobs": 1, "vector": "last"}],
)
def test_unfit_parameters_are_refused(serving: Bench, params: dict[str, object]) -> None:
    assert said(serving.say(submit("r", 3, **params)), Rejected)


def test_without_a_token_there_is_one_continuation(serving: Bench) -> None:
    [rejected] = said(serving.say(ask(n=2, max_tokens=0)), Rejected)
    assert isinstance(rejected, Rejected)
    assert "n must be 1" in rejected.reason


@pytest.mark.parametrize("params", [{"prompt_logprobs": 1}, {"vector": "last"}])
def test_a_plan_with_an_older_worker_is_never_sent_one(serving: Bench, params: dict[str, object]) -> None:
    """A request that was accepted before waits for another plan, for a while, and ends with the reason."""
    serving.say(submit("r", 400, **params))
    serving.add("w9")
    serving.tell("w9", serving.workers["w9"].hello(wire_versions=(1, 2, 3)))
    serving.lose("w0")
    for _ in range(3):
        serving.tick(5.0)
    assert serving.state.outdated_worker(SamplingParams(vector="last")) == "w9"
    assert not [item for step in serving.pipe for item in step.open]
    for _ in range(8):
        serving.tick(5.0)
    [sequence] = serving.state.sequences.values()
    assert sequence.reason == "failed"
    assert "worker w9 is too old for" in sequence.detail


def test_they_are_restored_with_the_first_token() -> None:
    """Without a token there are none yet, and the whole prompt is computed again."""
    record = RequestRecord(
        ask(max_tokens=9), "t", 1.0, [SequenceRecord(1, 0, tokens=[7], prompt_logprobs=b"x" * 4)], None
    )
    [begun] = restore_request(record, 9.0).sequences
    assert (bytes(begun.prompt_logprobs), begun.num_scored, begun.starts_from_nothing) == (b"xxxx", 4, False)
    record = RequestRecord(ask(), "t", 1.0, [SequenceRecord(1, 0)], None)
    [waiting] = restore_request(record, 9.0).sequences
    assert waiting.starts_from_nothing
