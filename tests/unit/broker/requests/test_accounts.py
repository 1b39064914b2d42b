"""Clients that came by keys: the key is the tenant, and what is another tenant's does not exist."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from swarm.broker.actions import Action, ReadList, ReadRequest, SendToClient, WriteAcceptance, WriteEnd
from swarm.broker.events import ClientAccount, ClientUnreachable, ListRead, RequestRead
from swarm.broker.journal.reader import JournalReader
from swarm.broker.journal.store import JournalStore, Timestamp
from swarm.broker.reports.ended_requests import build_row
from swarm.broker.state.journal_snapshot import JournalSnapshot, RequestRecord, SequenceRecord
from swarm.wire.messages import (
    Accepted,
    Ack,
    Attach,
    Cancel,
    Detach,
    Finished,
    GetRequest,
    Query,
    Rejected,
    Report,
    RequestDetails,
    RequestMessage,
    Stop,
    Submit,
)
from tests.unit.broker.bench import Bench, request_settings, said, settings, submit

ALICE, BOB = ClientAccount("key:alice"), ClientAccount("key:bob")
GATEWAY = ClientAccount("key:gate", may_name_tenants=True)
A, B, G = b"alice", b"bob", b"gate"
JOURNALLED = settings(requests=request_settings(has_journal=True))

ABOUT: tuple[Callable[[str], RequestMessage], ...] = (
    lambda name: GetRequest(request_id=name),
    lambda name: Attach(request_id=name, next_index=(0,)),
    lambda name: Attach(request_id=name, next_index=(0, 0)),
    lambda name: Ack(request_id=name, index=0, next_index=1),
    lambda name: Stop(request_id=name, index=0, at_index=0),
    lambda name: Cancel(request_id=name),
    lambda name: Detach(request_id=name),
)


def told(actions: list[Action], name: str) -> list[str]:
    """What is said and asked for, whatever the request is called."""
    return [repr(action).replace(repr(name), "ID") for action in actions]


def record(of: Submit, tenant: str, *tokens: int, ended_age_s: float | None = 1.0) -> RequestRecord:
    reason = None if ended_age_s is None else "length"
    sequence = SequenceRecord(1, 0, list(tokens), [()] * len(tokens), [()] * len(tokens), reason)  # type: ignore[arg-type]
    return RequestRecord(of, tenant, 2.0, [sequence], ended_age_s)


# --- whose a request is ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("account", "named", "tenant"),
    [
        (ALICE, "", "key:alice"),
        (ALICE, "key:bob", "key:alice"),
        (GATEWAY, "", "key:gate"),
        (GATEWAY, "someone", "key:gate/someone"),
        (None, "someone", "someone"),
        (None, "", f"client {A.hex()}"),
    ],
)
def test_the_key_is_the_tenant(serving: Bench, account: ClientAccount | None, named: str, tenant: str) -> None:
    """What a client says of itself counts only if it speaks for others, and then below its own name."""
    (written, *_) = serving.say(submit(tenant=named), A, account)
    assert isinstance(written, WriteAcceptance)
    assert written.tenant == serving.state.requests["r"].tenant == tenant


def test_no_tenant_is_another_by_how_it_begins() -> None:
    """Only who speaks for others has more than one, and each begins with its own and a stroke."""
    assert GATEWAY.owns("key:gate/a")
    assert not GATEWAY.owns("key:gates")
    assert not ALICE.owns("key:alice/a")


# --- another tenant's does not exist ---------------------------------------------------------------------------------


@pytest.mark.parametrize("about", ABOUT)
def test_another_tenants_request_is_as_an_unknown_one(serving: Bench, about: Callable[..., RequestMessage]) -> None:
    """Word for word; and nothing happens to it."""
    serving.say(submit(), A, ALICE)
    before = serving.sequence().state
    expected = told(serving.say(about("q"), B, BOB), "q")
    assert told(serving.say(about("r"), B, BOB), "r") == expected
    assert (serving.sequence().state, serving.state.requests["r"].client) == (before, A)


@pytest.mark.parametrize("about", ABOUT)
@pytest.mark.parametrize("is_kept", [True, False])
def test_nor_is_one_that_only_the_journal_has(
    make_bench: Callable[..., Bench], about: Callable[..., RequestMessage], is_kept: bool
) -> None:
    """It is looked up, as any other, and then not told, nor taken into memory."""
    bench = make_bench(JOURNALLED).serve(2)
    for name in ("r", "q"):
        asked = bench.say(about(name), B, BOB)
        if ReadRequest(name) not in asked:
            return  # nothing of it is ever looked up
        found = record(submit(name), ALICE.tenant, 7) if name == "r" and is_kept else None
        answers = told(bench.feed(RequestRead(name, found)), name)
        if name == "r":
            expected = answers
    assert answers == expected
    assert bench.state.requests == {}


def test_an_id_that_another_tenant_has_is_taken(serving: Bench) -> None:
    """Also with the very same words: neither attached nor told more than that."""
    serving.say(submit(), A, ALICE)
    for again in (submit(), submit(num_prompt=4)):
        (answer,) = said(serving.say(again, B, BOB))
        assert isinstance(answer, Rejected)
        assert (answer.code, answer.reason) == ("conflict", "request id r is taken: choose a new one")
    assert serving.state.requests["r"].client == A
    # Its own tenant attaches.
    assert Accepted(request_id="r") in said(serving.say(submit(), b"another connection", ALICE))


def test_an_id_that_the_journal_has_of_another_tenant_is_taken(make_bench: Callable[..., Bench]) -> None:
    """The same; unless that one was taken back."""
    bench = make_bench(JOURNALLED).serve(2)
    assert bench.say(submit(), B, BOB) == [ReadRequest("r")]
    (answer,) = said(bench.feed(RequestRead("r", record(submit(), ALICE.tenant, 7))))
    assert isinstance(answer, Rejected)
    assert (answer.code, answer.reason) == ("conflict", "request id r is taken: choose a new one")
    bench.say(submit(), B, BOB)
    taken_back = record(submit(), ALICE.tenant)
    taken_back.sequences[0].reason = "cancelled"
    bench.feed(RequestRead("r", taken_back))
    assert Accepted(request_id="r") in said(bench.log)
    assert bench.state.requests["r"].tenant == BOB.tenant


def test_two_tenants_ask_for_the_same_id_at_once(make_bench: Callable[..., Bench]) -> None:
    """The first has it."""
    bench = make_bench(JOURNALLED).serve(2)
    bench.say(submit(), A, ALICE)
    bench.say(submit(), B, BOB)
    actions = bench.feed(RequestRead("r", None))
    assert [a.client for a in actions if isinstance(a, SendToClient) and isinstance(a.message, Rejected)] == [B]
    assert bench.state.requests["r"].tenant == ALICE.tenant


def test_its_own_are_found_again_after_a_restart(make_bench: Callable[..., Bench]) -> None:
    """By the tenant that the journal keeps."""
    past = JournalSnapshot(requests=(record(submit(), ALICE.tenant, 7), record(submit("g"), "key:gate/someone", 7)))
    past.requests[1].sequences[0].id = 2
    bench = make_bench(JOURNALLED, past)
    assert ReadRequest("r") in bench.say(GetRequest(request_id="r"), B, BOB)
    (report,) = said(bench.feed(RequestRead("r", past.requests[0])))
    assert isinstance(report, Report)
    assert "not known" in str(report.body["error"])
    for name, client, account in (("r", A, ALICE), ("g", G, GATEWAY), ("r", b"local", None)):
        (answer,) = said(bench.say(GetRequest(request_id=name), client, account))
        assert isinstance(answer, RequestDetails)
        assert answer.submit.request_id == name


def test_who_may_do_all_reads_everybodys(serving: Bench) -> None:
    """Whoever is on the broker's machine, and admins."""
    serving.say(submit(), A, ALICE)
    serving.say(Attach(request_id="r", next_index=(0,)), b"local")
    serving.run_dry()
    assert [a.client for a in serving.log if isinstance(a, SendToClient) and isinstance(a.message, Finished)] == [
        b"local"
    ]


def test_what_became_of_a_request_is_told_to_its_own(make_bench: Callable[..., Bench]) -> None:
    """Without a journal it is told that it was not kept; another tenant hears that there is none."""
    bench = make_bench(settings(requests=request_settings(retain_s=1.0))).serve(2)
    bench.say(submit(), A, ALICE)
    bench.run_dry()
    bench.tick(2.0)
    own, other, unknown = (
        said(bench.say(Attach(request_id=name, next_index=(0,)), client, account))[0]
        for name, client, account in (("r", A, ALICE), ("r", B, BOB), ("q", B, BOB))
    )
    assert isinstance(own, Rejected)
    assert "is not kept any more" in own.reason
    assert isinstance(other, Rejected)
    assert isinstance(unknown, Rejected)
    assert other.reason == unknown.reason


def test_who_comes_by_the_name_of_one_that_is_gone_is_told_nothing(make_bench: Callable[..., Bench]) -> None:
    """What that one asked for is answered to nobody."""
    bench = make_bench(JOURNALLED).serve(2)
    bench.say(GetRequest(request_id="r"), A, ALICE)
    bench.feed(ClientUnreachable(A))
    assert bench.feed(RequestRead("r", record(submit(), ALICE.tenant, 7))) == []


# --- reports ---------------------------------------------------------------------------------------------------------


def body(bench: Bench, query: Query, client: bytes, account: ClientAccount | None) -> dict[str, object]:
    (report,) = said(bench.say(query, client, account))
    assert isinstance(report, Report)
    return report.body


def test_requests_lists_its_own(serving: Bench) -> None:
    """And traces them: another's is not known, not even by how its id begins."""
    serving.say(submit("ra"), A, ALICE)
    serving.say(submit("rb"), B, BOB)
    serving.say(submit("rg", tenant="x"), G, GATEWAY)

    def listed(account: ClientAccount | None) -> list[str]:
        rows = body(serving, Query(what="requests"), b"c", account)["requests"]
        return [row["request_id"] for row in rows]  # type: ignore[attr-defined]

    assert (listed(ALICE), listed(BOB), listed(GATEWAY), listed(None)) == (["ra"], ["rb"], ["rg"], ["ra", "rb", "rg"])
    one = Query(what="requests", request_id="rb")
    found = [body(serving, one, b"c", account)["requests"] for account in (BOB, None, ALICE)]
    assert [[row["request_id"] for row in rows] for rows in found] == [["rb"], ["rb"], []]  # type: ignore[attr-defined]
    assert body(serving, Query(what="requests", request_id="r"), B, BOB)["requests"] == []  # no beginning of one
    assert body(serving, Query(what="trace", request_id="r"), A, ALICE)["request_id"] == "ra"
    hidden = body(serving, Query(what="trace", request_id="rb"), A, ALICE)["error"]
    unknown = body(serving, Query(what="trace", request_id="xx"), A, ALICE)["error"]
    assert str(hidden).replace("rb", "xx") == unknown
    serving.run_dry()
    serving.say(Ack(request_id="rb", index=0, next_index=8), B, BOB)
    assert "error" in body(serving, Query(what="trace", request_id="rb"), A, ALICE)
    assert body(serving, Query(what="trace", request_id="rb"), B, BOB)["request_id"] == "rb"


def test_stats_names_no_other_tenant(serving: Bench) -> None:
    """How many wait in all is told."""
    serving.say(submit("ra"), A, ALICE)
    serving.say(submit("rb"), B, BOB)
    queue = body(serving, Query(what="stats"), A, ALICE)["queue"]
    assert isinstance(queue, dict)
    assert (list(queue["tenants"]), queue["num_tenants"]) == (["key:alice"], 1)
    queue = body(serving, Query(what="stats"), b"local", None)["queue"]
    assert isinstance(queue, dict)
    assert queue["num_tenants"] == 2


def test_what_the_journal_lists_is_asked_for_by_account(make_bench: Callable[..., Bench]) -> None:
    """And what comes of it is put beside what memory has of it."""
    bench = make_bench(JOURNALLED).serve(2)
    query = Query(what="requests")
    assert bench.say(query, A, ALICE) == [ReadList(A, query, ALICE)]
    bench.say(submit("rb"), B, BOB)
    bench.feed(RequestRead("rb", None))
    row = build_row(record(submit(), ALICE.tenant, 7))
    (report,) = said(bench.feed(ListRead(A, query, (row,), account=ALICE)))
    assert isinstance(report, Report)
    assert (report.body["requests"], [kept["request_id"] for kept in report.body["kept"]]) == ([], ["r"])  # type: ignore[attr-defined]
    trace = Query(what="trace", request_id="rb")
    assert bench.say(trace, A, ALICE) == [ReadList(A, trace, ALICE)]


def test_the_journals_reader_finds_its_own(tmp_path: Path) -> None:
    """Lists and traces; others neither fill a list nor make an id's beginning mean several."""
    store = JournalStore(tmp_path)
    for number, (name, tenant) in enumerate(
        [("ra", "key:alice"), ("rb", "key:bob"), ("rg", "key:gate/x"), ("rh", "key:gate"), ("ri", "key:gates/x")], 1
    ):
        writes = [WriteAcceptance(submit(name), (number,), tenant), WriteEnd(number, "length", 0)]
        store.write(writes, Timestamp.now())
    reader = JournalReader(store.open_read_only(), lambda found: None, lambda error: None)

    def names(account: ClientAccount | None, query: Query) -> set[object]:
        found = reader._answer(ReadList(A, query, account))
        assert isinstance(found, ListRead)
        assert found.account == account
        return {row["request_id"] for row in found.rows}

    everything = Query(what="requests")
    assert names(ALICE, everything) == {"ra"}
    assert names(GATEWAY, everything) == {"rg", "rh"}
    assert len(names(None, everything)) == 5
    assert names(ALICE, Query(what="trace", request_id="r")) == {"ra"}
    assert names(ALICE, Query(what="trace", request_id="rb")) == set()
    assert names(BOB, Query(what="trace", request_id="rb")) == {"rb"}
    assert len(list(store.list_ended(Timestamp.now(), 1, ALICE))) == 1
    reader.store.close()
    store.close()
