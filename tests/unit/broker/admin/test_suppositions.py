"""Questions "what if" are solved beside the loop: asked once, shared, remembered, and no more than may be."""

from __future__ import annotations

import pickle

import pytest

from swarm.broker.actions import Action, Solve
from swarm.broker.admin.plan_preview import MAX_ASKERS, MAX_OPEN, MAX_REPEATS
from swarm.broker.events import ClientMessageReceived, Solved
from swarm.broker.planning.candidates import Proposal
from swarm.broker.planning.plan_query import answer_query
from swarm.broker.state import WorkerState
from swarm.wire.messages import Leaving, PlanWhatIf, Query, Report, StopWorker
from tests.unit.broker.bench import Bench, said, submit

MORE = Query(what="plan", suppose=PlanWhatIf(more=2))


@pytest.fixture
def asked(serving: Bench) -> Bench:
    """A swarm whose questions wait until the test answers them."""
    return serving


def say(bench: Bench, query: Query, client: bytes = b"a") -> list[Action]:
    """Without solving anything."""
    return bench.core.handle(ClientMessageReceived(client, query), bench.now)


def solves(actions: list[Action]) -> list[Solve]:
    return [action for action in actions if isinstance(action, Solve)]


def reports(actions: list[Action]) -> list[Report]:
    return [report for report in said(actions, Report) if isinstance(report, Report)]


def solve(bench: Bench, asked: Solve) -> list[Action]:
    return bench.core.handle(Solved(asked.number, answer_query(asked.query)), bench.now)


def test_it_is_asked_and_then_told(asked: Bench) -> None:
    """Nothing is solved in between; what is asked can travel to another process, and says the same there."""
    done = say(asked, MORE)
    assert not reports(done)
    (question,) = solves(done)
    travelled = pickle.loads(pickle.dumps(question.query))
    (report,) = reports(asked.core.handle(Solved(question.number, answer_query(travelled)), asked.now))
    assert (report.ok, report.body["state"]) == (True, "would be made")


def test_who_asks_the_same_shares_the_answer(asked: Bench) -> None:
    """While it is being found, and afterwards as long as nothing has changed."""
    (question,) = solves(say(asked, MORE, b"a"))
    assert not say(asked, MORE, b"b")
    assert len(reports(solve(asked, question))) == 2
    again = say(asked, MORE, b"c")
    assert not solves(again)
    assert len(reports(again)) == 1
    asked.mute = {"w2"}  # it is there, and has no part yet: the plan in force is the same
    asked.join("w2")
    assert solves(say(asked, MORE, b"c"))


def test_the_plan_in_force_is_told_with_what_one_more_would_change(asked: Bench) -> None:
    """Found once per plan."""
    (question,) = solves(say(asked, Query(what="plan")))
    (report,) = reports(solve(asked, question))
    assert any("one more worker" in text for text in report.body["why"])  # type: ignore[attr-defined]
    again = say(asked, Query(what="plan"))
    assert not solves(again)
    assert reports(again)[0].body["why"] == report.body["why"]


def test_an_answer_about_another_plan_is_none_about_this(asked: Bench) -> None:
    """The plan has changed meanwhile: it is told as it is."""
    (question,) = solves(say(asked, Query(what="plan")))
    found = answer_query(question.query)
    asked.join("w2")
    asked.lose("w1")
    (report,) = reports(asked.core.handle(Solved(question.number, found), asked.now))
    assert report.ok
    current = asked.state.plans.current
    assert current is None or current.forecast is None or current.forecast.one_more is None


def test_too_many_are_turned_away(asked: Bench) -> None:
    """Different questions, or many that ask the same; who wants to know the plan is told it without."""
    for more in range(MAX_OPEN):
        assert solves(say(asked, Query(what="plan", suppose=PlanWhatIf(more=more))))
    (refused,) = reports(say(asked, Query(what="plan", suppose=PlanWhatIf(more=64))))
    assert "try again in a moment" in str(refused.body["error"])
    (plain,) = reports(say(asked, Query(what="plan")))
    assert plain.body["state"] == "serving"
    for number in range(MAX_ASKERS - 1):
        assert not say(asked, Query(what="plan", suppose=PlanWhatIf(more=1)), b"%d" % number)
    assert reports(say(asked, Query(what="plan", suppose=PlanWhatIf(more=1)), b"late"))


def test_what_can_not_be_found_out_is_said(asked: Bench) -> None:
    """And may be asked again."""
    (question,) = solves(say(asked, MORE))
    (report,) = reports(asked.core.handle(Solved(question.number, None, "it took too long"), asked.now))
    assert (report.ok, report.body) == (False, {"error": "it took too long"})
    assert solves(say(asked, MORE))


def test_an_answer_that_nobody_waits_for(asked: Bench) -> None:
    """A number that was never asked, or twice."""
    assert not asked.core.handle(Solved(99, None), asked.now)


def test_a_worker_that_is_not_there(asked: Bench) -> None:
    """That needs no solving."""
    (report,) = reports(say(asked, Query(what="plan", suppose=PlanWhatIf(without=("w9",)))))
    assert "no worker 'w9'" in str(report.body["error"])


# --- whether a worker can be spared ----------------------------------------------------------------------------------


def stop(bench: Bench, worker: str, client: bytes = b"a", *, force: bool = False) -> list[Action]:
    return bench.core.handle(ClientMessageReceived(client, StopWorker(worker=worker, force=force)), bench.now)


def test_a_worker_that_is_to_stop_is_asked_about_beside_the_loop(asked: Bench) -> None:
    """Nothing is solved, and nothing happens to it, before the answer is there; who asks the same shares it."""
    (question,) = solves(stop(asked, "w0", b"a"))
    assert not solves(stop(asked, "w0", b"b"))
    assert asked.state.workers["w0.1"].state is WorkerState.MEMBER
    done = reports(solve(asked, question))
    assert [report.body for report in done] == [{"worker": "w0", "state": "leaving"}] * 2
    travelled = pickle.loads(pickle.dumps(question.query))
    assert isinstance(answer_query(travelled), Proposal)


def test_the_answer_is_about_workers_that_are_no_more(asked: Bench) -> None:
    """The other one has died meanwhile, so nobody else could take over: it is asked again, and refused."""
    (question,) = solves(stop(asked, "w0"))
    asked.lose("w1")
    (again,) = solves(solve(asked, question))
    (report,) = reports(solve(asked, again))
    assert "it would wait for another worker" in str(report.body["error"])
    assert asked.state.workers["w0.1"].state is WorkerState.MEMBER


def test_it_is_not_asked_for_ever(asked: Bench) -> None:
    """Workers come and go faster than it can be found out."""
    asked.mute = {f"v{number}" for number in range(9)}
    actions = stop(asked, "w0")
    for number in range(MAX_REPEATS + 1):
        (question,) = solves(actions)
        asked.join(f"v{number}")
        actions = solve(asked, question)
    (report,) = reports(actions)
    assert "workers keep joining and leaving" in str(report.body["error"])


def test_a_worker_that_has_gone_meanwhile(asked: Bench) -> None:
    """It is what was wanted."""
    (question,) = solves(stop(asked, "w0"))
    asked.lose("w0")
    (report,) = reports(solve(asked, question))
    assert (report.ok, report.body["state"]) == (True, "out")


def test_it_can_not_be_found_out(asked: Bench) -> None:
    """It is said why."""
    (question,) = solves(stop(asked, "w0"))
    (report,) = reports(asked.core.handle(Solved(question.number, None, "not within 20 s"), asked.now))
    assert not report.ok
    assert "not within 20 s (--force" in str(report.body["error"])


def test_force_waits_for_no_answer(asked: Bench) -> None:
    """However many questions are open, one about this worker among them: it leaves in good order, and the answer is
    told at once. Said again, it changes nothing."""
    for more in range(1, MAX_OPEN):
        assert solves(say(asked, Query(what="plan", suppose=PlanWhatIf(more=more))))
    (question,) = solves(stop(asked, "w0", b"a"))
    for _ in range(2):
        done = stop(asked, "w0", b"b", force=True)
        assert not solves(done)
        assert [report.body for report in reports(done)] == [{"worker": "w0", "state": "leaving"}]
    (report,) = reports(solve(asked, question))
    assert report.body == {"worker": "w0", "state": "leaving"}
    asked.tick(1.0)
    assert asked.state.workers["w0.1"].state is WorkerState.LEFT
    assert asked.state.plans.is_serving


def test_force_finds_that_one_that_leaves_can_not_be_spared_any_more(asked: Bench) -> None:
    """The other one has gone since: it is not waited for that somebody takes its layers."""
    asked.mute = {"w0", "w1"}
    asked.tell("w0", Leaving(incarnation="w0.1", reason="SIGTERM"))
    assert asked.state.workers["w0.1"].state is WorkerState.LEAVING
    asked.lose("w1")
    (report,) = reports(stop(asked, "w0", force=True))
    assert report.body["state"] == "left"


def test_too_many_questions_before_it(asked: Bench) -> None:
    """It is turned away like any other."""
    for more in range(1, 1 + MAX_OPEN):
        assert solves(say(asked, Query(what="plan", suppose=PlanWhatIf(more=more))))
    (report,) = reports(stop(asked, "w0"))
    assert "too many plan previews" in str(report.body["error"])


def test_a_stream_goes_on_meanwhile(asked: Bench) -> None:
    """However long it takes to find out, steps go out and tokens come."""
    asked.say(submit(max_tokens=20))
    (question,) = solves(stop(asked, "w0"))
    for _ in range(5):
        asked.finish()
    assert asked.sequence().num_generated == 5
    assert reports(solve(asked, question))
    asked.run_dry()
    assert asked.sequence().num_generated == 20
