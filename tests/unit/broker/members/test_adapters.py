"""Adapters at run time: which workers are ordered to have which, and when requests may name them."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from swarm.broker.actions import SendToWorker, WriteAdapters
from swarm.broker.members.adapters import LOAD_S, RESEND_S
from swarm.broker.state.journal_snapshot import JournalSnapshot
from swarm.testing import fake_manifest
from swarm.wire.messages import (
    Accepted,
    AdapterCommand,
    AdapterEntry,
    AdaptersSet,
    Cancel,
    Denied,
    Json,
    Rejected,
    Report,
    SetAdapters,
    Welcome,
)
from swarm.wire.versions import VERSIONS
from tests.unit.broker.bench import Bench, said, settings, submit

MakeBench = Callable[..., Bench]
LOAD = AdapterCommand(verb="load", name="red", source="/red")
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


def test_the_same_request_may_come_again_by_the_adapter_s_name(bench: Bench) -> None:
    """Whether the name still means that adapter or not."""
    loaded(bench)
    assert refusal(bench, "r", "red") == ""
    assert refusal(bench, "r", "red") == ""
    bench.say(DROP)
    assert refusal(bench, "r", "red") == ""
    assert "in use for another request" in refusal(bench, "r", "")


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


def test_another_model_has_none_of_them(make_bench: MakeBench) -> None:
    past = JournalSnapshot(epoch=3, manifest=MODEL, adapters=(entry(),), workers=("w0",))
    bench = make_bench(settings(), past)
    other = msgspec.structs.replace(MODEL, hidden_size=MODEL.hidden_size + 1)
    bench.join("w0", manifest=other)
    assert bench.state.manifest == other
    assert [action for action in bench.log if isinstance(action, WriteAdapters)][-1].adapters == ()
