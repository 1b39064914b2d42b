"""No descriptors for newcomers: doors that closed are opened again in time, and people are told."""

from __future__ import annotations

import errno

import pytest

from swarm.broker.actions import Action, CountDescriptors, Outbox, ResumeAccepting, WriteLog
from swarm.broker.events import AcceptStopped, DescriptorsCounted
from swarm.broker.members.accept_gate import MAX_PAUSE_S, PAUSE_S, QUIET_S, AcceptGate, AcceptState, required_free

LIMIT = 1024
ROOM = required_free(LIMIT)


class Scene:
    """Doors, a clock, and what they ask for."""

    def __init__(self) -> None:
        self.now = 100.0
        self.used = LIMIT
        self.out = Outbox()
        self.book = AcceptState()
        self.doors = AcceptGate(self.book, self.out)

    def close(self, door: str = "client", code: int = errno.EMFILE) -> list[Action]:
        self.doors.handle(AcceptStopped(door, code, LIMIT), self.now)
        return self.take()

    def wait(self, seconds: float) -> list[Action]:
        """Tick on; descriptors are counted whenever they are asked for."""
        found: list[Action] = []
        for _ in range(round(seconds / 0.05)):
            self.now += 0.05
            self.doors.tick(self.now)
            asked = self.take()
            if CountDescriptors() in asked:
                self.doors.handle(DescriptorsCounted(self.used, LIMIT), self.now)
            found += [*asked, *self.take()]
        return found

    def take(self) -> list[Action]:
        found = self.out[:]
        self.out.clear()
        return found


@pytest.fixture
def scene() -> Scene:
    return Scene()


def opened(actions: list[Action]) -> list[str]:
    return [action.socket for action in actions if isinstance(action, ResumeAccepting)]


def notes(actions: list[Action], event: str) -> list[WriteLog]:
    return [action for action in actions if isinstance(action, WriteLog) and action.event == event]


def test_nothing_is_counted_while_all_is_well(scene: Scene) -> None:
    """Counting costs; an open door has no use for it."""
    assert scene.wait(5.0) == []
    assert scene.book.problem == ""
    assert scene.book.notes(scene.now) == []


def test_a_closed_door_is_told_with_the_limit_and_what_to_do(scene: Scene) -> None:
    """Once in the log, as a warning, and in the status for as long as it lasts."""
    (note,) = notes(scene.close(), "newcomers_wait")
    assert note.level == "warning"
    assert note.fields["limit"] == LIMIT
    assert "LimitNOFILE" in str(note.fields["remedy"])
    assert str(LIMIT) in scene.book.problem
    assert "ulimit -n" in scene.book.problem
    assert notes(scene.wait(30.0), "newcomers_wait") == []


def test_it_opens_when_there_is_room_and_not_before(scene: Scene) -> None:
    """A single free place is none: the door would close again at once."""
    scene.close()
    scene.used = LIMIT - ROOM + 1
    assert opened(scene.wait(30.0)) == []
    scene.used = LIMIT - ROOM
    assert opened(scene.wait(PAUSE_S + 0.1)) == ["client"]
    assert scene.book.problem == ""
    (said,) = scene.book.notes(scene.now)
    assert "once" in said
    assert "LimitNOFILE" in said
    assert opened(scene.wait(30.0)) == []


def test_a_raised_limit_is_room(scene: Scene) -> None:
    """It is read anew at each look."""
    scene.close()
    scene.now += PAUSE_S
    scene.doors.handle(DescriptorsCounted(LIMIT, 2 * LIMIT), scene.now)
    assert opened(scene.take()) == ["client"]


def test_both_doors_are_opened_together(scene: Scene) -> None:
    """They share the descriptors, and the warning is one."""
    scene.close("client")
    assert notes(scene.close("worker"), "newcomers_wait") == []
    assert "client and worker" in scene.book.problem
    scene.used = 0
    assert opened(scene.wait(2 * PAUSE_S)) == ["client", "worker"]


def test_a_crowd_that_fills_it_again_has_to_wait_longer(scene: Scene) -> None:
    """Twice as long each time, up to a bound, with no more warnings; and once it has been quiet all is as at first."""
    scene.used = 0
    assert notes(scene.close(), "newcomers_wait")[0].level == "warning"
    pauses = []
    for _ in range(6):
        began = scene.now
        while not opened(scene.wait(0.05)):
            pass
        pauses.append(round(scene.now - began, 1))
        assert notes(scene.close(), "newcomers_wait")[0].level == "info"
    assert pauses == sorted(pauses)  # to a tenth of a second: ticks are half as far apart
    assert pauses[0] == pytest.approx(PAUSE_S, abs=0.1)
    assert pauses[1] == pytest.approx(2 * PAUSE_S, abs=0.1)
    assert pauses[-1] == pytest.approx(MAX_PAUSE_S, abs=0.1)
    scene.wait(MAX_PAUSE_S + QUIET_S + 1.0)
    assert notes(scene.close(), "newcomers_wait")[0].level == "warning"
    assert opened(scene.wait(PAUSE_S + 0.1)) == ["client"]


@pytest.mark.parametrize(("code", "word"), [(errno.ENFILE, "fs.file-max"), (errno.ENOMEM, "memory")])
def test_what_the_machine_lacks_is_not_blamed_on_the_limit(scene: Scene, code: int, word: str) -> None:
    """Raising the process's own limit would not help there."""
    scene.close(code=code)
    assert word in scene.book.problem
    assert "LimitNOFILE" not in scene.book.problem
    scene.used = 50  # its own count says nothing about that: it is tried after the pause
    assert opened(scene.wait(PAUSE_S + 0.1)) == ["client"]
