"""The client door: from submission to the end, and each token's way to the client."""

from __future__ import annotations

import pytest

from swarm.broker.actions import Action, NewTokens, SendToClient, WriteAcceptance, WriteEnd, WriteLog, WriteTokens
from swarm.broker.events import ClientBlocked, ClientUnreachable, StepFinished
from swarm.broker.requests.admission import MAX_RETRY_S, MIN_RETRY_NOT_SERVING_S
from swarm.broker.requests.durability import derive_seed
from swarm.broker.requests.requests import RETRY_BLOCKED_S
from swarm.broker.requests.tokens import MAX_TOKENS_PER_MESSAGE, WINDOW
from swarm.wire.messages import (
    Accepted,
    Ack,
    Attach,
    Cancel,
    Detach,
    Failure,
    Finished,
    Hop,
    LayerRange,
    Rejected,
    Stop,
    TokenLogprob,
    Tokens,
)
from tests.unit.broker.bench import (
    CLIENT,
    TICK_S,
    TOKEN,
    Bench,
    done_of,
    request_settings,
    said,
    settings,
    steps,
    submit,
)

OTHER = b"other"


def tokens_of(actions: list, client: bytes = CLIENT) -> list[tuple[int, tuple[int, ...]]]:
    """(start, ids) of what this client is sent."""
    return [
        (a.message.start, a.message.ids)
        for a in actions
        if isinstance(a, SendToClient) and a.client == client and isinstance(a.message, Tokens)
    ]


# --- acceptance ------------------------------------------------------------------------------------------------------


def test_accepted_only_after_the_journal_has_it(serving: Bench) -> None:
    """A request is written first; it is announced, and computed, only once the journal answers."""
    serving.held = {WriteAcceptance}
    request = submit()
    assert serving.say(request) == [WriteAcceptance(request, (1,), f"client {CLIENT.hex()}")]
    # Time passes, and nothing is said or computed.
    serving.tick(0.5)
    assert said(serving.take()) == []
    assert not serving.pipe
    # The journal answers.
    actions = serving.write_out()
    assert actions[0] == SendToClient(CLIENT, Accepted(request_id="r"))
    assert [s.rows[0].sequence for s in steps(actions)] == [1]


def test_unavailable_before_any_worker(bench: Bench) -> None:
    """Without a worker there is no model: the request is sent away with a time to come back, and nothing is kept."""
    (action,) = bench.say(submit())
    assert isinstance(action, SendToClient)
    assert isinstance(action.message, Rejected)
    assert (action.message.code, action.message.retry_after_s) == ("unavailable", 1.0)
    assert "none is here" in action.message.reason
    assert not bench.state.requests


def test_waits_for_a_plan_once_a_model_is_known(bench: Bench) -> None:
    """As soon as a worker has brought the model, requests are taken, and computed when the plan serves."""
    bench.mute = {"w0"}
    bench.join("w0")
    assert said(bench.say(submit())) == []
    assert said(bench.take()) == [Accepted(request_id="r")]
    # The worker answers Prepare and Activate now.
    bench.mute = set()
    bench.tick()
    assert [r.sequence for step in bench.pipe for r in step.rows] == [1]


def test_the_same_request_again_is_the_same_request(serving: Bench) -> None:
    """Resubmitting starts nothing: it is accepted again and gets all of its tokens again, from the first."""
    serving.say(submit())
    serving.finish()
    serving.finish()
    serving.take()
    actions = serving.say(submit(), OTHER)
    told, *actions = actions
    assert is_superseded(told, CLIENT)
    assert actions == [
        SendToClient(OTHER, Accepted(request_id="r")),
        SendToClient(OTHER, Tokens(request_id="r", index=0, start=0, ids=(TOKEN, TOKEN))),
    ]
    assert len(serving.state.sequences) == 1
    # What comes from now on goes to the newest connection alone.
    serving.finish()
    assert tokens_of(serving.log, OTHER)[-1] == (2, (TOKEN,))
    assert tokens_of(serving.log, CLIENT) == []


def test_resubmission_before_acceptance_moves_the_answer(serving: Bench) -> None:
    """A client that reconnects before the journal has answered is told on its new connection, once."""
    serving.held = {WriteAcceptance}
    serving.say(submit())
    (told,) = serving.say(submit(), OTHER)
    assert is_superseded(told, CLIENT)
    assert [a for a in serving.write_out() if isinstance(a, SendToClient)] == [
        SendToClient(OTHER, Accepted(request_id="r"))
    ]


def test_an_acceptance_is_that_of_its_own_request(serving: Bench) -> None:
    """Submitted, cancelled and submitted again before the journal answers: the first answer does not accept the second
    request, which is not in the journal yet."""
    serving.held = {WriteAcceptance}
    serving.say(submit())
    serving.say(Cancel(request_id="r"))
    serving.say(submit())
    serving.take()
    first, second = serving.pending
    serving.pending.clear()
    assert serving.feed(first) == []
    assert not serving.state.requests["r"].accepted
    serving.feed(second)
    assert said(serving.take()) == [Accepted(request_id="r")]
    serving.run_dry()
    assert serving.sequence().reason == "length"


def test_an_id_in_use_for_another_body_is_refused(serving: Bench) -> None:
    """An id that is in use for another body is refused, and the first request goes on untouched."""
    serving.say(submit())
    (answer,) = said(serving.say(submit(max_tokens=9), OTHER))
    assert isinstance(answer, Rejected)
    assert answer.code == "conflict"
    serving.finish()
    assert tokens_of(serving.log) == [(0, (TOKEN,))]


def test_overloaded_says_when_to_come_back(make_bench) -> None:
    """A full queue is an answer with a time to come back; room in it is room for new ones."""
    bench = make_bench(settings(requests=request_settings(max_queue=2)))
    bench.mute = {"w0"}
    bench.join("w0")
    bench.say(submit("a"))
    bench.say(submit("b"))
    (answer,) = said(bench.say(submit("c")))
    assert isinstance(answer, Rejected)
    assert answer.code == "overloaded"
    assert answer.retry_after_s is not None
    assert answer.retry_after_s >= 0.1
    assert "2 sequences are waiting" in answer.reason
    # One of them is withdrawn.
    bench.say(Cancel(request_id="a"))
    bench.take()
    bench.say(submit("c"))
    assert said(bench.take()) == [Accepted(request_id="c")]


def test_requests_that_the_journal_holds_up_count_against_the_queue(make_bench) -> None:
    """A disk that stands still must not let an unbounded number of requests in."""
    bench = make_bench(settings(requests=request_settings(max_queue=2))).serve(1)
    bench.held = {WriteAcceptance}
    bench.say(submit("a"))
    bench.say(submit("b"))
    (answer,) = said(bench.say(submit("c")))
    assert isinstance(answer, Rejected)
    assert answer.code == "overloaded"
    # The disk goes on: both enter the stages, and there is room again.
    bench.write_out()
    assert bench.say(submit("c")) == [WriteAcceptance(submit("c"), (3,), f"client {CLIENT.hex()}")]


def test_every_continuation_counts_against_the_queue(make_bench) -> None:
    """``n`` continuations take ``n`` places; more than the queue has can never be served, and no waiting helps."""
    bench = make_bench(settings(requests=request_settings(max_queue=4)))
    bench.mute = {"w0"}
    bench.join("w0")
    (answer,) = said(bench.say(submit("a", n=5)))
    assert isinstance(answer, Rejected)
    assert (answer.code, answer.retry_after_s) == ("invalid", None)
    assert "at most 3 sequences of one request may wait" in answer.reason
    bench.held = {WriteAcceptance}
    bench.say(submit("b", n=3))
    (answer,) = said(bench.say(submit("c", n=2)))
    assert isinstance(answer, Rejected)
    assert answer.code == "overloaded"
    bench.write_out()
    bench.say(submit("d"), OTHER)
    assert [s.request.id for s in bench.state.waiting] == ["b", "b", "b"]
    bench.write_out()
    assert len(bench.state.waiting) == 4


@pytest.mark.slow
def test_retry_after_follows_the_pace_of_ends(make_bench) -> None:
    """The time to come back is longer in a swarm that finishes rarely."""

    def retry_after(pause_s: float) -> float:
        bench = make_bench(settings(requests=request_settings(max_queue=1))).serve(1, max_sequences=1)
        for number in range(30):
            bench.say(submit(f"quick {number}", max_tokens=1))
            bench.tick(pause_s)
            bench.finish()
            bench.run_dry()
        bench.say(submit("runs"))
        bench.say(submit("waits"))
        (answer,) = said(bench.say(submit("too many")))
        assert isinstance(answer, Rejected)
        assert answer.retry_after_s is not None
        return answer.retry_after_s

    assert retry_after(TICK_S) < 0.5
    assert retry_after(3.0) > 2.0
    assert retry_after(50.0) == MAX_RETRY_S


def test_retry_after_is_a_time_of_ones_own(make_bench) -> None:
    """It follows from the measured rate and the work that waits, and not all are told the same moment."""

    def told(max_tokens: int) -> list[float]:
        bench = make_bench(settings(requests=request_settings(max_queue=4))).serve(1, max_sequences=1)
        bench.say(submit("measures", max_tokens=10, ignore_eos=True))
        while bench.pipe:
            bench.tick(0.5)
            bench.finish()
        bench.say(submit("runs", max_tokens=max_tokens))
        for number in range(4):
            bench.say(submit(f"waits {number}", max_tokens=max_tokens, tenant="ab"[number % 2]))
        answers = [said(bench.say(submit(f"too many {number}"), b"client %d" % number))[0] for number in range(3)]
        return [a.retry_after_s for a in answers if isinstance(a, Rejected) and a.retry_after_s is not None]

    # Half a second per step: about twelve tokens in five seconds.
    first, second, third = told(max_tokens=9)
    assert first == pytest.approx(12 * 5.5 / 12, rel=0.3)
    assert (second, third) == (pytest.approx(2 * first, abs=0.2), pytest.approx(3 * first, abs=0.2))
    assert told(max_tokens=90)[0] > 5 * first


def refused(bench: Bench, request_id: str, client: bytes = CLIENT, **fields: object) -> Rejected:
    """The one answer to a request that is not taken."""
    (answer,) = said(bench.say(submit(request_id, **fields), client))
    assert isinstance(answer, Rejected)
    return answer


def test_retry_after_is_not_moved_by_who_asks_all_the_time(make_bench) -> None:
    """One client's refusals, however many, cost the others one place in the order of coming back; and nobody is told
    more than the time in which the queue drains."""
    bench = make_bench(settings(requests=request_settings(max_queue=4))).serve(1, max_sequences=1)
    bench.say(submit("measures", max_tokens=10, ignore_eos=True))
    while bench.pipe:
        bench.tick(0.5)
        bench.finish()
    bench.say(submit("runs"))
    for number in range(4):
        bench.say(submit(f"waits {number}", tenant="ab"[number % 2]))
    first = refused(bench, "before", b"good").retry_after_s
    for number in range(1000):
        refused(bench, f"again {number}", b"evil")
    after = refused(bench, "after", b"other").retry_after_s
    assert first is not None
    assert after == pytest.approx(3 * first, abs=0.2)
    assert refused(bench, "still", b"good").retry_after_s == first
    last = [refused(bench, f"crowd {number}", b"crowd %d" % number).retry_after_s for number in range(50)][-1]
    assert last == pytest.approx(4 * first, abs=0.3)


def test_retry_after_is_long_while_nothing_serves(make_bench) -> None:
    """Without a worker the rate of earlier says nothing: seconds, not the tenth of one that a step took."""
    bench = make_bench(settings(requests=request_settings(max_queue=2))).serve(1)
    bench.say(submit("measures"))
    bench.run_dry()
    bench.lose("w0")
    bench.say(submit("a"))
    bench.say(submit("b"))
    assert refused(bench, "c").retry_after_s == MIN_RETRY_NOT_SERVING_S


def test_retry_after_is_the_patience_with_what_fits_nowhere(make_bench) -> None:
    """Sequences that the plan can't hold make no place before they are given up."""
    bench = make_bench(settings(requests=request_settings(max_queue=3, too_large_patience_s=30.0))).serve(1)
    bench.say(submit("measures"))
    bench.run_dry()
    bench.lose("w0")
    for number in range(3):
        bench.say(submit(f"large {number}", max_tokens=300))
    bench.join("w1", kv_capacity=64)
    bench.tick(1.0)
    assert len(bench.state.waiting.aside) == 3
    first = refused(bench, "x").retry_after_s
    assert first is not None
    assert 25.0 < first <= 30.0
    bench.tick(10.0)
    assert refused(bench, "y").retry_after_s == pytest.approx(first - 10.0, abs=0.5)


def test_a_full_queue_of_one_tenant_and_class_keeps_places(make_bench) -> None:
    """Low requests of one tenant fill the queue as far as they may; another tenant's and a higher class's still get in,
    and of those that were accepted none is lost."""
    bench = make_bench(settings(requests=request_settings(max_queue=20)))
    bench.mute = {"w0"}
    bench.join("w0")
    for number in range(15):
        assert said(bench.say(submit(f"crowd {number}", tenant="crowd", priority=-50))) == []
    answer = refused(bench, "crowd 15", tenant="crowd", priority=-50)
    assert (answer.code, answer.retry_after_s) == ("overloaded", MIN_RETRY_NOT_SERVING_S)
    assert "15 sequences of this tenant are waiting already, at most 15 may" in answer.reason
    for number in range(3):
        assert said(bench.say(submit(f"other {number}", tenant="other", priority=-50))) == []
    assert "at most 18 may; 2 more places are kept" in refused(bench, "other 3", tenant="other", priority=-50).reason
    assert said(bench.say(submit("normal", tenant="other"))) == []
    assert "at most 19 may; 1 more places are kept" in refused(bench, "normal 2", tenant="other").reason
    assert said(bench.say(submit("high", tenant="other", priority=50))) == []
    assert "at most 20 may" in refused(bench, "high 2", tenant="other", priority=50).reason
    bench.take()
    assert len(bench.state.waiting) == 20
    bench.mute = set()
    bench.tick()
    bench.run_dry()
    assert [m.reason for m in said(bench.log, Finished) if isinstance(m, Finished)] == ["length"] * 20


def test_unwritten_requests_count_for_their_tenant(make_bench) -> None:
    """A tenant's share is reckoned from what it submitted, not from what the disk got done."""
    bench = make_bench(settings(requests=request_settings(max_queue=4))).serve(1)
    bench.held = {WriteAcceptance}
    bench.say(submit("a", n=3))
    bench.say(Cancel(request_id="a"))
    assert "of this tenant" in refused(bench, "b").reason
    bench.write_out()
    assert bench.say(submit("b", n=3)) == [WriteAcceptance(submit("b", n=3), (4, 5, 6), f"client {CLIENT.hex()}")]


def test_without_a_token_there_is_no_time_of_the_first(make_bench) -> None:
    """A request that ends before its first token has waited for it in vain: 0, not the time of its end."""
    bench = make_bench()
    bench.mute = {"w0"}
    bench.join("w0")
    bench.say(submit(deadline_s=1.0))
    bench.tick(2.0)
    (end,) = said(bench.log, Finished)
    assert isinstance(end, Finished)
    assert (end.num_tokens, end.timing.first_token_s) == (0, 0.0)
    assert end.timing.queued_s == end.timing.total_s > 0.9


def test_too_large_for_the_stages(make_bench) -> None:
    """A request that even the empty stages can't hold is refused at the door, with both numbers."""
    bench = make_bench().serve(2, kv_capacity=64)
    (answer,) = said(bench.say(submit(num_prompt=40, max_tokens=25)))
    assert isinstance(answer, Rejected)
    assert answer.code == "too_large"
    assert "make 65 positions, the stages hold 64" in answer.reason
    # One position less fits.
    assert said(bench.say(submit(num_prompt=40, max_tokens=24))) == []


# --- tokens ----------------------------------------------------------------------------------------------------------


def test_a_token_is_shown_once_it_is_written_and_dispatch_does_not_wait(serving: Bench) -> None:
    """The next step goes out at once with the new token; the client sees it only after the journal has it."""
    serving.say(submit())
    serving.held = {WriteTokens}
    actions = serving.finish()
    # 3 prompt tokens, so the drawn one stands at position 3.
    assert actions[0] == WriteTokens((NewTokens(1, 3, 0, (TOKEN,)),))
    (step,) = steps(actions)
    assert [(r.start, r.count, r.sample) for r in step.rows] == [(3, 1, True)]
    assert said(serving.take(), Tokens) == []
    assert serving.write_out() == [SendToClient(CLIENT, Tokens(request_id="r", index=0, start=0, ids=(TOKEN,)))]


def test_an_ended_request_still_waits_for_its_last_token(serving: Bench) -> None:
    """The end comes after the last token, and so after the journal has that."""
    serving.say(submit(max_tokens=1))
    serving.held = {WriteTokens}
    serving.take()
    serving.finish()
    assert said(serving.take()) == []
    serving.write_out()
    first, last = said(serving.take())
    assert first == Tokens(request_id="r", index=0, start=0, ids=(TOKEN,))
    assert isinstance(last, Finished)
    assert (last.reason, last.num_prompt, last.num_tokens) == ("length", 3, 1)


def test_logprobs_and_hops_only_when_asked(serving: Bench) -> None:
    """Who doesn't ask for them gets neither; who does gets one entry per token."""
    hop = Hop("w0", LayerRange(0, 3), 0.0, 0.1, 0.0, 0.0, 0)
    serving.say(submit("plain"))
    serving.say(submit("rich", logprobs=0, hops=True))
    while serving.pipe:
        serving.finish(hops=(hop,))
    plain = [m for m in said(serving.log, Tokens) if m.request_id == "plain"]
    rich = [m for m in said(serving.log, Tokens) if m.request_id == "rich"]
    assert all(m.logprobs == () and m.hops == () for m in plain)
    assert all(m.logprobs == ((TokenLogprob(TOKEN, -0.5),),) * len(m.ids) for m in rich)
    assert all(m.hops == ((hop,),) * len(m.ids) for m in rich)
    assert len(plain) == len(rich) == 8


def test_window_stops_and_an_ack_opens_it(make_bench) -> None:
    """At most 256 tokens are on their way unacknowledged; the sequence itself is not held up by its reader."""
    bench = make_bench().serve(1)
    bench.say(submit(max_tokens=300, ignore_eos=True))
    bench.run_dry()
    # All 300 tokens exist; the reader has got the first 256 of them and no end.
    assert sum(len(ids) for _, ids in tokens_of(bench.log)) == WINDOW
    assert said(bench.log, Finished) == []
    bench.take()
    # 10 are acknowledged: exactly 10 more come.
    assert tokens_of(bench.say(Ack(request_id="r", index=0, next_index=10))) == [(WINDOW, (TOKEN,) * 10)]
    # The same acknowledgement again opens nothing, nor does an older one.
    assert bench.say(Ack(request_id="r", index=0, next_index=10)) == []
    assert bench.say(Ack(request_id="r", index=0, next_index=3)) == []
    # All that came is acknowledged: the rest comes, and the end.
    *_, end = said(bench.say(Ack(request_id="r", index=0, next_index=266)))
    assert isinstance(end, Finished)
    assert (end.reason, end.num_tokens) == ("length", 300)


def test_an_ack_beyond_what_was_sent_counts_for_what_was_sent(make_bench) -> None:
    """A client that acknowledges the future gains nothing."""
    bench = make_bench().serve(1)
    bench.say(submit())
    bench.finish()
    bench.say(Ack(request_id="r", index=0, next_index=1000))
    assert bench.sequence().delivered == 4


def test_a_message_carries_a_bounded_number_of_tokens(make_bench) -> None:
    """After an Attach the backlog comes in messages of at most 128 tokens."""
    bench = make_bench().serve(1)
    bench.say(submit(max_tokens=200, ignore_eos=True))
    bench.feed(ClientUnreachable(CLIENT))
    bench.run_dry()
    bench.take()
    actions = bench.say(Attach(request_id="r", next_index=(0,)))
    assert [len(ids) for _, ids in tokens_of(actions)] == [MAX_TOKENS_PER_MESSAGE, 200 - MAX_TOKENS_PER_MESSAGE]


# --- attaching -------------------------------------------------------------------------------------------------------


def test_attach_continues_and_sends_the_end_again(serving: Bench) -> None:
    """Attach says what the client has; it gets what follows, and the end again though that was sent before."""
    serving.say(submit(max_tokens=4))
    serving.run_dry()
    serving.take()
    told, *_ = actions = serving.say(Attach(request_id="r", next_index=(1,)), OTHER)
    assert is_superseded(told, CLIENT)
    _, tokens, end = said(actions)
    assert tokens == Tokens(request_id="r", index=0, start=1, ids=(TOKEN,) * 3)
    assert isinstance(end, Finished)
    # With everything in hand, only the end is sent.
    (end,) = said(serving.say(Attach(request_id="r", next_index=(4,)), OTHER))
    assert isinstance(end, Finished)


def test_one_reader_at_a_time(serving: Bench) -> None:
    """Who attaches is the reader, and the one before is told. What that one says afterwards counts no more: not
    what it acknowledges, nor that it would go on reading. When the present reader has gone, it may."""
    serving.say(submit(max_tokens=6, ignore_eos=True))
    serving.finish()
    serving.finish()
    (told, news) = serving.say(Attach(request_id="r", next_index=(0,)), OTHER)
    assert is_superseded(told, CLIENT)
    assert news == SendToClient(OTHER, Tokens(request_id="r", index=0, start=0, ids=(TOKEN, TOKEN)))
    assert serving.say(Ack(request_id="r", index=0, next_index=2)) == []
    assert serving.sequence().delivered == 3
    (told,) = serving.say(Attach(request_id="r", next_index=(2,), again=True))
    assert is_superseded(told, CLIENT)
    serving.say(Attach(request_id="r", next_index=(2,), again=True), OTHER)
    assert serving.sequence().delivered == 5
    serving.say(Detach(request_id="r"), OTHER)
    assert said(serving.say(Attach(request_id="r", next_index=(1,), again=True))) == [
        Tokens(request_id="r", index=0, start=1, ids=(TOKEN,))
    ]


def test_another_has_read_everything(serving: Bench) -> None:
    """Without a journal, the request waits for who submitted it, who may not have heard of the other."""
    serving.say(submit(max_tokens=2))
    serving.run_dry()
    serving.say(Attach(request_id="r", next_index=(0,)), OTHER)
    serving.say(Ack(request_id="r", index=0, next_index=2), OTHER)
    assert "r" in serving.state.requests
    serving.feed(ClientUnreachable(OTHER))
    *_, end = said(serving.say(Attach(request_id="r", next_index=(0,), again=True)))
    assert isinstance(end, Finished)
    serving.say(Ack(request_id="r", index=0, next_index=2))
    assert not serving.state.requests


def is_superseded(action: Action, client: bytes) -> bool:
    """Is this client told that another one reads the request now?"""
    return (
        isinstance(action, SendToClient)
        and action.client == client
        and isinstance(action.message, Rejected)
        and (action.message.code, action.message.retry_after_s) == ("superseded", None)
    )


def test_attach_backwards_starts_a_window_of_its_own(make_bench) -> None:
    """A new reader that has nothing gets everything from the start, and no more than a window at a time, however much
    the reader before it had acknowledged."""
    bench = make_bench().serve(1)
    bench.say(submit(max_tokens=400, ignore_eos=True))
    bench.run_dry()
    bench.say(Ack(request_id="r", index=0, next_index=256))
    bench.take()
    actions = bench.say(Attach(request_id="r", next_index=(0,)), OTHER)
    assert tokens_of(actions, OTHER)[0][0] == 0
    assert sum(len(ids) for _, ids in tokens_of(actions, OTHER)) == WINDOW


def test_attach_to_an_unknown_request(serving: Bench) -> None:
    """Neither a request nobody made nor a wrong number of continuations is guessed at."""
    serving.say(submit())
    for attach in (Attach(request_id="x", next_index=(0,)), Attach(request_id="r", next_index=(0, 0))):
        (answer,) = said(serving.say(attach, OTHER))
        assert isinstance(answer, Rejected)
        assert answer.code == "unknown"


def test_attach_beyond_what_exists_waits_there(serving: Bench) -> None:
    """An index in the future is taken as what there is."""
    serving.say(submit())
    serving.finish()
    serving.take()
    assert serving.say(Attach(request_id="r", next_index=(50,))) == []
    serving.finish()
    assert tokens_of(serving.log) == [(1, (TOKEN,))]


# --- ends ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "token", "reason", "num_tokens"),
    [
        ({"max_tokens": 2}, TOKEN, "length", 2),
        ({}, 0, "stop", 1),  # 0 is the model's end of sequence
        ({"ignore_eos": True, "max_tokens": 3}, 0, "length", 3),
        ({"stop_token_ids": (9,)}, 9, "stop", 1),
        ({"stop_token_ids": (9,), "ignore_eos": True}, 9, "stop", 1),
        ({"max_tokens": 1000, "num_prompt": 510}, TOKEN, "length", 2),  # the context holds 512
    ],
)
def test_a_continuation_ends_where_its_params_say(
    serving: Bench, params: dict, token: int, reason: str, num_tokens: int
) -> None:
    """Where a continuation ends and what its end is called."""
    serving.say(submit(**params))
    while serving.pipe:
        serving.finish(token=token)
    (end,) = said(serving.log, Finished)
    assert isinstance(end, Finished)
    assert (end.reason, end.num_tokens, end.detail) == (reason, num_tokens, "")


def test_an_end_is_journalled_and_told_in_one_line(serving: Bench) -> None:
    """The journal hears of the end, the log gets one summary, and the room goes back with the next step."""
    serving.say(submit(max_tokens=1))
    serving.log.clear()
    actions = serving.finish()
    assert actions[:2] == [WriteTokens((NewTokens(1, 3, 0, (TOKEN,)),)), WriteEnd(1, "length", 1)]
    assert [a.event for a in actions if isinstance(a, WriteLog)] == ["request_ended"]
    assert [s.release for s in steps(actions)] == [(1,)]


def test_a_stop_string_cuts_where_the_client_found_it(serving: Bench) -> None:
    """A stop string ends the continuation at the index that the client names, not where the swarm has got to."""
    serving.say(submit())
    for _ in range(4):
        serving.finish()
    serving.take()
    actions = serving.say(Stop(request_id="r", index=0, at_index=2))
    (end,) = said(actions)
    assert isinstance(end, Finished)
    assert (end.reason, end.num_tokens) == ("stop", 2)
    assert WriteEnd(1, "stop", 2) in actions
    # The step that is still under way brings a token for an ended sequence: it is counted and dropped.
    serving.take()
    serving.finish()
    assert said(serving.take()) == []
    assert serving.state.counters["late_tokens"] == 1


def test_stop_of_the_past_is_counted(serving: Bench) -> None:
    """Terminal states win: a Stop for what has ended changes nothing."""
    serving.say(submit(max_tokens=2))
    serving.run_dry()
    serving.take()
    assert serving.say(Stop(request_id="r", index=0, at_index=1)) == []
    assert serving.state.counters["late_stops"] == 1
    assert serving.sequence().num_generated == 2


def test_stop_beyond_what_is_known_waits_for_it(serving: Bench) -> None:
    """The client has seen tokens that the journal lost in a power cut: they are drawn again, then the answer is what
    the client found it to be."""
    serving.say(submit())
    serving.finish()
    serving.take()
    assert said(serving.say(Stop(request_id="r", index=0, at_index=3)), Finished) == []
    assert serving.sequence().num_generated == 1
    serving.run_dry()
    assert (serving.sequence().reason, serving.sequence().num_generated) == ("stop", 3)


def test_cancel_by_the_reader_ends_and_forgets(serving: Bench) -> None:
    """Who cancels its own request is told of every end, and nothing is kept for it."""
    serving.say(submit(n=2))
    serving.finish()
    serving.take()
    ends = said(serving.say(Cancel(request_id="r")), Finished)
    assert [(m.index, m.reason) for m in ends] == [(0, "cancelled"), (1, "cancelled")]
    assert not serving.state.requests
    assert not serving.state.sequences
    # The stages are told to let go, and a late result finds nobody.
    serving.finish()
    serving.run_dry()
    assert [s.release for s in steps(serving.log)] == [(1, 2)]
    assert serving.state.counters["late_tokens"] >= 1


def test_cancel_by_another_keeps_the_end_for_the_reader(serving: Bench) -> None:
    """Somebody else's cancel ends the request; its reader is told, and may ask again."""
    serving.say(submit())
    serving.take()
    actions = serving.say(Cancel(request_id="r"), OTHER)
    assert [(a.client, a.message.reason) for a in actions if isinstance(a, SendToClient)] == [(CLIENT, "cancelled")]
    (end,) = said(serving.say(Attach(request_id="r", next_index=(0,))))
    assert isinstance(end, Finished)


def test_cancel_before_acceptance(serving: Bench) -> None:
    """A request that is cancelled before the journal has it never reaches a stage, and its late answer harms nobody."""
    serving.held = {WriteAcceptance}
    serving.say(submit())
    serving.say(Cancel(request_id="r"))
    serving.write_out()
    serving.tick()
    assert steps(serving.take()) == []
    assert not serving.state.waiting


def test_unknown_ids_are_counted(serving: Bench) -> None:
    """Ack, Stop and Cancel for nobody are counted and answered by nothing."""
    serving.say(submit())
    serving.take()
    assert serving.say(Ack(request_id="x", index=0, next_index=1)) == []
    assert serving.say(Ack(request_id="r", index=1, next_index=1)) == []
    assert serving.say(Stop(request_id="x", index=0, at_index=1)) == []
    assert serving.say(Cancel(request_id="x")) == []
    assert serving.state.counters["unknown_requests"] == 4


def test_a_failure_names_its_reason(serving: Bench) -> None:
    """A sequence that the last stage can't sample fails alone, with the stage's words."""
    serving.say(submit("bad"))
    serving.say(submit("good"))
    bad = serving.sequence("bad").id
    while serving.pipe:
        step = serving.pipe[0]
        has_bad = any(r.sequence == bad and r.sample for r in step.rows)
        serving.finish(failed=[Failure(bad, "its logits are not finite")] if has_bad else [])
    ends = {m.request_id: m for m in said(serving.log, Finished)}
    assert (ends["bad"].reason, ends["bad"].detail) == ("failed", "its logits are not finite")
    assert ends["good"].reason == "length"


def test_misplaced_tokens_are_dropped(serving: Bench) -> None:
    """A token for another position than the next one is counted, never appended."""
    serving.say(submit())
    step = serving.pipe.popleft()
    done = done_of(step, TOKEN, {}, set(), ())
    wrong = [type(s)(s.sequence, s.position + 1, s.token, s.logprobs) for s in done.sampled]
    serving.feed(
        StepFinished(type(done)(epoch=done.epoch, step=done.step, kv=done.kv, sampled=tuple(wrong), failed=(), hops=()))
    )
    assert serving.sequence().num_generated == 0
    assert serving.state.counters["misplaced_tokens"] == 1


# --- time ------------------------------------------------------------------------------------------------------------


def test_what_misses_its_deadline_fails_then(serving: Bench) -> None:
    """A request that is not finished by its deadline fails then, with that reason."""
    serving.say(submit(deadline_s=1.0))
    serving.tick(0.9)
    assert said(serving.log, Finished) == []
    serving.tick(0.2)
    (end,) = said(serving.log, Finished)
    assert isinstance(end, Finished)
    assert (end.reason, end.timing.total_s) == ("failed", pytest.approx(1.0, abs=1.5 * TICK_S))
    assert "deadline" in end.detail


def test_a_client_that_stays_away_is_cancelled_after_the_grace(make_bench) -> None:
    """Its request runs on for the grace; then it ends as cancelled."""
    bench = make_bench(settings(requests=request_settings(client_grace_s=2.0))).serve(1)
    bench.say(submit())
    bench.feed(ClientUnreachable(CLIENT))
    bench.tick(1.9)
    assert bench.sequence().reason is None
    bench.tick(0.2)
    assert bench.sequence().reason == "cancelled"
    # It comes back later still: what there is, and the end.
    *_, end = said(bench.say(Attach(request_id="r", next_index=(0,))))
    assert isinstance(end, Finished)
    assert "did not come back" in end.detail


def test_a_client_that_comes_back_within_the_grace_goes_on(make_bench) -> None:
    """Attach stops the clock for good."""
    bench = make_bench(settings(requests=request_settings(client_grace_s=2.0))).serve(1)
    bench.say(submit())
    bench.feed(ClientUnreachable(CLIENT))
    bench.finish()
    assert tokens_of(bench.log) == []  # nobody is there to be told
    bench.tick(1.5)
    assert tokens_of(bench.say(Attach(request_id="r", next_index=(0,)), OTHER), OTHER) == [(0, (TOKEN,))]
    bench.tick(3.0)
    assert bench.sequence().reason is None


def test_a_client_that_does_not_read_is_not_away(make_bench) -> None:
    """Its queue is full: nothing more is sent, and its request runs on, however long that takes. With its first word it
    gets all that it has not acknowledged, and the end."""
    bench = make_bench(settings(requests=request_settings(client_grace_s=2.0))).serve(1)
    bench.say(submit(max_tokens=6, ignore_eos=True))
    bench.finish()
    bench.finish()
    bench.feed(ClientBlocked(CLIENT))
    for _ in range(30):  # it is tried again every so often, and still does not read
        bench.tick(1.0)
        bench.feed(ClientBlocked(CLIENT))
    bench.take()
    bench.finish()
    bench.run_dry()
    assert said(bench.log) == []
    assert bench.sequence().reason == "length"
    *tokens, end = said(bench.say(Ack(request_id="r", index=0, next_index=1)))
    assert tokens == [Tokens(request_id="r", index=0, start=1, ids=(TOKEN,) * 5)]
    assert isinstance(end, Finished)


def test_a_client_that_reads_again_and_has_nothing_to_say(make_bench) -> None:
    """It acknowledges only every so many tokens: what found no room in its queue is sent without a word of it, of all
    its requests, soon, once."""
    bench = make_bench(settings(requests=request_settings(client_grace_s=2.0))).serve(1)
    for name in ("r", "s"):
        bench.say(submit(name, max_tokens=3, ignore_eos=True))
    bench.finish()
    bench.feed(ClientBlocked(CLIENT))
    bench.take()
    bench.run_dry()
    assert said(bench.log) == []
    bench.tick(RETRY_BLOCKED_S)
    told = said(bench.log)
    assert {(m.request_id, m.start, m.ids) for m in told if isinstance(m, Tokens)} == {
        ("r", 0, (TOKEN,) * 3),
        ("s", 0, (TOKEN,) * 3),
    }
    assert sorted(m.request_id for m in told if isinstance(m, Finished)) == ["r", "s"]
    bench.take()
    bench.tick(RETRY_BLOCKED_S)
    assert said(bench.log) == []


def test_a_client_that_does_not_read_and_goes(make_bench) -> None:
    """Once its connection breaks it has the grace, like others. Its Cancel, or an Attach, is a word like any other."""
    bench = make_bench(settings(requests=request_settings(client_grace_s=2.0))).serve(1)
    for name in ("r", "s", "t"):
        bench.say(submit(name))
    bench.feed(ClientBlocked(CLIENT))
    assert isinstance(said(bench.say(Cancel(request_id="s")))[-1], Finished)
    assert said(bench.say(Attach(request_id="t", next_index=(0,)))) == []
    bench.take()
    bench.finish()
    bench.finish()
    assert {m.request_id for m in said(bench.log, Tokens)} == {"t"}
    bench.feed(ClientUnreachable(CLIENT))
    bench.tick(2.5)
    assert bench.sequence().reason == "cancelled"


def test_an_ended_request_is_kept_for_a_while(make_bench) -> None:
    """An ended request is kept for its reader for a while, and forgotten then, even if nobody ever asked."""
    bench = make_bench(settings(requests=request_settings(retain_s=5.0))).serve(1)
    bench.say(submit(max_tokens=1))
    bench.run_dry()
    bench.tick(4.8)
    assert "r" in bench.state.requests
    bench.tick(0.4)
    assert not bench.state.requests
    assert not bench.state.sequences


def test_forgotten_as_soon_as_everything_is_acknowledged(serving: Bench) -> None:
    """Once the reader has acknowledged all tokens of an ended request, nothing of it is kept."""
    serving.say(submit(max_tokens=2))
    serving.run_dry()
    serving.say(Ack(request_id="r", index=0, next_index=1))
    assert "r" in serving.state.requests
    serving.say(Ack(request_id="r", index=0, next_index=2))
    assert not serving.state.requests


def test_retention_does_not_break_a_slow_journal(make_bench) -> None:
    """A request that ended and was forgotten before the journal confirmed it stays forgotten."""
    bench = make_bench(settings(requests=request_settings(retain_s=1.0))).serve(1)
    bench.held = {WriteAcceptance}
    bench.say(submit(deadline_s=0.5))
    bench.tick(2.0)
    assert not bench.state.requests
    assert bench.write_out() == []


# --- several continuations -------------------------------------------------------------------------------------------


def test_continuations_get_seeds_of_their_own(serving: Bench) -> None:
    """The first draws as if it were alone, each other with a seed that follows from the request's."""
    serving.say(submit(n=3, seed=11))
    opened = {o.sequence: o.seed for s in serving.pipe for o in s.open}
    assert opened == {1: 11, 2: derive_seed(11, 1), 3: derive_seed(11, 2)}
    # A journal may be of a version before this one: what continues must draw what began.
    assert (derive_seed(11, 1), derive_seed(11, 2)) == (2177342782468422688, 4354685564936845365)
    assert len(set(opened.values())) == 3


def test_each_continuation_has_its_own_stream_and_end(serving: Bench) -> None:
    """One continuation's end neither ends nor disturbs another."""
    serving.say(submit(n=2, max_tokens=3))
    ids = [s.id for s in serving.state.requests["r"].sequences]
    while serving.pipe:
        serving.finish(tokens={ids[0]: 0, ids[1]: 5})
    ends = [(m.index, m.reason, m.num_tokens) for m in said(serving.log, Finished)]
    assert sorted(ends) == [(0, "stop", 1), (1, "length", 3)]
    assert [m.ids for m in said(serving.log, Tokens) if m.index == 1] == [(5,), (5,), (5,)]
