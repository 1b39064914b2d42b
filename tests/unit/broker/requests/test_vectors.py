"""Requests for vectors: a prompt is computed, and the last stage's vector is the answer, in the end's own message."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from swarm.broker.actions import Action, SendToClient, WriteEnd, WriteTokens
from swarm.broker.events import RequestRead, StepFinished
from swarm.broker.requests.durability import restore_request
from swarm.broker.state.journal_snapshot import RequestRecord, SequenceRecord
from swarm.broker.steps import scheduler
from swarm.params import VectorKind
from swarm.wire.messages import Ack, Finished, Rejected, Sampled, SequenceVector, Stop, Submit
from tests.unit.broker.bench import Bench, done_of, request_settings, said, settings, submit

VECTOR = b"12345678"  # two float32, the size of the fake model's hidden states


def ask(num_prompt: int = 3, kind: VectorKind = "last", request_id: str = "r") -> Submit:
    return submit(request_id, num_prompt, vector=kind)


def finish(bench: Bench, *vectors: SequenceVector, sampled: tuple[Sampled, ...] = ()) -> list[Action]:
    """Complete the oldest step with these vectors, and with no other token."""
    done = done_of(bench.pipe.popleft(), 0, {}, set(), ())
    return bench.feed(StepFinished(msgspec.structs.replace(done, sampled=sampled, vectors=vectors or msgspec.UNSET)))


def test_a_vector_is_the_end_and_is_written_before_it_is_sent(make_bench: Callable[..., Bench]) -> None:
    serving = make_bench(settings(requests=request_settings(has_journal=True))).serve()
    serving.held = {WriteEnd}
    serving.say(ask())
    serving.feed(RequestRead("r", None))
    assert [(row.start, row.count, row.sample) for row in serving.pipe[0].rows] == [(0, 3, True)]
    actions = finish(serving, SequenceVector(1, 3, VECTOR))
    assert [a for a in actions if isinstance(a, WriteEnd)] == [WriteEnd(1, "stop", 0, "", VECTOR)]
    assert not [a for a in actions if isinstance(a, WriteTokens | SendToClient)]
    [finished] = said(serving.write_out(), Finished)
    assert isinstance(finished, Finished)
    assert (finished.vector, finished.num_tokens, finished.num_prompt) == (VECTOR, 0, 3)
    serving.say(Ack(request_id="r", index=0, next_index=0))
    assert not serving.state.requests


@pytest.mark.parametrize(
    ("vector", "counted"),
    [
        (SequenceVector(1, 2, VECTOR), "misplaced_vectors"),  # of a part of the prompt
        (SequenceVector(1, 3, VECTOR[:4]), "misplaced_vectors"),  # of another size
        (SequenceVector(9, 3, VECTOR), "late_vectors"),
    ],
)
def test_what_is_no_vector_of_the_prompt_does_not_count(serving: Bench, vector: SequenceVector, counted: str) -> None:
    serving.say(ask())
    finish(serving, vector)
    assert serving.state.counters[counted] == 1
    [sequence] = serving.state.requests["r"].sequences
    assert (sequence.vector, sequence.reason) == (b"", "failed")  # no later step would return it
    assert "returned no vector of the model's size" in sequence.detail


def test_a_vector_that_nobody_asked_for_and_a_token_for_one_are_misplaced(serving: Bench) -> None:
    serving.say(submit("r", 3))
    finish(serving, SequenceVector(1, 3, VECTOR))
    assert serving.state.counters["misplaced_vectors"] == 1
    serving.say(ask(request_id="s"))
    finish(serving, sampled=(Sampled(2, 3, 5, ()),))
    assert serving.state.counters["late_tokens"] == 1


def test_no_stop_of_a_text_ends_it(serving: Bench) -> None:
    serving.say(ask())
    serving.say(Stop(request_id="r", index=0, at_index=0))
    finish(serving, SequenceVector(1, 3, VECTOR))
    assert serving.state.requests["r"].sequences[0].vector == VECTOR
    assert serving.state.counters["late_stops"] == 1


def test_its_deadline_counts_no_tokens(serving: Bench) -> None:
    serving.say(submit("measures", max_tokens=4))
    while serving.pipe:
        serving.tick(1.0)
        serving.finish()
    serving.say(submit("r", vector="last", ignore_eos=True, max_tokens=100, deadline_s=20.0))
    assert serving.pipe[0].rows


def test_a_prompt_may_fill_the_context(serving: Bench) -> None:
    """No token follows it."""
    assert serving.state.manifest is not None
    context = serving.state.manifest.context
    serving.say(ask(context))
    assert serving.state.requests["r"].sequences[0].limit == context
    [rejected] = said(serving.say(ask(context + 1, request_id="s")), Rejected)
    assert isinstance(rejected, Rejected)
    assert rejected.code == "context"
    assert "must remain" not in rejected.reason


def test_vectors_of_a_step_fit_into_its_header(serving: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MAX_VECTOR_BYTES", 2 * len(VECTOR))
    for name in ("a", "b", "c"):
        serving.say(ask(request_id=name))
    ended: list[int] = []
    while serving.pipe:
        rows = [row for row in serving.pipe[0].rows if row.sample]
        ended.append(len(rows))
        finish(serving, *(SequenceVector(row.sequence, 3, VECTOR) for row in rows))
    assert sum(ended) == 3
    assert max(ended) <= 2


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("scores", {}, "no classification head"),
        ("last", {"num_labels": 1, "is_headless": True}, "scores only"),
        (None, {"is_headless": True}, "generates no text"),
    ],
)
def test_a_model_without_the_head_refuses(
    serving: Bench, kind: VectorKind | None, changes: dict[str, object], reason: str
) -> None:
    assert serving.state.manifest is not None
    serving.state.manifest = msgspec.structs.replace(serving.state.manifest, **changes)
    [rejected] = said(serving.say(submit("r", 3, vector=kind)), Rejected)
    assert isinstance(rejected, Rejected)
    assert rejected.code == "unsupported_task"
    assert reason in rejected.reason


def test_a_mean_keeps_no_positions_over_a_change_of_plan(serving: Bench) -> None:
    """The last stage's sum is of one epoch. A request for the last position's vector goes on where it was."""
    for name, kind in (("mean", "mean"), ("last", "last")):
        serving.say(ask(400, kind, name))  # type: ignore[arg-type]
    while any(sequence.kv == 0 for sequence in serving.state.sequences.values()):
        finish(serving)
    mean, last = (serving.state.requests[name].sequences[0] for name in ("mean", "last"))
    held = last.kv
    serving.join("w9")
    serving.lose("w1")
    serving.tick(5.0)
    serving.tick()
    assert serving.epoch > 1
    assert mean.residency > last.residency == 0
    assert mean.kv == 0
    assert last.kv <= held


def test_a_vector_is_restored_with_its_request() -> None:
    record = RequestRecord(ask(), "t", 1.0, [SequenceRecord(1, 0, reason="stop", vector=VECTOR)], 0.5)
    [sequence] = restore_request(record, 9.0).sequences
    assert (sequence.vector, sequence.limit, sequence.end_written) == (VECTOR, 3, True)
