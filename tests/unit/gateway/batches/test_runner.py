"""The runner of batches, fed with events: which lines run, what is written, and when a batch ends."""

from __future__ import annotations

import random

from swarm.gateway.batches.objects import Answer, BatchStatus, LineError
from swarm.gateway.batches.runner import (
    FIRST_RETRY_S,
    MAX_ATTEMPTS,
    AbortLine,
    Action,
    BatchAdded,
    BatchChecked,
    BatchRunner,
    CancelOrdered,
    CheckBatch,
    Event,
    LineAborted,
    LineAnswered,
    LineNotRun,
    Move,
    NotWritten,
    RunLine,
    TimePassed,
    Write,
    Written,
)

FOREVER = 1e9
GOOD = Answer(False, b"good\n")
BAD = Answer(True, b"bad\n")


def added(pending: tuple[int, ...], batch: str = "b", tenant: str = "t", expires_at: float = FOREVER) -> BatchAdded:
    """A batch that was in progress when the gateway started."""
    return BatchAdded(batch, tenant, BatchStatus.in_progress, expires_at, pending)


def runs(actions: list[Action]) -> list[int]:
    return [action.number for action in actions if isinstance(action, RunLine)]


def writes(actions: list[Action]) -> list[Write]:
    return [action for action in actions if isinstance(action, Write)]


def test_a_new_batch_is_checked_then_written_as_in_progress_while_its_lines_run() -> None:
    runner = BatchRunner(2)
    assert runner.handle(BatchAdded("b", "t", BatchStatus.validating, FOREVER), 0) == [CheckBatch("b")]
    actions = runner.handle(BatchChecked("b", (1, 2, 4)), 0)
    assert runs(actions) == [1, 2]
    assert writes(actions) == [Write((), (Move("b", BatchStatus.in_progress),))]


def test_a_batch_with_bad_lines_fails_and_runs_none() -> None:
    runner, errors = BatchRunner(2), (LineError("invalid_json_line", "…", None, 3),)
    runner.handle(BatchAdded("b", "t", BatchStatus.validating, FOREVER), 0)
    assert runner.handle(BatchChecked("b", (), errors), 0) == [Write((), (Move("b", BatchStatus.failed, errors),))]
    assert runner.handle(Written(), 0) == []
    assert runner.num_active == 0


def test_a_line_keeps_its_place_until_its_answer_is_on_the_disk() -> None:
    """So that a slow disk bounds what waits in memory."""
    runner = BatchRunner(2)
    assert runs(runner.handle(added((1, 2, 3, 4)), 0)) == [1, 2]
    assert runner.handle(LineAnswered("b", 1, GOOD), 0) == [Write((("b", 1, GOOD),))]
    assert runner.handle(LineAnswered("b", 2, GOOD), 0) == []
    actions = runner.handle(Written(), 0)
    assert (runs(actions), writes(actions)) == ([3], [Write((("b", 2, GOOD),))])


def test_the_last_answer_and_the_end_of_the_batch_are_one_write() -> None:
    runner = BatchRunner(2)
    runner.handle(added((7,)), 0)
    assert runner.handle(LineAnswered("b", 7, GOOD), 0) == [
        Write((("b", 7, GOOD),), (Move("b", BatchStatus.completed),))
    ]
    runner.handle(Written(), 0)
    assert runner.num_active == 0
    assert runner.next_due() is None


def test_a_restarted_gateway_runs_exactly_the_lines_without_an_answer() -> None:
    assert runs(BatchRunner(9).handle(added((2, 5)), 0)) == [2, 5]
    assert BatchRunner(9).handle(added(()), 0) == [Write((), (Move("b", BatchStatus.completed),))]


def test_a_refused_line_runs_again_after_its_time_and_counts_no_attempt() -> None:
    runner = BatchRunner(1)
    runner.handle(added((1,)), 0)
    for at in range(0, 50, 5):
        assert runner.handle(LineNotRun("b", 1, 5.0), at) == []
        assert runner.next_due() == at + 5
        assert runner.handle(TimePassed(), at + 4.9) == []
        assert runs(runner.handle(TimePassed(), at + 5)) == [1]


def test_refused_lines_do_not_hold_up_the_others_of_their_batch() -> None:
    """As if the first lines were for a model that is away: they wait behind the others, each for its own time."""
    runner = BatchRunner(3)
    assert runs(runner.handle(added((1, 2, 3, 4, 5, 6, 7)), 0)) == [1, 2, 3]
    assert runs(runner.handle(LineNotRun("b", 1, 9.0), 0)) == [4]
    assert runs(runner.handle(LineNotRun("b", 2, 5.0), 1)) == [5]
    runner.handle(LineAnswered("b", 4, GOOD), 1)
    assert runs(runner.handle(Written(), 1)) == [6]
    assert runs(runner.handle(LineNotRun("b", 3, 9.0), 1)) == [7]
    for number in (5, 6, 7):
        runner.handle(LineAnswered("b", number, GOOD), 2)
        runner.handle(Written(), 2)
    assert runner.next_due() == 6
    assert runs(runner.handle(TimePassed(), 6)) == [2]
    assert runs(runner.handle(TimePassed(), 10)) == [1, 3]


def test_a_batch_pauses_when_a_whole_round_is_refused() -> None:
    """So that a swarm that takes nothing does not get every line at once; the next round begins with other lines."""
    runner = BatchRunner(2)
    assert runs(runner.handle(added(tuple(range(1, 9))), 0)) == [1, 2]
    assert runs(runner.handle(LineNotRun("b", 1, 5.0), 0)) == [3]
    for number in (2, 3):
        assert runner.handle(LineNotRun("b", number, 5.0), 0) == []
    assert runner.next_due() == 5
    assert runner.handle(TimePassed(), 4) == []
    assert runs(runner.handle(TimePassed(), 5)) == [4, 5]


def test_a_retry_is_due_even_if_its_time_passes_before_the_timer_is_set() -> None:
    """The shell reads its clock later than the event's time. A batch without a free place waits for none."""
    runner = BatchRunner(1)
    runner.handle(added((1, 2), expires_at=3600), 0)
    runner.handle(LineNotRun("b", 1, 0.001), 0)
    assert runner.next_due() == 0.001
    assert runs(runner.handle(TimePassed(), 5)) == [2]
    assert runner.next_due() == 3600


def test_a_line_whose_runs_fail_ends_with_its_error_after_some_attempts() -> None:
    runner = BatchRunner(1)
    runner.handle(added((1,)), 0)
    for _ in range(MAX_ATTEMPTS - 1):
        assert runs(runner.handle(LineNotRun("b", 1, 0.0, BAD), 0)) == [1]
    assert writes(runner.handle(LineNotRun("b", 1, 0.0, BAD), 0))[0].answers == (("b", 1, BAD),)


def test_a_full_disk_stops_new_lines_and_loses_no_answer() -> None:
    """The write is repeated with all that has ended since, later each time; then the batch continues."""
    runner = BatchRunner(3)
    runner.handle(added((1, 2, 3, 4)), 0)
    runner.handle(LineAnswered("b", 1, GOOD), 0)
    assert runner.handle(NotWritten(), 10) == []
    assert runner.handle(LineAnswered("b", 2, BAD), 10.5) == []
    assert runner.next_due() == 10 + FIRST_RETRY_S
    both = Write((("b", 1, GOOD), ("b", 2, BAD)))
    assert runner.handle(TimePassed(), 10 + FIRST_RETRY_S) == [both]
    assert runner.handle(NotWritten(), 20) == []
    assert runner.next_due() == 20 + 2 * FIRST_RETRY_S
    assert runner.handle(TimePassed(), 20 + 2 * FIRST_RETRY_S) == [both]
    assert runs(runner.handle(Written(), 30)) == [4]


def test_a_cancelled_batch_aborts_its_lines_and_keeps_the_answers_that_come_meanwhile() -> None:
    runner = BatchRunner(2)
    runner.handle(added((1, 2, 3)), 0)
    assert runner.handle(CancelOrdered("b"), 0) == [AbortLine("b", 1), AbortLine("b", 2)]
    assert runner.handle(CancelOrdered("b"), 0) == []
    assert runner.handle(LineAborted("b", 1), 0) == []
    assert runner.handle(LineAnswered("b", 2, GOOD), 0) == [
        Write((("b", 2, GOOD),), (Move("b", BatchStatus.cancelled),))
    ]
    assert runner.handle(Written(), 0) == []
    assert runner.num_active == 0


def test_a_batch_expires_at_its_time() -> None:
    runner = BatchRunner(1)
    runner.handle(added((1, 2), expires_at=100), 0)
    assert runner.next_due() == 100
    assert runner.handle(TimePassed(), 99) == []
    assert runner.handle(TimePassed(), 100) == [AbortLine("b", 1)]
    assert runner.next_due() is None
    assert runner.handle(LineNotRun("b", 1, 1.0), 100) == [Write((), (Move("b", BatchStatus.expired),))]


def test_a_batch_that_expired_while_no_gateway_ran_starts_no_line() -> None:
    assert BatchRunner(2).handle(added((1,), expires_at=100), 101) == [Write((), (Move("b", BatchStatus.expired),))]


def test_a_cancellation_is_continued_by_the_next_gateway() -> None:
    event = BatchAdded("b", "t", BatchStatus.cancelling, FOREVER, (1, 2))
    assert BatchRunner(2).handle(event, 0) == [Write((), (Move("b", BatchStatus.cancelled),))]


def test_a_batch_cancelled_before_its_check_ends_when_it_is_checked() -> None:
    runner = BatchRunner(2)
    runner.handle(BatchAdded("b", "t", BatchStatus.validating, FOREVER), 0)
    assert runner.handle(CancelOrdered("b"), 0) == []
    assert runner.handle(BatchChecked("b", (1,)), 0) == [Write((), (Move("b", BatchStatus.cancelled),))]


def test_tenants_share_the_places_however_many_batches_they_have() -> None:
    runner = BatchRunner(4)
    lines = tuple(range(1, 100))
    assert len(runs(runner.handle(added(lines, "a1", "alice"), 0))) == 4
    runner.handle(added(lines, "a2", "alice"), 0)
    runner.handle(added(lines, "b1", "bob"), 0)
    started = []
    for number in (1, 2):
        runner.handle(LineAnswered("a1", number, GOOD), 0)
        started += runner.handle(Written(), 0)
    assert [action.id for action in started if isinstance(action, RunLine)] == ["b1", "b1"]


def test_a_stopped_gateway_starts_no_lines_and_still_writes_answers() -> None:
    runner = BatchRunner(1)
    runner.handle(added((1, 2)), 0)
    runner.stop()
    assert runner.handle(LineAnswered("b", 1, GOOD), 0) == [Write((("b", 1, GOOD),))]
    assert runner.handle(Written(), 0) == []


def test_events_of_unknown_batches_and_lines_change_nothing() -> None:
    runner = BatchRunner(1)
    runner.handle(added((1,)), 0)
    for event in (LineAnswered("x", 1, GOOD), CancelOrdered("x"), LineAnswered("b", 2, GOOD), LineAborted("b", 2)):
        assert runner.handle(event, 0) == []
    assert runner.handle(added((1,)), 0) == []


def test_every_line_is_answered_once_whatever_happens() -> None:
    """Random ends of lines, failed writes and restarts, by a seed; each answer reaches the disk once, never more than
    ``max_in_flight`` lines run, and every batch ends."""
    for seed in range(60):
        _play(random.Random(seed))


def _play(chance: random.Random) -> None:
    disk: dict[int, Answer] = {}
    ends: list[Move] = []
    num_lines, most = chance.randrange(1, 40), chance.randrange(1, 6)
    runner, now = BatchRunner(most), 0.0
    running: set[int] = set()
    write: Write | None = None
    queue: list[Event] = [added(tuple(range(num_lines)))]
    for _ in range(10_000):
        if queue:
            event = queue.pop(chance.randrange(len(queue)))
        elif chance.random() < 0.02:
            runner, running, write = BatchRunner(most), set(), None  # a killed gateway; the disk is what is left
            event = added(tuple(number for number in range(num_lines) if number not in disk))
        elif write is not None and chance.random() < 0.4:
            is_kept = chance.random() < 0.7
            if is_kept:
                for _, number, answer in write.answers:
                    disk.setdefault(number, answer)
                ends += [move for move in write.moves if move.status.is_final]
            event, write = Written() if is_kept else NotWritten(), None
        elif running and chance.random() < 0.7:
            number = chance.choice(sorted(running))
            running.remove(number)
            event = chance.choice([LineAnswered("b", number, GOOD), LineNotRun("b", number, 1.0)])
        else:
            now, event = now + 1.0, TimePassed()
        for action in runner.handle(event, now):
            if isinstance(action, RunLine):
                assert action.number not in running
                assert action.number not in disk
                running.add(action.number)
            elif isinstance(action, Write):
                assert write is None
                write = action
        assert len(running) <= most
        if ends:
            break
    assert [move.status for move in ends] == [BatchStatus.completed]
    assert sorted(disk) == list(range(num_lines))
