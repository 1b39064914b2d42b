"""Who joins the next step, and what the step says."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from swarm.broker.actions import WriteTokens
from swarm.broker.events import ClientUnreachable
from swarm.broker.reports import scheduling as scheduling_report
from swarm.broker.state import SequenceState
from swarm.broker.state.costs import CHUNK
from swarm.broker.steps.scheduler import (
    MAX_OPEN_BYTES,
    MAX_OVERTAKEN_S,
    MAX_OVERTAKES,
    MIN_DECODES_TO_SPLIT,
    MIN_PROMPT_SHARE,
    Mode,
    SchedulerSettings,
    max_steps_in_flight,
)
from swarm.params import MAX_GRAMMAR, Grammar
from swarm.wire.messages import Ack, Attach, Cancel, Finished, SequencePosition, Step, Stop
from tests.unit.broker.bench import (
    CLIENT,
    Bench,
    request_settings,
    row,
    said,
    scheduling,
    settings,
    steps,
    submit,
)


def test_one_request_step_by_step(make_bench) -> None:
    """The prompt goes in one chunk, then each token goes back in as soon as it is known; the sequence is opened once,
    with everything that the stages must know of it."""
    bench = make_bench().serve(1)
    request = submit(max_tokens=3, seed=5)
    bench.say(request)
    # The prompt: positions 0, 1, 2; a token is drawn after the last.
    first = bench.pipe.popleft()
    (opened,) = first.open
    assert (opened.sequence, opened.seed, opened.num_prompt, opened.limit) == (1, 5, 3, 6)
    assert opened.tokens == request.prompt == first.tokens
    assert row(first) == [(1, 0, 3)]
    assert first.rows[0].sample
    # The token 40 is drawn and is the next step's only position.
    (second,) = steps(bench.finish(first, token=40))
    assert (row(second), second.tokens, second.open, second.truncate) == ([(1, 3, 1)], (40,), (), ())
    (third,) = steps(bench.finish(token=41))
    assert (row(third), third.tokens) == ([(1, 4, 1)], (41,))
    # The third token is the last: the only thing left to do is to give the room back.
    (release,) = steps(bench.finish(token=42))
    assert (release.rows, release.tokens, release.release) == ((), (), (1,))
    assert steps(bench.finish()) == []


def test_joining_and_leaving_while_others_run(make_bench) -> None:
    """A newcomer's prompt travels beside the decodes of those that run; who ends leaves at the next step."""
    bench = make_bench().serve(1)
    bench.say(submit("a", max_tokens=3))
    # While a's prompt is computed, b arrives: it joins the very next step.
    bench.say(submit("b", max_tokens=2))
    (step,) = steps(bench.finish())
    assert row(step) == [(1, 3, 1), (2, 0, 3)]
    (step,) = steps(bench.finish())
    assert row(step) == [(1, 4, 1), (2, 3, 1)]
    # Both end together; c comes in with the step that lets them go.
    bench.say(submit("c"))
    (step,) = steps(bench.finish())
    assert (row(step), step.release) == ([(3, 0, 3)], (1, 2))


def test_long_grammars_are_told_over_several_steps(make_bench) -> None:
    """Each sequence brings its own copy, and a header has a limit: as many come in with a step as surely fit, and
    everybody comes."""
    bench = make_bench().serve(1)
    grammar = Grammar("ebnf", "start: /" + "x" * (MAX_GRAMMAR - 9) + "/")
    bench.say(submit("first"))  # whose step is under way while the others come
    for name in "abcdefghij":
        bench.say(submit(name, grammar=grammar))
    opened = []
    for _ in range(5):
        (step,) = steps(bench.finish())
        opened.append(len(step.open))
        assert sum(len(msgspec.msgpack.encode(item)) for item in step.open) < MAX_OPEN_BYTES
    assert sum(opened) == 10
    assert max(opened) == MAX_OPEN_BYTES // (4 * MAX_GRAMMAR + 15)
    assert [item for item in opened if item] == [3, 3, 3, 1]


def test_a_release_travels_alone_if_nothing_else_is_due(make_bench) -> None:
    """Room goes back at once, even when nobody is there to use it; and it travels only once."""
    bench = make_bench().serve(1)
    bench.say(submit())
    # Depth is one: the release must wait for the step under way.
    assert steps(bench.say(Cancel(request_id="r"))) == []
    (step,) = steps(bench.finish())
    assert (step.rows, step.open, step.release) == ((), (), (1,))
    # Nothing more is due, then and later.
    assert steps(bench.finish()) == []
    assert steps(bench.tick(1.0)) == []


def test_prefill_in_chunks_within_the_budget(make_bench) -> None:
    """A prompt goes in chunks of at most ``prefill_chunk``; only its last chunk draws a token."""
    bench = make_bench(scheduling(mode="batch", prefill_chunk=4, step_tokens=6)).serve(1)
    bench.say(submit("a", num_prompt=10))
    bench.say(submit("b", num_prompt=5))
    seen = []
    for _ in range(5):
        step = bench.pipe[0]
        seen.append([(r.sequence, r.start, r.count, r.sample) for r in step.rows])
        bench.finish()
    # The first step left before b came. Then a comes first, and b gets what the budget of 6 leaves.
    assert seen == [
        [(1, 0, 4, False)],
        [(1, 4, 4, False), (2, 0, 2, False)],
        [(1, 8, 2, True), (2, 2, 3, True)],
        [(1, 10, 1, True), (2, 5, 1, True)],
        [(1, 11, 1, True), (2, 6, 1, True)],
    ]


def test_decodes_come_before_prefill(make_bench) -> None:
    """However long the prompts that wait, whoever is decoding takes its turn first, and prefill takes the rest."""
    bench = make_bench(scheduling(mode="batch", step_tokens=8)).serve(1)
    bench.say(submit("a"))
    bench.say(submit("b"))
    bench.finish()
    bench.finish()
    bench.say(submit("long", num_prompt=100))
    bench.finish()
    for start in (0, 6, 12):
        assert row(bench.pipe[0]) == [(1, 5 + start // 6, 1), (2, 4 + start // 6, 1), (3, start, 6)]
        bench.finish()


@pytest.mark.parametrize(("step_tokens", "num_workers"), [(1, 1), (2, 1), (4, 1), (8, 1), (4, 3)])
def test_many_decodes_do_not_starve_a_prompt(make_bench, step_tokens: int, num_workers: int) -> None:
    """Where those that decode could fill every step for ever, a prompt still comes to its first token, and they still
    go on."""
    bench = make_bench(scheduling(mode="overlapped", step_tokens=step_tokens)).serve(num_workers)
    for number in range(12):
        bench.say(submit(f"r{number}", num_prompt=1, max_tokens=200, ignore_eos=True))
    for _ in range(100):
        bench.finish()
    bench.say(submit("late", num_prompt=20, max_tokens=200, ignore_eos=True))
    before = {s.id: s.num_generated for s in bench.state.running}
    for _ in range(150):
        bench.finish()
    assert bench.sequence("late").num_generated > 0
    gained = [s.num_generated - before[s.id] for s in bench.state.running if s.id in before]
    assert min(gained) > 0
    assert max(gained) - min(gained) <= 1, gained


def test_prompts_are_shared_out_over_the_pipe(make_bench) -> None:
    """What is pending is cut so that each stage has a part of it; small prompts are not cut up."""
    bench = make_bench(scheduling(mode="overlapped", prefill_chunk=512)).serve(2)
    bench.say(submit("long", num_prompt=400))
    assert [row(s) for s in bench.pipe] == [[(1, 0, 200)], [(1, 200, 100)]]
    assert bench.state.decision.throttle == "pending"
    bench = make_bench(scheduling(mode="overlapped", prefill_chunk=512)).serve(2)
    bench.say(submit("short", num_prompt=MIN_PROMPT_SHARE))
    assert [row(s) for s in bench.pipe] == [[(1, 0, MIN_PROMPT_SHARE)]]
    assert bench.state.decision.throttle == "none"


def test_prompts_are_held_back_while_room_is_short(make_bench) -> None:
    """As long as answers run: they shall come to their end before more join. If nobody runs, nothing is held back."""
    bench = make_bench(scheduling(mode="batch", prefill_chunk=512, kv_headroom=1 << 16)).serve(1, kv_capacity=1024)
    bench.say(submit("runs", num_prompt=3, max_tokens=500, ignore_eos=True))
    bench.finish()
    bench.say(submit("long", num_prompt=400, max_tokens=50, ignore_eos=True))
    bench.finish()
    # 63 positions are free of 1024: a chunk is all that joins.
    assert [r.count for r in bench.pipe[0].rows] == [1, CHUNK]
    assert bench.state.decision.throttle == "kv"
    bench.say(Cancel(request_id="runs"))
    bench.finish()
    assert row(bench.pipe[0]) == [(2, CHUNK, 400 - CHUNK)]


def test_prompts_keep_the_pace_of_running_answers(make_bench) -> None:
    """With a target, a step takes as much of the prompts as the measured time of steps allows. Nobody decodes: all."""
    bench = make_bench(scheduling(mode="batch", prefill_chunk=512, step_target_s=0.1)).serve(1)

    def finish() -> Step:
        step = bench.pipe[0]
        bench.now += 0.01 + 0.001 * len(step.tokens)  # what this device takes
        bench.finish()
        return step

    bench.say(submit("prompt first", num_prompt=200, max_tokens=100, ignore_eos=True))
    assert len(finish().tokens) == 200
    for _ in range(5):
        finish()
    bench.say(submit("prompt beside", prompt=(5,) * 300))
    finish()
    sizes, throttles = [], set()
    while bench.sequence("prompt beside").num_generated == 0:
        throttles.add(bench.state.decision.throttle)
        sizes.append(len(finish().tokens))
    assert CHUNK <= max(sizes) <= 95
    assert len(sizes) > 3
    assert "time" in throttles


def test_a_deadline_that_can_not_be_kept_is_told_at_once(make_bench) -> None:
    """If not even the quickest steps would do, nothing is computed; what may end early is given its chance."""
    bench = make_bench(scheduling(mode="batch")).serve(1)
    bench.say(submit("measures", max_tokens=4))
    while bench.pipe:
        bench.tick(1.0)
        bench.finish()
    bench.take()
    bench.say(submit("hopeless", max_tokens=100, ignore_eos=True, deadline_s=20.0))
    bench.say(submit("may end", max_tokens=100, deadline_s=20.0))
    bench.say(submit("has time", max_tokens=10, ignore_eos=True, deadline_s=20.0))
    (end,) = said(bench.log, Finished)
    assert isinstance(end, Finished)
    assert (end.request_id, end.reason, end.num_tokens) == ("hopeless", "failed", 0)
    assert "deadline can't be kept" in end.detail
    opened = {o.sequence for s in [*steps(bench.log), *bench.pipe] for o in s.open}
    assert bench.sequence("hopeless").id not in opened
    bench.finish()
    assert {s.request.id for s in bench.state.running} == {"may end", "has time"}


def test_the_earliest_deadline_comes_first(make_bench) -> None:
    """Of one tenant, in one class, where there is a place for one."""
    bench = make_bench(scheduling(mode="batch", max_running=1)).serve(1)
    bench.say(submit("runs", max_tokens=1))
    bench.say(submit("whenever", max_tokens=1))
    bench.say(submit("late", max_tokens=1, deadline_s=60.0))
    bench.say(submit("soon", max_tokens=1, deadline_s=30.0))
    bench.say(submit("urgent", max_tokens=1, priority=50))
    bench.run_dry()
    order = [m.request_id for m in said(bench.log, Finished) if isinstance(m, Finished)]
    assert order == ["runs", "urgent", "soon", "late", "whenever"]


def test_a_crowd_does_not_starve_a_single_client(make_bench) -> None:
    """One client has fifty requests waiting; another's one is served long before them, named or not."""
    for first, second in ((("crowd", b"x"), ("single", b"x")), (("", b"x"), ("", b"y"))):
        bench = make_bench(scheduling(mode="batch", max_running=2)).serve(1)
        for number in range(50):
            bench.say(submit(f"many{number}", max_tokens=3, tenant=first[0]), first[1])
        bench.say(submit("one", max_tokens=3, tenant=second[0]), second[1])
        bench.run_dry()
        order = [m.request_id for m in said(bench.log, Finished) if isinstance(m, Finished)]
        assert order.index("one") <= 5


def test_what_is_decided_can_be_seen(make_bench) -> None:
    """``swarmctl stats`` shows the mode in force, budgets, classes, tenants and who gave way."""
    bench = make_bench(scheduling(mode="auto", max_running=1)).serve(2)
    bench.say(submit("a", tenant="ada", max_tokens=50))
    bench.say(submit("b", tenant="bob", priority=50, max_tokens=50))
    bench.say(submit("c", tenant="bob", priority=-50))
    bench.say(submit("d", tenant="bob", priority=7))
    bench.finish()
    scheduler, queue = scheduling_report.report_scheduler(bench.state), scheduling_report.report_queue(bench.state)
    assert (scheduler["mode"], scheduler["depth"], scheduler["preemptions"]) == ("overlapped", 2, 1)
    assert queue["classes"] == {"7": 1, "normal": 1, "low": 1}
    assert {name: of["waiting"] for name, of in queue["tenants"].items()} == {"bob": 2, "ada": 1}
    assert queue["waiting"] == 3


def test_as_many_steps_in_flight_as_stages_but_one_in_batch_mode() -> None:
    """One step in flight in batch mode; else as many as there are stages."""
    assert [max_steps_in_flight("batch", n) for n in (1, 2, 5)] == [1, 1, 1]
    assert [max_steps_in_flight("overlapped", n) for n in (1, 2, 5)] == [1, 2, 5]
    assert [max_steps_in_flight("auto", n) for n in (1, 2, 5)] == [1, 2, 5]


def test_depth_on_one_machine() -> None:
    """Left to itself, the broker doesn't let stages that share cores compete for them; if told to, it does."""
    assert [max_steps_in_flight("auto", n, shares_cores=True) for n in (1, 2, 5)] == [1, 1, 1]
    assert [max_steps_in_flight("overlapped", n, shares_cores=True) for n in (1, 2, 5)] == [1, 2, 5]


def _decoding(make_bench, mode: Mode, num_sequences: int, num_workers: int = 2) -> Bench:
    bench = make_bench(scheduling(mode=mode)).serve(num_workers)
    for number in range(num_sequences):
        bench.say(submit(f"r{number}", max_tokens=100, ignore_eos=True))
    for _ in range(3 * num_workers):  # everybody's prompt is through
        bench.finish()
    return bench


def test_batch_mode_has_one_step_in_flight(make_bench) -> None:
    """All decodes in one step, one step at a time."""
    bench = _decoding(make_bench, "batch", 4)
    assert [len(s.rows) for s in bench.pipe] == [4]


def test_overlapped_mode_spreads_the_decodes(make_bench) -> None:
    """As many steps as stages, each with its share, no sequence in two of them."""
    bench = _decoding(make_bench, "overlapped", 6, num_workers=3)
    assert [len(s.rows) for s in bench.pipe] == [2, 2, 2]
    assert len({r.sequence for s in bench.pipe for r in s.rows}) == 6


def test_a_step_says_whether_it_is_alone(make_bench) -> None:
    """Only the one that finds the pipe empty is: whoever computes it has the cores for itself."""
    bench = _decoding(make_bench, "batch", 4)
    assert [s.alone for s in bench.pipe] == [True]
    bench = make_bench(scheduling(mode="overlapped")).serve(2)
    bench.say(submit("a"))
    bench.say(submit("b"))
    assert [s.alone for s in bench.pipe] == [True, False]


def test_an_odd_share_reaches_everybody(make_bench) -> None:
    """Five sequences over two micro-batches: after a while all are served alike."""
    bench = _decoding(make_bench, "overlapped", 5)
    for _ in range(40):
        bench.finish()
    lengths = [s.num_generated for s in bench.state.running]
    assert max(lengths) - min(lengths) <= 1, lengths


def test_a_small_budget_reaches_everybody(make_bench) -> None:
    """Where a step has room for two decodes of five, they take turns."""
    bench = make_bench(scheduling(mode="overlapped", step_tokens=2)).serve(3)
    for name in "abcde":
        bench.say(submit(name, num_prompt=1, max_tokens=100, ignore_eos=True))
    for _ in range(9):
        bench.finish()
    # Two of the three stages die: all five decode, in one step of two at a time.
    bench.lose("w1")
    bench.lose("w2")
    bench.tick()
    before = {s.id: s.num_generated for s in bench.state.running}
    for _ in range(50):
        bench.finish()
    assert [s.num_generated - before[s.id] for s in bench.state.running] == [20] * 5


def test_where_a_step_has_one_token_prompts_and_answers_take_turns(make_bench) -> None:
    """Neither waits for the other to end."""
    bench = make_bench(scheduling(mode="batch", step_tokens=1)).serve(1)
    bench.say(submit("answer", num_prompt=1, max_tokens=100, ignore_eos=True))
    bench.finish()
    bench.say(submit("prompt", num_prompt=50))
    served = []
    for _ in range(20):
        (step,) = bench.pipe
        served.append(step.rows[0].sequence)
        bench.finish()
    assert served[2:] == served[2:4] * 9
    assert set(served[2:4]) == {1, 2}


def test_auto_splits_only_what_is_worth_it(make_bench) -> None:
    """Few decodes stay together in one step; from ``MIN_DECODES_TO_SPLIT`` on they are shared out."""
    few = _decoding(make_bench, "auto", MIN_DECODES_TO_SPLIT - 1)
    assert sum(len(s.rows) for s in few.pipe) == MIN_DECODES_TO_SPLIT - 1
    many = _decoding(make_bench, "auto", MIN_DECODES_TO_SPLIT)
    assert max(len(s.rows) for s in many.pipe) == MIN_DECODES_TO_SPLIT // 2


def test_chunks_of_one_prompt_follow_each_other_through_the_pipe(make_bench) -> None:
    """With two stages, two chunks of one prompt are under way; a decode of it is not, until its token is known."""
    bench = make_bench(scheduling(mode="overlapped", prefill_chunk=4)).serve(2)
    bench.say(submit(num_prompt=10))
    assert [row(s) for s in bench.pipe] == [[(1, 0, 4)], [(1, 4, 4)]]
    bench.finish()
    assert [row(s) for s in bench.pipe] == [[(1, 4, 4)], [(1, 8, 2)]]
    # The last chunk is under way: nothing more can be.
    assert steps(bench.finish()) == []
    (step,) = steps(bench.finish())
    assert row(step) == [(1, 10, 1)]


def test_admission_by_blocks(make_bench) -> None:
    """Room is counted in blocks of 32 positions, for the most that a sequence can come to hold."""
    bench = make_bench().serve(1, kv_capacity=3 * 32)
    bench.say(submit("two blocks", num_prompt=32, max_tokens=1))
    bench.say(submit("one block", num_prompt=24, max_tokens=8))
    bench.say(submit("waits", num_prompt=1, max_tokens=1))
    assert [s.id for s in bench.state.running] == [1]  # the first step left before the others came
    bench.finish(token=5)
    # The first is at its end, so there is room for both.
    assert [s.id for s in bench.state.running] == [2, 3]
    bench.run_dry()
    assert not bench.state.running


def test_a_big_one_does_not_block_a_small_one(make_bench) -> None:
    """What doesn't fit now waits in its place; smaller ones behind it go ahead, and it comes when there is room."""
    bench = make_bench().serve(1, kv_capacity=4 * 32)
    bench.say(submit("runs", num_prompt=60, max_tokens=4))  # two blocks
    bench.say(submit("big", num_prompt=60, max_tokens=40))  # four
    bench.say(submit("small", num_prompt=3, max_tokens=6))  # one
    bench.finish()
    assert [s.request.id for s in bench.state.running] == ["runs", "small"]
    assert [s.request.id for s in bench.state.waiting] == ["big"]
    bench.run_dry()
    assert bench.sequence("big").reason == "length"


def _full_but_for_one(make_bench) -> Bench:
    """Of four blocks one runs without end in sight; a request for all four waits."""
    bench = make_bench().serve(1, kv_capacity=4 * 32)
    bench.say(submit("long", num_prompt=3, max_tokens=29, ignore_eos=True))
    bench.say(submit("big", num_prompt=60, max_tokens=60))
    bench.finish()
    return bench


def test_a_big_one_is_passed_only_so_often(make_bench) -> None:
    """Small ones that keep coming do not keep a big one out: after so many the room is kept free for it, and whoever
    came later comes after it."""
    bench = _full_but_for_one(make_bench)
    for number in range(MAX_OVERTAKES + 5):
        bench.say(submit(f"small{number}", num_prompt=1, max_tokens=1))
        bench.finish()
    assert bench.sequence("big").num_overtaken == MAX_OVERTAKES
    ended = [r.id for r in bench.state.requests.values() if r.id.startswith("small") and r.has_ended]
    assert 0 < len(ended) <= MAX_OVERTAKES
    while bench.sequence("long").reason is None:
        bench.finish()
    assert [s.request.id for s in bench.state.running] == ["big"]
    bench.run_dry()
    assert all(r.has_ended for r in bench.state.requests.values())


def test_a_big_one_is_passed_only_for_so_long(make_bench) -> None:
    """A few small ones, far apart, do not keep it out either."""
    bench = _full_but_for_one(make_bench)
    bench.tick(MAX_OVERTAKEN_S + 0.1)
    bench.say(submit("late", num_prompt=1, max_tokens=1))
    bench.finish()
    assert [s.request.id for s in bench.state.waiting] == ["big", "late"]


def test_what_fits_nowhere_holds_up_nobody(make_bench) -> None:
    """A request that the plan in force could not hold even alone is no reason to keep room free."""
    bench = make_bench().serve(1)
    bench.say(submit("huge", num_prompt=300))
    bench.join("w1", kv_capacity=4 * 32)
    bench.tick()
    bench.tick(MAX_OVERTAKEN_S + 0.1)
    bench.say(submit("small"))
    bench.run_dry()
    assert bench.sequence("small").reason == "length"
    assert bench.sequence("huge").reason is None


def test_admission_by_places(make_bench) -> None:
    """No more sequences run than the stages have places for, nor than the settings allow."""
    for bench in (
        make_bench().serve(1, max_sequences=2),
        make_bench(scheduling(max_running=2)).serve(1),
    ):
        for name in "abc":
            bench.say(submit(name))
        bench.finish()
        assert [s.request.id for s in bench.state.running] == ["a", "b"]
        bench.run_dry()
        assert bench.sequence("c").reason == "length"


def test_dispatch_follows_truncation(make_bench) -> None:
    """After a new epoch the stages are told again what a sequence is, cut to what counts, and go on from there."""
    bench = make_bench().serve(1)
    bench.say(submit())
    bench.finish(token=40)
    bench.finish(token=41)
    # The newcomer makes a new plan; the step under way is lost with the old epoch.
    bench.join("w1")
    bench.tick()
    step = bench.pipe[0]
    (opened,) = step.open
    assert opened.tokens == (1, 2, 3, 40, 41)
    assert step.truncate == (SequencePosition(1, 4),)
    assert (row(step), step.tokens) == ([(1, 4, 1)], (41,))


# --- whatever happens ------------------------------------------------------------------------------------------------

_KINDS = ("submit", "submit", "finish", "finish", "finish", "cancel", "stop", "ack", "attach", "away", "write", "tick")
_EVENTS = st.lists(
    st.tuples(
        st.sampled_from((*_KINDS, "join", "leave")),
        st.integers(0, 2**16),
    ),
    max_size=60,
)


def _happen(bench: Bench, what: str, number: int) -> None:
    """One random event; the number says which."""
    name = f"r{number % 5}"
    request = bench.state.requests.get(name)
    match what:
        case "submit":
            prompt, max_tokens = (1, 3, 33, 70)[number % 4], 1 + number % 40
            ranks = {"priority": (0, 0, 50, -50)[number % 4], "tenant": ("", "a")[number % 2]}
            bench.say(submit(name, num_prompt=prompt, max_tokens=max_tokens, n=1 + number % 2, **ranks))
        case "finish" if bench.pipe:
            bench.finish(token=number % 97)
        case "cancel":
            bench.say(Cancel(request_id=name), CLIENT if number % 2 else b"other")
        case "stop" if request:
            bench.say(Stop(request_id=name, index=0, at_index=number % 9))
        case "ack":
            bench.say(Ack(request_id=name, index=number % 2, next_index=number % 50))
        case "attach" if request:
            bench.say(Attach(request_id=name, next_index=(number % 7,) * len(request.sequences)))
        case "away":
            bench.feed(ClientUnreachable(CLIENT))
        case "write":
            bench.write_out()
        case "tick":
            bench.tick(0.1 * (1 + number % 20))
        case "join":
            bench.join(f"w{number % 4}")
        case "leave" if bench.workers:
            names = sorted(bench.workers)
            bench.lose(names[number % len(names)])


@pytest.mark.slow
@effort(max_examples=80, deadline=None)
@given(
    events=_EVENTS,
    of=st.builds(
        SchedulerSettings,
        mode=st.sampled_from(["batch", "overlapped", "auto"]),
        step_tokens=st.sampled_from([1, 8, 512]),
        prefill_chunk=st.sampled_from([1, 7, 256]),
        kv_headroom=st.sampled_from([1, 64]),
        step_target_s=st.sampled_from([0.0, 0.1]),
    ),
    slow_disk=st.booleans(),
)
def test_random_events_keep_the_invariants(
    events: list[tuple[str, int]], of: SchedulerSettings, slow_disk: bool
) -> None:
    """Whatever happens, in whatever order, whoever goes first: positions keep their order, room is never promised
    twice, steps are numbered without a gap, nothing is shown before it is written; and in the end everything that was
    accepted ends."""
    bench = Bench(settings(scheduler=of, requests=request_settings(client_grace_s=5.0, retain_s=1e6)))
    bench.serve(2, kv_capacity=5 * 32, max_sequences=3)
    if slow_disk:
        bench.held = {WriteTokens}
    for what, number in events:
        _happen(bench, what, number)
    # Quiet: the disk goes on, there are workers again, whoever waits is served.
    bench.held = set()
    bench.write_out()
    bench.join("last", kv_capacity=5 * 32, max_sequences=3)
    bench.tick(1.0)
    for _ in range(20):
        bench.run_dry()
        bench.tick(0.1)
    assert all(s.state is SequenceState.ENDED for s in bench.state.sequences.values())
    assert not bench.state.running
    assert not bench.state.to_release


def test_a_tenant_is_charged_for_each_token(serving: Bench) -> None:
    """One each, as it comes."""
    serving.say(submit(max_tokens=5, ignore_eos=True))
    tenant = serving.state.waiting._get_tenant(serving.state.requests["r"].tenant)
    charged = []
    for _ in range(4):
        serving.finish()
        charged.append(tenant.served)
    assert [after - before for before, after in pairwise(charged)] == [1, 1, 1]
