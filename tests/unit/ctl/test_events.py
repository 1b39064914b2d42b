"""``swarmctl events``: what is told of two looks, and how it goes on while the broker is away."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import pytest

from swarm.admin.events import AWAITED_S, NO_SNAPSHOT, SwarmSnapshot, carry_over, diff_events
from swarm.client.blocking import Client
from swarm.ctl.inspect.follow import format_event, poll_events
from swarm.errors import Unavailable
from swarm.wire.messages import Json


def worker(name: str, **more: object) -> Json:
    return {
        "name": name,
        "incarnation": f"{name}-1",
        "state": "member",
        "verdict": "well",
        "host": "h",
        "pid": 7,
        **more,
    }


def status(uptime_s: float = 5.0, **more: object) -> Json:
    return {"state": "serving", "epoch": 1, "num_stages": 2, "model": "village", "uptime_s": uptime_s, **more}


def recovery(**more: object) -> Json:
    return {"detected_at": 3.5, "epoch": 2, "cause": "w1 was lost", "evidence": "w1: its connection closed", **more}


ENDED = {"resumed_all_at": 4.0, "measured": {"total_s": 0.5}, "sequences": 3}


def look(*workers: Json, recoveries: tuple[Json, ...] = (), **of_status: object) -> SwarmSnapshot:
    return SwarmSnapshot(status(**of_status), {"workers": list(workers)}, {"recoveries": list(recoveries)})  # type: ignore[arg-type]


def texts(before: SwarmSnapshot, after: SwarmSnapshot) -> list[str]:
    return [event.text for event in diff_events(before, after)]


W0, W1 = worker("w0"), worker("w1")


def test_at_first_all_is_new() -> None:
    """Also what is over, as far as the broker remembers it."""
    gone = worker("w2", state="out", verdict="dead", reason="its connection closed")
    assert texts(NO_SNAPSHOT, look(W0, gone, recoveries=(recovery(**ENDED),))) == [
        "w0 is here (process 7 on h)",
        "w2 is out: its connection closed",
        "recovery: w1: its connection closed",
        "recovered after 0.50 s: 3 sequences continue in epoch 2",
        "serving village on 2 stages, epoch 1",
    ]


def test_one_sequence_goes_on_alone() -> None:
    told = texts(look(W0), look(W0, recoveries=(recovery(**ENDED | {"sequences": 1}),)))
    assert told[-1] == "recovered after 0.50 s: 1 sequence continues in epoch 2"


def test_the_pause_after_a_loss_includes_its_detection() -> None:
    ended = ENDED | {"measured": {"detect_s": 0.25, "total_s": 0.5}}
    (event,) = diff_events(look(W0, recoveries=(recovery(),)), look(W0, recoveries=(recovery(**ended),)))
    assert event.text == "recovered after 0.75 s: 3 sequences continue in epoch 2"
    assert event.fields["total_s"] == 0.5


def test_nothing_new_is_nothing_told() -> None:
    """However much the evidence and the counters change meanwhile."""
    assert texts(look(worker("w0", evidence="idle")), look(worker("w0", evidence="computing"), uptime_s=6.0)) == []


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (look(W0), look(W0, W1), ["worker_joined"]),
        (look(W0, W1), look(W0, worker("w1", state="left")), ["worker_left"]),
        (look(W0, W1), look(W0, worker("w1", state="out")), ["worker_lost"]),
        (look(W0, W1), look(W0), ["worker_lost"]),
        (look(W0, worker("w1", state="out")), look(W0), []),  # forgotten at last
        (look(W0), look(worker("w0", incarnation="w0-2")), ["worker_lost", "worker_joined"]),
        (look(W0), look(worker("w0", verdict="slow")), ["verdict"]),
        (look(worker("w0", verdict="slow")), look(W0), ["verdict"]),
        (look(W0), look(worker("w0", steered="drained")), ["steered"]),
        (look(worker("w0", steered="drained")), look(W0), ["steered"]),
        (look(), look(recoveries=(recovery(),)), ["recovery_begun"]),
        (look(recoveries=(recovery(),)), look(recoveries=(recovery(**ENDED),)), ["recovery_ended"]),
        (look(), look(recoveries=(recovery(**ENDED),)), ["recovery_begun", "recovery_ended"]),
        (look(), look(epoch=2), ["serving"]),
        (look(), look(state="waiting", waits_for="a worker"), ["not_serving"]),
        (look(state="waiting", waits_for="a worker"), look(state="waiting", waits_for="room"), ["not_serving"]),
        (look(), look(journal_problem="the disk is full"), ["problem"]),
        (look(journal_problem="the disk is full"), look(), ["problem_over"]),
        (look(uptime_s=9.0), look(uptime_s=1.0), ["broker_started"]),
    ],
)
def test_what_is_different_has_happened(before: SwarmSnapshot, after: SwarmSnapshot, expected: list[str]) -> None:
    assert [event.name for event in diff_events(before, after)] == expected


class Asked:
    """Answers looks as scripted; None: the broker is away."""

    def __init__(self, looks: Iterator[SwarmSnapshot | None]) -> None:
        self._looks = looks
        self._current: SwarmSnapshot | None = None

    def query(self, what: str) -> Json:
        if what == "status":
            self._current = next(self._looks)
        if self._current is None:
            raise Unavailable("the broker went away")
        return getattr(self._current, what)  # type: ignore[no-any-return]


def follow(*looks: SwarmSnapshot | None) -> list[str]:
    """The names of what is told, until the script ends."""
    names = []
    asked: Client = Asked(iter(looks))  # type: ignore[assignment]
    with contextlib.suppress(RuntimeError):  # what a generator makes of StopIteration, the script's end
        for event, _ in poll_events(asked, 0.1, pause=lambda _: None):
            names.append(event.name)
    return names


def test_an_absence_is_told_once_and_waited_out() -> None:
    """What it brought is told when the broker is back."""
    names = follow(look(W0), None, None, None, look(W0, W1, uptime_s=1.0), None, look(W0, W1, uptime_s=1.5))
    first = ["worker_joined", "serving"]
    assert names == [
        *first,
        "broker_away",
        "broker_started",
        "worker_back",
        "worker_joined",
        "broker_away",
        "broker_back",
    ]


# --- workers over a restart of the broker ----------------------------------------------------------------------------


def test_workers_that_come_back_to_the_broker_were_not_lost() -> None:
    """It knows them one by one, as they come; each is told once, also if the broker is started again meanwhile."""
    waits = {"state": "waiting", "waits_for": "the workers of before the restart"}
    names = follow(
        look(W0, W1),
        None,
        look(uptime_s=0.1, **waits),
        look(uptime_s=0.4, **waits),
        look(W1, uptime_s=0.9, **waits),
        look(W1, uptime_s=0.2, **waits),
        look(W0, W1, uptime_s=0.7),
        look(W0, W1, uptime_s=AWAITED_S + 1),
    )
    assert names[3:] == [
        *("broker_away", "broker_started", "not_serving", "worker_back"),
        *("broker_started", "worker_back", "worker_back", "serving"),
    ]
    assert "worker_lost" not in names


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        (look(W0, uptime_s=AWAITED_S - 1), []),
        (look(W0, uptime_s=AWAITED_S + 1), ["w1 did not return to the restarted broker"]),
        (
            look(W0, worker("w1", incarnation="w1-2"), uptime_s=1.0),
            ["w1 did not return to the restarted broker", "w1 is here (process 7 on h)"],
        ),
        (look(W0, worker("w1", state="out", reason="no beat"), uptime_s=1.0), ["w1 is out: no beat"]),
        (look(W0, worker("w1", verdict="slow"), uptime_s=1.0), ["w1 is back (process 7 on h)", "w1 is slow"]),
    ],
)
def test_one_that_does_not_come_back_is_lost(later: SwarmSnapshot, expected: list[str]) -> None:
    """When another process has its name, or after a while; once."""
    restarted = look(W0, uptime_s=0.5)
    before = carry_over(look(W0, W1, uptime_s=100.0), restarted)
    assert texts(before, later) == expected
    assert texts(carry_over(before, later), later) == []


# --- newcomers -------------------------------------------------------------------------------------------------------


def refused(*rows: Json, uptime_s: float = 5.0) -> SwarmSnapshot:
    found = look(W0, uptime_s=uptime_s)
    return found._replace(nodes={**found.nodes, "refused": list(rows)})


def test_who_was_sent_away_is_told_when_the_broker_tells_it() -> None:
    """Once for each time that it does; to another broker it is new."""
    row = {"number": 1, "name": "w0", "host": "there", "pid": 9, "reason": "the name w0 is taken", "times": 1}
    again = row | {"number": 2, "times": 40}
    text = "w0 was refused (process 9 on there): the name w0 is taken"
    assert texts(look(W0), refused(row)) == [text]
    assert texts(refused(row), refused(row)) == []
    assert texts(refused(row), refused(again)) == [text.replace(":", ", 40 times by now:")]
    assert text in texts(refused(row, uptime_s=9.0), refused(row, uptime_s=1.0))


def test_a_broker_that_is_away_from_the_start_is_an_error() -> None:
    asked: Client = Asked(iter([None]))  # type: ignore[assignment]
    with pytest.raises(Unavailable):
        list(poll_events(asked, 0.1, pause=lambda _: None))


def test_a_line_is_a_line() -> None:
    """For people, whatever the evidence; for programs an object, without a time for what was before."""
    [event, *_] = diff_events(NO_SNAPSHOT, look(worker("w0", host="h\nost")))
    assert format_event(event, None, as_json=False) == "before    worker_joined   w0 is here (process 7 on h ost)"
    assert json.loads(format_event(event, None, as_json=True)) == {
        "time": None,
        "event": "worker_joined",
        "text": "w0 is here (process 7 on h\nost)",
        "worker": "w0",
        "incarnation": "w0-1",
    }
    assert json.loads(format_event(event, 0.5, as_json=True))["time"].partition(".")[2][:3] == "500"
