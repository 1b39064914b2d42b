"""Adapters at run time: which workers are ordered to have which, and when requests may name them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from swarm.broker.actions import SendToWorker, WriteAdapters, WriteEnd, WriteLog
from swarm.broker.events import RequestRead
from swarm.broker.members.adapters import GIVE_UP_S, LOAD_S, RESEND_S
from swarm.broker.state.adapters import MAX_RETRY_S
from swarm.broker.state.journal_snapshot import JournalSnapshot
from swarm.testing import fake_manifest
from swarm.wire.messages import (
    MAX_ADAPTERS,
    Accepted,
    AdapterCommand,
    AdapterEntry,
    AdaptersSet,
    Asset,
    Cancel,
    Denied,
    Finished,
    GetRequest,
    Json,
    LookUp,
    Rejected,
    Report,
    RequestDetails,
    SetAdapters,
    TokensSnapshot,
    Welcome,
)
from swarm.wire.versions import VERSIONS
from tests.unit.broker.bench import Bench, request_settings, said, settings, submit

MakeBench = Callable[..., Bench]
LOAD = AdapterCommand(verb="load", name="red", source="/red")
LOAD_BLUE = AdapterCommand(verb="load", name="blue", source="/blue")
DROP = AdapterCommand(verb="drop", name="red")
MODEL = fake_manifest()


def entry(name: str = "red", digest: str = "d" * 32) -> AdapterEntry:
    return AdapterEntry(name, f"/{name}", digest, 10, (5,) * MODEL.num_layers)


def ordered(bench: Bench) -> dict[str, SetAdapters]:
    """The latest order to each worker."""
    found = [(a.peer.decode()[:2], a.message) for a in bench.log if isinstance(a, SendToWorker)]
    return {name: message for name, message in found if isinstance(message, SetAdapters)}


def answer(bench: Bench, name: str, *entries: AdapterEntry, problem: str = "") -> None:
    """A worker answers the latest order."""
    bench.tell(
        name,
        AdaptersSet(
            lineage=bench.state.lineage,
            incarnation=bench.workers[name].incarnation,
            number=bench.state.adapters.number,
            adapters=entries,
            problem=problem,
        ),
    )


def reports(bench: Bench) -> list[Json]:
    found = said(bench.log, Report)
    bench.take()
    return [each.body for each in found if isinstance(each, Report) and each.what == "adapters"]


def loaded(bench: Bench) -> Bench:
    """Two workers serve with the adapter "red"."""
    bench.serve()
    bench.say(LOAD)
    for name in ("w0", "w1"):
        answer(bench, name, entry())
    (body,) = reports(bench)
    assert body == {"adapter": "red", "state": "loaded", "bytes": 5 * MODEL.num_layers}
    return bench


def refusal(bench: Bench, request_id: str, adapter: str) -> str:
    """Why a request is refused; empty if it is accepted."""
    before = len(bench.log)
    bench.say(submit(request_id, adapter=adapter))
    texts = [message.reason for message in said(bench.log[before:], Rejected) if isinstance(message, Rejected)]
    assert bool(texts) is not bool(said(bench.log[before:], Accepted))
    return "".join(texts)


def test_requests_may_name_an_adapter_once_every_worker_has_it_and_the_journal(bench: Bench) -> None:
    bench.serve()
    bench.held.add(WriteAdapters)
    bench.say(LOAD)
    assert ordered(bench) == {
        name: SetAdapters(number=1, adapters=(AdapterEntry("red", "/red"),)) for name in ("w0", "w1")
    }
    answer(bench, "w0", entry())
    assert refusal(bench, "early", "red") == "there is no adapter 'red': chain has none"
    answer(bench, "w1", entry())
    assert [action for action in bench.log if isinstance(action, WriteAdapters)] == [WriteAdapters(1, (entry(),))]
    assert reports(bench) == []
    bench.write_out()
    (body,) = reports(bench)
    assert body["state"] == "loaded"
    assert refusal(bench, "r", "red") == ""
    assert bench.state.requests["r"].submit.params.adapter == entry().key
    manifest = bench.state.manifest
    assert manifest is not None
    assert manifest.layer_bytes == tuple(size + 5 for size in MODEL.layer_bytes)
    assert [each.name for each in manifest.adapters] == ["red"]


@pytest.mark.parametrize("name", ["w0", "w1"])
def test_a_problem_of_one_worker_ends_the_load(bench: Bench, name: str) -> None:
    """The others drop the adapter, and nothing else changes."""
    bench.serve()
    bench.say(LOAD)
    other = {"w0": "w1", "w1": "w0"}[name]
    answer(bench, other, entry())
    answer(bench, name, problem="/red is missing")
    assert reports(bench) == [{"error": f"red was not loaded: worker {name}: /red is missing"}]
    assert bench.state.plans.is_serving
    assert refusal(bench, "r", "red") == "there is no adapter 'red': chain has none"
    bench.tick()
    assert ordered(bench) == {}
    assert bench.state.adapters.wanted == ()
    bench.say(LOAD)
    assert {order.number for order in ordered(bench).values()} == {3}


def test_an_answer_to_an_earlier_order_does_not_count(bench: Bench) -> None:
    """One worker's problem ended the load; the other's comes late, or is still known when the next load begins."""
    bench.serve()
    bench.say(LOAD)
    former = bench.state.adapters.number
    answer(bench, "w0", problem="/red is missing")
    answer(bench, "w0", problem="not even a dropped one")
    bench.take()
    bench.say(LOAD)
    late = AdaptersSet(incarnation=bench.workers["w1"].incarnation, number=former, problem="/red is missing")
    bench.tell("w1", msgspec.structs.replace(late, lineage=bench.state.lineage))
    assert reports(bench) == []
    for name in ("w0", "w1"):
        answer(bench, name, entry())
    (body,) = reports(bench)
    assert body["state"] == "loaded"


def test_an_answer_without_the_adapter_to_load_does_not_count(bench: Bench) -> None:
    """A worker obeys an order from before it was a member last, which has the same number and not that adapter."""
    bench.serve()
    bench.say(LOAD)
    answer(bench, "w0", entry())
    answer(bench, "w1")
    bench.take()
    bench.tick(RESEND_S + 0.2)
    assert list(ordered(bench)) == ["w1"]
    answer(bench, "w1", entry())
    (body,) = reports(bench)
    assert body["state"] == "loaded"


def test_a_drop_waits_for_the_load_under_way(bench: Bench) -> None:
    """Its answers would not count any more if the order changed."""
    loaded(bench)
    bench.say(LOAD_BLUE)
    number = bench.state.adapters.number
    bench.say(DROP)
    assert bench.state.adapters.number == number
    for name in ("w0", "w1"):
        answer(bench, name, entry(), entry("blue"))
    assert [body["state"] for body in reports(bench)] == ["dropping", "loaded"]
    bench.tick()
    assert bench.state.adapters.entries == (entry("blue"),)


def test_unlike_files_are_refused(bench: Bench) -> None:
    bench.serve()
    bench.say(LOAD)
    answer(bench, "w0", entry())
    answer(bench, "w1", entry(digest="e" * 32))
    (body,) = reports(bench)
    assert body["error"] == (
        "red was not loaded: workers w0 and w1 have different files of it: copy the same ones to all hosts, or name an "
        "adapter on a hub"
    )


def test_the_commit_of_a_hub_is_kept(bench: Bench) -> None:
    """So that a worker that joins later has the same files; two commits may have the same ones."""
    bench.serve()
    bench.say(AdapterCommand(verb="load", name="red", source="me/red"))
    found = [msgspec.structs.replace(entry(), source=f"me/red@{digit * 40}") for digit in "ab"]
    answer(bench, "w0", found[0])
    answer(bench, "w1", found[1])
    assert bench.state.adapters.entries == (found[0],)


def test_a_load_has_a_deadline_and_its_order_is_repeated(bench: Bench) -> None:
    bench.serve()
    bench.say(LOAD)
    answer(bench, "w0", entry())
    bench.take()
    bench.tick(RESEND_S + 0.2)
    assert list(ordered(bench)) == ["w1"]
    bench.tick(LOAD_S)
    assert reports(bench) == [{"error": "red was not loaded: no answer came from w1 in time"}]


def test_a_load_waits_for_no_worker_that_has_left_and_for_one_that_has_come(bench: Bench) -> None:
    bench.serve(3)
    bench.say(LOAD)
    answer(bench, "w0", entry())
    answer(bench, "w1", entry())
    bench.join("w3")
    bench.lose("w2")
    bench.tick()
    assert reports(bench) == []
    bench.say(LOAD)
    assert reports(bench) == [{"error": "red is being loaded: wait for that"}]
    answer(bench, "w3", entry())
    (body,) = reports(bench)
    assert body["state"] == "loaded"


def test_a_worker_without_the_adapters_loads_them_before_it_is_admitted(bench: Bench) -> None:
    loaded(bench)
    worker = bench.add("w2")
    bench.tell("w2", worker.hello())
    assert ordered(bench) == {"w2": SetAdapters(number=1, adapters=(entry(),))}
    bench.tell("w2", AdaptersSet(incarnation="w2.1", number=1, problem="/red is missing"))
    (refused,) = bench.state.newcomers.refused.values()
    assert refused.reason.startswith("it can't load the swarm's adapters: /red is missing; mend that, or")
    assert "w2.1" not in bench.state.workers
    bench.take()
    bench.tell("w2", worker.hello(adapters=(entry(),)))
    assert [a for a in bench.log if isinstance(a, SendToWorker) and isinstance(a.message, Welcome)]


def fail_to_load(bench: Bench, name: str, after_s: float) -> list[SetAdapters]:
    """A worker that can't load what it is ordered to repeats Hello for a while, and is not admitted. Its orders."""
    found: list[SetAdapters] = []
    until = bench.now + after_s
    while bench.now < until:
        worker = bench.workers[name]
        sent = bench.tell(name, worker.hello())
        orders = [a.message for a in sent if isinstance(a, SendToWorker) and isinstance(a.message, SetAdapters)]
        if orders:
            bench.tell(name, AdaptersSet(incarnation=worker.incarnation, number=1, problem="/red is missing"))
        found += orders
        bench.tick(2.0)
    return found


def is_member(bench: Bench, name: str) -> bool:
    worker = bench.state.workers.get(bench.workers[name].incarnation)
    return worker is not None and not worker.is_gone


def test_a_worker_that_can_t_load_an_adapter_is_ordered_ever_less_often_and_warned_of_once(bench: Bench) -> None:
    loaded(bench)
    bench.add("w2")
    orders = fail_to_load(bench, "w2", 300)
    assert 6 <= len(orders) <= 10
    notes = [a for a in bench.log if isinstance(a, WriteLog) and a.event == "worker_lacks_adapters"]
    assert len(notes) == 1
    bench.say(LOAD_BLUE)  # another set, which it may be able to load
    for name in ("w0", "w1"):
        answer(bench, name, entry(), entry("blue"))
    assert [order.adapters for order in fail_to_load(bench, "w2", 1)] == [(entry(), entry("blue"))]


def test_requests_of_a_dropped_adapter_fail_if_no_worker_can_load_it(bench: Bench) -> None:
    """Nothing but their adapter keeps the swarm from a plan: after a while the others are answered."""
    loaded(bench)
    assert refusal(bench, "red", "red") == refusal(bench, "plain", "") == ""
    bench.lose("w0")
    bench.lose("w1")
    bench.pipe.clear()
    bench.add("w2")
    fail_to_load(bench, "w2", 2 * GIVE_UP_S)
    assert not is_member(bench, "w2")  # nothing is given up that was not dropped
    assert not bench.state.requests["red"].has_ended
    bench.say(DROP)
    fail_to_load(bench, "w2", MAX_RETRY_S)
    assert bench.state.requests["red"].has_ended
    (end,) = [message for message in said(bench.log, Finished) if isinstance(message, Finished)]
    assert (end.reason, end.detail) == ("failed", "red was dropped, and worker w2 can't load it: /red is missing")
    assert is_member(bench, "w2")
    bench.join("w3")
    bench.tick(10)
    assert bench.state.plans.is_serving
    assert not bench.state.requests["plain"].has_ended
    assert bench.state.adapters.entries == ()


def test_requests_of_a_dropped_adapter_go_on_while_the_swarm_serves_or_waits_shortly(bench: Bench) -> None:
    loaded(bench)
    assert refusal(bench, "red", "red") == ""
    bench.say(DROP)
    bench.add("w2")
    fail_to_load(bench, "w2", 2 * GIVE_UP_S)
    assert not bench.state.requests["red"].has_ended
    assert not is_member(bench, "w2")
    bench.lose("w1")
    bench.pipe.clear()
    assert fail_to_load(bench, "w2", GIVE_UP_S - 4)
    assert not bench.state.requests["red"].has_ended


def test_a_problem_of_another_adapter_fails_no_request(bench: Bench) -> None:
    """A worker loads what was dropped after all others."""
    loaded(bench)
    bench.say(LOAD_BLUE)
    for name in ("w0", "w1"):
        answer(bench, name, entry(), entry("blue"))
    assert refusal(bench, "red", "red") == ""
    bench.say(DROP)
    bench.lose("w0")
    bench.lose("w1")
    bench.pipe.clear()
    bench.add("w2")
    orders = fail_to_load(bench, "w2", 3 * GIVE_UP_S)
    assert {order.adapters for order in orders} == {(entry("blue"),)}
    assert not bench.state.requests["red"].has_ended


def test_workers_drop_what_a_broker_left_that_ended_in_its_first_load(bench: Bench) -> None:
    worker = bench.add("w0")
    bench.tell("w0", worker.hello(adapters=(entry(),)))
    bench.tick()
    assert ordered(bench) == {"w0": SetAdapters(number=1, adapters=())}


def test_an_older_worker_is_refused_where_adapters_are_loaded(bench: Bench) -> None:
    loaded(bench)
    worker = bench.add("w2")
    bench.tell("w2", worker.hello(wire_versions=VERSIONS[:-1]))
    (denied,) = [a.message for a in bench.log if isinstance(a, SendToWorker) and isinstance(a.message, Denied)]
    assert "too old" in denied.reason


def test_a_dropped_adapter_stays_until_its_requests_and_steps_have_ended(bench: Bench) -> None:
    loaded(bench)
    assert refusal(bench, "r", "red") == ""
    assert bench.pipe
    bench.say(DROP)
    assert reports(bench) == [{"adapter": "red", "state": "dropping", "requests": 1}]
    assert refusal(bench, "late", "red") == "there is no adapter 'red': chain has none"
    bench.say(LOAD)
    (body,) = reports(bench)
    assert body["error"] == "red is being dropped, once the requests that use it have ended: load it then"
    bench.say(Cancel(request_id="r"))
    bench.tick()
    assert ordered(bench) == {}  # a step with its rows is in flight
    while bench.pipe:
        bench.finish()
    bench.tick()
    assert {name: order.adapters for name, order in ordered(bench).items()} == {"w0": (), "w1": ()}
    assert [action for action in bench.log if isinstance(action, WriteAdapters)][-1].adapters == ()
    assert bench.state.manifest == MODEL


def test_a_dropped_adapter_stays_until_the_journal_has_the_ends_of_its_requests(make_bench: MakeBench) -> None:
    """A broker that restarts before would have to continue them."""
    bench = make_bench(settings(requests=request_settings(has_journal=True))).serve(2)
    bench.say(LOAD)
    for name in ("w0", "w1"):
        answer(bench, name, entry())
    bench.say(submit("r", adapter="red", max_tokens=1))
    bench.feed(RequestRead("r", None))
    bench.held.add(WriteEnd)
    bench.say(DROP)
    assert bench.pipe
    while bench.pipe:
        bench.finish()
    bench.tick()
    assert bench.state.requests["r"].has_ended
    assert bench.state.adapters.entries == (entry(),)
    bench.write_out()
    bench.tick()
    assert bench.state.adapters.entries == ()


def test_the_same_request_may_come_again_by_the_adapter_s_name(bench: Bench) -> None:
    """Whether the name still means that adapter or not."""
    loaded(bench)
    assert refusal(bench, "r", "red") == ""
    assert refusal(bench, "r", "red") == ""
    bench.say(DROP)
    assert refusal(bench, "r", "red") == ""
    assert "in use for another request" in refusal(bench, "r", "")


def test_a_name_stands_for_what_is_loaded_when_the_request_is_admitted(make_bench: MakeBench) -> None:
    """A request that is looked up in the journal waits meanwhile, and the set changes."""
    bench = make_bench(settings(requests=request_settings(has_journal=True))).serve(2)
    bench.say(submit("early", adapter="red"))
    bench.say(LOAD)
    for name in ("w0", "w1"):
        answer(bench, name, entry())
    bench.feed(RequestRead("early", None))
    assert bench.state.requests["early"].submit.params.adapter == entry().key
    bench.say(submit("late", adapter="red"))
    bench.say(DROP)
    bench.take()
    (rejected,) = said(bench.feed(RequestRead("late", None)), Rejected)
    assert isinstance(rejected, Rejected)
    assert rejected.reason == "there is no adapter 'red': chain has none"


def test_who_asks_for_a_request_gets_it_with_the_adapter_s_name(bench: Bench) -> None:
    loaded(bench)
    assert refusal(bench, "r", "red") == ""
    (details,) = said(bench.say(GetRequest(request_id="r")), RequestDetails)
    assert details == RequestDetails(submit=submit("r", adapter="red"))
    (snapshot,) = said(bench.say(LookUp(question=1, request_id="r")), TokensSnapshot)
    assert isinstance(snapshot, TokensSnapshot)
    assert snapshot.submit == details.submit


def test_an_adapter_of_the_settings_is_not_dropped_and_the_error_says_what_to_do(bench: Bench) -> None:
    bench.serve(manifest=msgspec.structs.replace(MODEL, adapters=(Asset("red", 10, "d" * 64),)))
    bench.say(DROP)
    assert reports(bench) == [
        {
            "error": "red is one of worker.adapters, which are not dropped at run time: take it out of the settings of "
            "all workers, and restart them together; adapters that are to come and go: swarmctl adapters load"
        }
    ]
    assert refusal(bench, "r", "red") == ""


def test_names_that_are_taken_or_unknown_are_refused(bench: Bench) -> None:
    bench.say(LOAD)
    own = msgspec.structs.replace(MODEL, adapters=fake_manifest().assets[:0])
    bench.serve(manifest=own)
    bench.say(AdapterCommand(verb="load", name=MODEL.name, source="/x"))
    bench.say(AdapterCommand(verb="load", name="red"))
    bench.say(DROP)
    texts = [body["error"] for body in reports(bench)]
    assert texts == [
        "the name chain is taken: choose another one, or drop that adapter first",
        "name the adapter and its source",
        "there is no adapter 'red': chain has none",
    ]


def test_a_restarted_broker_has_the_adapters_of_the_journal(make_bench: MakeBench) -> None:
    """Workers that have them are admitted at once; others load them first."""
    past = JournalSnapshot(epoch=3, manifest=MODEL, adapters=(entry(),), workers=("w0",))
    bench = make_bench(settings(), past)
    assert bench.state.manifest is not None
    assert [each.name for each in bench.state.manifest.adapters] == ["red"]
    bench.join("w0")
    assert ordered(bench) == {"w0": SetAdapters(number=1, adapters=(entry(),))}
    assert bench.state.workers == {}
    bench.tell("w0", bench.workers["w0"].hello(adapters=(entry(),)))
    assert "w0.1" in bench.state.workers


def test_a_broker_that_restarts_before_the_first_plan_has_them_too(make_bench: MakeBench) -> None:
    """The journal has no model then: the first worker brings it. A model of another size needs none of them."""
    past = JournalSnapshot(adapters=(entry(),), workers=())
    bench = make_bench(settings(), past)
    bench.join("w0")
    assert ordered(bench) == {"w0": SetAdapters(number=1, adapters=(entry(),))}
    assert bench.state.workers == {}
    bench.tell("w0", bench.workers["w0"].hello(adapters=(entry(),)))
    assert bench.state.adapters.entries == (entry(),)
    bench = make_bench(settings(), past)
    other = fake_manifest(num_layers=MODEL.num_layers + 1)
    bench.join("w0", manifest=other)
    assert bench.state.manifest == other
    assert bench.state.adapters.entries == ()


def test_what_was_dropped_stays_dropped_after_a_restart(make_bench: MakeBench) -> None:
    """Until then it may be named by requests of the journal, and it goes once there are none."""
    adapters = (entry(), entry("blue", "e" * 32))
    past = JournalSnapshot(epoch=3, manifest=MODEL, adapters=adapters, dropped_adapters=(entry().key,), workers=("w0",))
    bench = make_bench(settings(), past)
    assert bench.state.manifest is not None
    assert [each.name for each in bench.state.manifest.adapters] == ["blue"]
    bench.tell("w0", bench.add("w0").hello(adapters=adapters))
    bench.tick()
    assert bench.state.adapters.entries == adapters[1:]
    assert ordered(bench) == {"w0": SetAdapters(number=2, adapters=adapters[1:])}


def test_there_is_a_limit(bench: Bench) -> None:
    bench.serve()
    state = bench.state
    state.adapters.entries = tuple(entry(f"a{number}") for number in range(MAX_ADAPTERS))
    state.set_manifest(MODEL)
    bench.say(LOAD)
    assert reports(bench) == [{"error": f"a swarm has at most {MAX_ADAPTERS} adapters: drop one first"}]


def test_another_model_has_none_of_them(make_bench: MakeBench) -> None:
    past = JournalSnapshot(epoch=3, manifest=MODEL, adapters=(entry(),), workers=("w0",))
    bench = make_bench(settings(), past)
    other = msgspec.structs.replace(MODEL, hidden_size=MODEL.hidden_size + 1)
    bench.join("w0", manifest=other)
    assert bench.state.manifest == other
    assert [action for action in bench.log if isinstance(action, WriteAdapters)][-1].adapters == ()
