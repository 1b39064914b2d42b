"""The core as a whole: descriptions, the model's files, strangers, late answers, and that it always decides alike."""

from __future__ import annotations

import msgspec
import pytest

from swarm.broker.actions import Action
from swarm.broker.events import ClientUnreachable, MessageRefused, StepFinished
from swarm.testing import fake_manifest
from swarm.wire.messages import (
    AssetPart,
    Cancel,
    Denied,
    Describe,
    Description,
    Failure,
    GetAsset,
    Query,
    Report,
    SequencePosition,
    Step,
)
from swarm.wire.tensors import pack_bytes
from tests.unit.broker.bench import TOKEN, Bench, done_of, orders, row, said, submit


def describe(bench: Bench) -> Description:
    (answer,) = said(bench.say(Describe()))
    assert isinstance(answer, Description)
    return answer


def test_description_follows_the_swarm(bench: Bench) -> None:
    """Without a worker there is no model; while it loads, the state says so; then it serves, and goes on serving while
    a newcomer loads."""
    assert (describe(bench).manifest, describe(bench).state) == (None, "waiting")
    bench.mute = {"w0"}
    bench.join("w0")
    bench.tick()
    assert (describe(bench).manifest, describe(bench).state) == (fake_manifest(), "preparing")
    bench.tell("w0", bench.workers["w0"].prepared(1))
    assert describe(bench).state == "activating"
    bench.mute = set()
    bench.lose("w0")
    bench.join("w1")
    bench.tick()
    assert (describe(bench).state, describe(bench).waits_for, describe(bench).max_context) == ("serving", "", 512)
    bench.mute = {"w2"}
    bench.join("w2")
    bench.tick()
    assert describe(bench).state == "serving"


def test_what_nobody_can_understand_is_counted(serving: Bench) -> None:
    """Each door's share stands in the stats."""
    for door in ("client", "control", "control", "beat", "data"):
        assert serving.feed(MessageRefused(door)) == []
    (report,) = said(serving.say(Query(what="stats")))
    assert isinstance(report, Report)
    assert {name: n for name, n in report.body["pipeline"].items() if name.startswith("malformed")} == {
        "malformed_beat": 1,
        "malformed_client": 1,
        "malformed_control": 2,
        "malformed_data": 1,
    }


def test_an_unknown_file_is_an_answer(serving: Bench) -> None:
    """The client is told, not left waiting."""
    (answer,) = said(serving.say(GetAsset(name="x", offset=0)))
    assert answer == Report(what="asset", ok=False, body={"error": "this swarm has no asset 'x'"})


def test_a_step_is_answered_once(serving: Bench) -> None:
    """A doubled answer, and one to a step that nobody sent, are counted and change nothing."""
    serving.say(submit())
    step = serving.pipe.popleft()
    serving.finish(step)
    serving.take()
    again = done_of(step, TOKEN, {}, set(), ())
    assert serving.feed(StepFinished(again)) == []
    assert serving.feed(StepFinished(msgspec.structs.replace(again, step=99))) == []
    assert serving.feed(StepFinished(msgspec.structs.replace(again, epoch=0, step=2))) == []
    assert serving.state.counters["stale_steps"] == 3
    assert serving.sequence().num_generated == 1


def test_an_answer_for_a_sequence_that_is_gone(serving: Bench) -> None:
    """Positions and failures of sequences that are no more are dropped."""
    serving.say(submit())
    step = serving.pipe.popleft()
    done = done_of(step, TOKEN, {}, set(), ())
    foreign = tuple(type(k)(k.sequence + 50, k.position) for k in done.kv)
    failed = (Failure(51, "not ours"),)
    serving.feed(StepFinished(msgspec.structs.replace(done, kv=foreign, sampled=(), failed=failed)))
    assert serving.sequence().reason is None
    assert serving.sequence().kv == 0


def late(step: Step) -> StepFinished:
    """The answer of a last stage that has computed the step, and could draw for none of its rows yet."""
    done = done_of(step, TOKEN, {}, set(), ())
    return StepFinished(msgspec.structs.replace(done, sampled=(), late=tuple(row.sequence for row in step.rows)))


def test_a_draw_that_was_put_off_is_asked_for_again(serving: Bench) -> None:
    """By the last position alone, which the stages cut first; as often as it takes, at the answer's beginning and in
    its middle (after a recovery); and the answer is as long as ever."""
    serving.say(submit(max_tokens=3))
    sequence = serving.sequence()
    for num_tokens in (3, 4):
        for times in range(3):
            step = serving.pipe.popleft()
            if times:
                assert row(step) == [(sequence.id, num_tokens - 1, 1)]
                assert step.rows[0].sample
                assert step.truncate == (SequencePosition(sequence.id, num_tokens - 1),)
                assert step.open == ()
            serving.feed(late(step))
        assert sequence.num_generated == num_tokens - 3
        serving.finish()
    assert serving.state.counters["draws_put_off"] == 6
    serving.run_dry()
    assert sequence.reason == "length"
    assert sequence.num_generated == 3


def test_a_late_draw_of_one_that_has_left_is_forgotten(serving: Bench) -> None:
    """Cancelled meanwhile, or never heard of."""
    serving.say(submit())
    step = serving.pipe.popleft()
    serving.say(Cancel(request_id="r"))
    answer = late(step)
    serving.feed(StepFinished(msgspec.structs.replace(answer.done, late=(*answer.done.late, 99))))
    serving.run_dry()
    assert serving.state.counters.get("draws_put_off", 0) == 0
    assert "r" not in serving.state.requests


def test_messages_that_nobody_asked_for_are_counted(serving: Bench) -> None:
    """What a worker may say, but not in this way: parts of files come as an event of their own."""
    serving.take()
    message = AssetPart(name="tokenizer.json", offset=0, total=1, payload=pack_bytes(b"x"))
    assert serving.tell("w0", message) == []
    assert serving.state.counters["unexpected_control"] == 1


def test_a_worker_of_another_build_is_told(serving: Bench) -> None:
    """Its introduction came whole and has no meaning here: it would wait for an answer for ever. A member's life is not
    at stake for one such message, and a damaged one is nobody's build."""
    ((peer, denied),) = orders(serving.feed(MessageRefused("control", b"w9.1", "hello.speed: unknown field")))
    assert peer == "w9.1"
    assert isinstance(denied, Denied)
    assert denied.reason == (
        "the broker can't decode its message (hello.speed: unknown field): install the same version on both"
    )
    member = next(iter(serving.workers.values())).peer
    assert orders(serving.feed(MessageRefused("control", member, "stats.speed: unknown field"))) == []
    assert orders(serving.feed(MessageRefused("control", b"w9.1"))) == []


def test_an_unreachable_stranger(serving: Bench) -> None:
    """A connection that never asked for anything may go."""
    assert serving.feed(ClientUnreachable(b"nobody")) == []


@pytest.mark.parametrize("num_workers", [1, 3])
def test_the_same_events_give_the_same_actions(num_workers: int) -> None:
    """Nothing but the events and their times decides."""

    def play() -> list[Action]:
        bench = Bench()
        bench.serve(num_workers)
        for number in range(6):
            bench.say(submit(f"r{number}", num_prompt=1 + 20 * number, n=1 + number % 2))
            bench.finish()
        bench.lose("w0")
        bench.join("late")
        bench.tick(1.0)
        bench.run_dry()
        return bench.log

    assert play() == play()
