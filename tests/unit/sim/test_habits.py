"""What people and machines do besides the usual faults: each of these happens, and what must hold holds."""

from __future__ import annotations

from collections import Counter

import pytest

from swarm.broker.state import Request
from swarm.client.connection_state import UNANSWERED_S
from swarm.client.events import Reply
from swarm.errors import Overloaded
from swarm.sim.actors import client
from swarm.sim.actors.broker import BrokerNode
from swarm.sim.actors.client import ClientNode
from swarm.sim.actors.lookup_client import LookupClient
from swarm.sim.actors.reader import AttachedReader
from swarm.sim.checks.fates import RetentionCheck
from swarm.sim.run import Outcome, run
from swarm.sim.schedules import variations
from swarm.sim.schedules.draw import OTHER_FAULTS
from swarm.sim.schedules.variations import make_full_schedule
from swarm.wire.messages import TokensSnapshot

CHANCES = ("LARGE", "SHORT_QUEUE", "HOPS", "REVOKED", "OFTEN", "LOOKED_UP", "KEPT")


def play_only(patch: pytest.MonkeyPatch, chance: str, count: int, *, first: int = 0) -> list[Outcome]:
    """Schedules each of which has this habit and no other."""
    for name in CHANCES:
        patch.setattr(variations, name, float(name == chance))
    return [run(seed) for seed in range(first, first + count)]


def test_they_are_seldom_and_all_there() -> None:
    """Most schedules have none of them, so that many can be played; of a few hundred, some have each."""
    schedules = [make_full_schedule(seed) for seed in range(400)]
    kinds = Counter(fault.kind for schedule in schedules for fault in schedule.faults if fault.kind in OTHER_FAULTS)
    assert kinds.keys() == set(OTHER_FAULTS)
    assert all(8 < count < 60 for count in kinds.values())
    assert 2 < sum(len(schedule.requests) > 8 for schedule in schedules) < 40
    assert max(len(schedule.requests) for schedule in schedules) > 14
    assert max(len(schedule.faults) for schedule in schedules) > 8
    assert sum(schedule.settings.requests.max_queue < 10 for schedule in schedules) > 8
    assert sum(any(r.revoked_after is not None for r in schedule.requests) for schedule in schedules) > 8


@pytest.mark.schedules
@pytest.mark.parametrize("kind", OTHER_FAULTS)
def test_other_faults(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that die for good, doors that close, reads and computations that fail: nobody minds who need not."""
    monkeypatch.setattr(variations, "OTHER_FAULTS", (kind,))
    played = play_only(monkeypatch, "OFTEN", 8, first=60)
    assert [(o.seed, o.failure) for o in played if o.failure] == []
    assert all(o.faults.get(kind) for o in played)


@pytest.mark.schedules
def test_a_broker_that_sleeps_for_long_ends_no_request_that_it_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not count its own sleep as others' silence. Without the clients' patience some would end by it."""
    monkeypatch.setattr(variations, "BROKER_SLEEPS", 1.0)
    played = [run(seed) for seed in range(12)]
    assert [(o.seed, o.failure) for o in played if o.failure] == []
    assert all(o.faults.get("broker_sleeps") for o in played)
    monkeypatch.setattr(client, "RECONNECT_TIMEOUT_S", UNANSWERED_S)
    assert any(run(seed).failure for seed in range(40))


@pytest.mark.schedules
def test_who_is_sent_away_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A queue without places sends requests away, for a while; they come back then, and are done in the end."""
    sent_away: list[float] = []
    real = ClientNode._on_failed

    def watched(self: ClientNode, request_id: str, error: Exception) -> None:
        if isinstance(error, Overloaded):
            sent_away.append(error.retry_after_s)
        real(self, request_id, error)  # type: ignore[arg-type]

    monkeypatch.setattr(ClientNode, "_on_failed", watched)
    played = play_only(monkeypatch, "SHORT_QUEUE", 12)
    assert [(o.seed, o.failure) for o in played if o.failure] == []
    assert len(sent_away) > 3


@pytest.mark.schedules
def test_what_the_dead_left_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """By others, from the first token on."""
    read: list[str] = []
    real = AttachedReader.check_end

    def watched(self: AttachedReader) -> None:
        real(self)
        if self.name.startswith("o-") and self.has_read_all:
            read.append(self.name)

    monkeypatch.setattr(AttachedReader, "check_end", watched)
    monkeypatch.setattr(variations, "OTHER_FAULTS", ("client_dies",))
    played = play_only(monkeypatch, "OFTEN", 12)
    assert [(o.seed, o.failure) for o in played if o.failure] == []
    assert len(read) > 2


@pytest.mark.schedules
def test_doors_open_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each that was shut, unless its broker dies."""
    opened: list[str] = []
    real = BrokerNode.open_door

    def watched(self: BrokerNode, door: str) -> None:
        real(self, door)
        opened.append(door)

    monkeypatch.setattr(BrokerNode, "open_door", watched)
    monkeypatch.setattr(variations, "OTHER_FAULTS", ("door_shut",))
    play_only(monkeypatch, "OFTEN", 8)
    assert set(opened) == {"client", "worker"}


@pytest.mark.schedules
def test_answers_are_looked_up_beside_their_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """While they come, after their ends, from the journal; also what nobody knows."""
    told: Counter[str] = Counter()
    real = LookupClient._take_answer

    def watched(self: LookupClient, key: int, answer: Reply) -> None:
        real(self, key, answer)
        told[type(answer).__name__] += 1
        told["in part"] += isinstance(answer, TokensSnapshot) and bool(answer.ids) and answer.finished is None
        told["whole"] += isinstance(answer, TokensSnapshot) and answer.finished is not None

    monkeypatch.setattr(LookupClient, "_take_answer", watched)
    played = play_only(monkeypatch, "LOOKED_UP", 12)
    assert [(o.seed, o.failure) for o in played if o.failure] == []
    assert all(told[kind] > 10 for kind in ("TokensSnapshot", "RequestDetails", "Report", "in part", "whole")), told


@pytest.mark.schedules
def test_what_is_kept_is_given_up_at_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of it; the rest ended before."""
    given_up: list[float] = []
    real = RetentionCheck.check_given_up

    def watched(self: RetentionCheck, request: Request, now: float, went_on_at: float) -> None:
        real(self, request, now, went_on_at)
        given_up.append(request.submit.keep_s)

    monkeypatch.setattr(RetentionCheck, "check_given_up", watched)
    played = play_only(monkeypatch, "KEPT", 30)
    assert [(o.seed, o.failure) for o in played if o.failure] == []
    assert sum(keep_s > 0 for keep_s in given_up) > 2


@pytest.mark.schedules
@pytest.mark.parametrize("chance", ["HOPS", "REVOKED", "LARGE"])
def test_other_habits(chance: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers that want to know the way of each token, cancels by others than who made a request, far larger
    schedules."""
    played = play_only(monkeypatch, chance, 4 if chance == "LARGE" else 8)
    assert [(o.seed, o.failure) for o in played if o.failure] == []
    assert chance != "REVOKED" or sum(o.faults.get("revoked", 0) for o in played) > 4
