"""Adapters at run time: who has which, and when requests may name them.

The journal has the set. Every member is ordered to have it, in one order that names all of it. A load ends when each
member has answered: an adapter is served once all have the same files, and is dropped everywhere if one has a problem.
A worker without the set loads it before it is admitted, so each plan consists of workers that have it. A dropped
adapter stays until the requests that have it end. They fail if no plan is possible without a worker that can't load it.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from swarm.broker.actions import Outbox, SendToClient, SendToWorker, WriteAdapters
from swarm.broker.requests.requests import RequestHandler
from swarm.broker.state import PlanPhase, Sequence, SequenceState, State, Worker
from swarm.broker.state.adapters import AdapterLoad, Candidate
from swarm.broker.state.journal_snapshot import JournalSnapshot
from swarm.wire.messages import (
    MAX_ADAPTERS,
    AdapterCommand,
    AdapterEntry,
    AdaptersSet,
    Hello,
    Json,
    Manifest,
    Report,
    SetAdapters,
)

LOAD_S = 540.0  # for a load, with what must be fetched from a hub; below the client's own limit
RESEND_S = 5.0  # between two orders to a worker that has not answered
VERSION = 4  # of the protocol, which has these orders
MAX_CANDIDATES = 64
GIVE_UP_S = 30.0  # without a plan, until requests fail whose dropped adapter a worker can't load


class AdapterManager:
    """Keeps members' adapters. Owns ``state.adapters``; appends actions to ``out``."""

    def __init__(self, state: State, requests: RequestHandler, out: Outbox) -> None:
        self._state, self._requests, self._out = state, requests, out
        self._adapters = state.adapters

    def restore(self, snapshot: JournalSnapshot) -> None:
        """Restore the set after a restart of the broker. The journal has the model only once there was a plan."""
        if snapshot.adapters:
            self._adapters.entries, self._adapters.number = snapshot.adapters, 1
            self._adapters.dropped = dict.fromkeys(snapshot.dropped_adapters)

    # --- commands ----------------------------------------------------------------------------------------------------

    def execute(self, client: bytes, message: AdapterCommand, now: float) -> None:
        name = message.name or ""
        match message.verb:
            case "load":
                if error := self._load_error(name, message.source):
                    self._send(client, {"error": error})
                    return
                self._adapters.load = AdapterLoad(AdapterEntry(name, message.source), client, now + LOAD_S)
                self._adapters.number += 1
                self._out.note("adapter_loads", adapter=name, source=message.source)
                self.advance(now)
            case "drop":
                self._drop(client, name, now)
            case "list":
                self._send(client, {"adapters": [*self._report()]})

    def _load_error(self, name: str, source: str) -> str:
        manifest = self._state.manifest
        old = next(
            (worker.name for worker in self._state.present_workers if max(worker.hello.wire_versions) < VERSION), ""
        )
        if not name or not source:
            return "name the adapter and its source"
        if manifest is None or not self._state.present_workers:
            return f"no worker has joined yet, so {name} can't be loaded"
        if self._state.journal_problem:
            return f"{name} can't be loaded, because the journal can't be written: {self._state.journal_problem}"
        if old:
            return f"worker {old} is too old to load adapters: upgrade it"
        return self._place_error(name, manifest)

    def _place_error(self, name: str, manifest: Manifest) -> str:
        """Return why there is no place for another adapter of this name now; empty if there is."""
        adapters = self._adapters
        if name in (manifest.name, *(adapter.name for adapter in manifest.adapters)):
            return f"the name {name} is taken: choose another one, or drop that adapter first"
        if any(entry.name == name for entry in adapters.entries):
            return f"{name} is being dropped, once the requests that use it have ended: load it then"
        if adapters.load is not None:
            return f"{adapters.load.entry.name} is being loaded: wait for that"
        if len(manifest.adapters) + len(adapters.dropped) >= MAX_ADAPTERS:
            return f"a swarm has at most {MAX_ADAPTERS} adapters: drop one first"
        return ""

    def _drop(self, client: bytes, name: str, now: float) -> None:
        entry = next((each for each in self._adapters.entries if each.name == name), None)
        if entry is None:
            manifest = self._state.manifest
            unknown = "no model is known yet" if manifest is None else manifest.adapter_error(name)
            reason = unknown or (
                f"{name} is one of worker.adapters, which are not dropped at run time: take it out of the settings of "
                "all workers, and restart them together; adapters that are to come and go: swarmctl adapters load"
            )
            self._send(client, {"error": reason})
        elif self._state.journal_problem:
            reason = f"the journal can't be written: {self._state.journal_problem}"
            self._send(client, {"error": f"{name} can't be dropped, because {reason}"})
        else:
            self._adapters.dropped.setdefault(entry.key, None)
            self._refresh_model()
            self._out.note("adapter_dropped", adapter=name)
            body: Json = {"adapter": name, "state": "dropping", "requests": self._num_open(entry.key)}
            self._write(client, body)
            self.advance(now)

    def _report(self) -> Iterable[Json]:
        state, adapters = self._state, self._adapters
        own = {entry.name for entry in adapters.entries}
        for asset in () if state.base_manifest is None else state.base_manifest.adapters:
            if asset.name not in own:
                yield self._describe(asset.name, "worker.adapters", "loaded", asset.name)
        for entry in adapters.entries:
            status = "dropping" if entry.key in adapters.dropped else "loaded"
            yield self._describe(entry.name, entry.source, status, entry.key) | {"bytes": sum(entry.layer_bytes)}
        if adapters.load is not None:
            entry = adapters.load.entry
            yield self._describe(entry.name, entry.source, "loading", entry.name)

    def _describe(self, name: str, source: str, status: str, adapter: str) -> Json:
        return {"adapter": name, "source": source, "state": status, "requests": self._num_open(adapter)}

    def _num_open(self, adapter: str) -> int:
        """Return the number of requests with this adapter that have not ended."""
        return len({sequence.request.id for sequence in self._open_sequences(adapter)})

    def _open_sequences(self, adapter: str) -> list[Sequence]:
        sequences = self._state.sequences.values()
        return [s for s in sequences if s.adapter == adapter and s.state is not SequenceState.ENDED]

    def _is_used(self, adapter: str) -> bool:
        """Whether a request with this adapter has not ended. Until the journal has its end, a broker that restarts may
        continue it."""
        awaits_journal = self._requests.completer.awaits_journal
        sequences = (s for s in self._state.sequences.values() if s.adapter == adapter)
        return any(s.state is not SequenceState.ENDED or awaits_journal(s.request) for s in sequences)

    def _send(self, client: bytes, body: Json) -> None:
        self._out.append(SendToClient(client, Report(what="adapters", ok="error" not in body, body=body)))

    # --- workers -----------------------------------------------------------------------------------------------------

    def may_join(self, peer: bytes, hello: Hello, now: float) -> bool:
        """Return whether a worker has the set, or another model. Otherwise order it to load the set: it sends Hello
        again."""
        base, adapters = self._state.base_manifest, self._adapters
        if hello.adapters and not adapters.number:
            adapters.number = 1  # a broker before this one ended in its first load: its workers drop that adapter
        former = adapters.candidates.pop(hello.incarnation, None)
        is_other = not adapters.fit(hello.manifest) if base is None else base.difference(hello.manifest) is not None
        order = None if is_other else adapters.order_for(hello)
        if order is None:
            adapters.ordered.pop(hello.incarnation, None)
            adapters.answers.pop(hello.incarnation, None)
            return True
        candidate = Candidate(hello, order) if former is None or former.adapters != order else former
        candidate.repeat(hello)
        adapters.candidates[hello.incarnation] = candidate
        if len(adapters.candidates) > MAX_CANDIDATES:
            del adapters.candidates[next(iter(adapters.candidates))]
        if now >= candidate.retry_at:
            self._out.append(SendToWorker(peer, SetAdapters(number=adapters.number, adapters=order)))
        return False

    def on_answer(self, peer: bytes, worker: Worker | None, message: AdaptersSet, now: float) -> None:
        """Handle the answer of a member, or of a worker that has failed to load what it must have to join."""
        if worker is not None:
            if message.number == self._adapters.number:
                self._record_answer(worker, message)
                self.advance(now)
            return
        candidate = self._adapters.candidates.get(peer.decode(errors="replace"))
        if candidate is not None and message.problem:
            self._on_problem(candidate, message.problem, now)

    def _record_answer(self, worker: Worker, message: AdaptersSet) -> None:
        """Record an answer to the latest order. Before it was a member, a worker may have got an order of this number
        without the adapter that is being loaded, and have obeyed that one last: it is ordered again."""
        wanted = {entry.name for entry in self._adapters.wanted}
        if message.problem or wanted == {entry.name for entry in message.adapters}:
            self._adapters.answers[worker.incarnation] = message
        else:
            self._adapters.answers.pop(worker.incarnation, None)

    def _on_problem(self, candidate: Candidate, problem: str, now: float) -> None:
        if candidate.fail(problem, now):
            self._out.note("worker_lacks_adapters", "warning", worker=candidate.hello.name, reason=problem)
        reason = f"it can't load the swarm's adapters: {problem}; mend that, or: swarmctl adapters drop NAME"
        self._state.newcomers.record_refusal(candidate.hello, reason, now)
        self._give_up(candidate, now)

    def _give_up(self, candidate: Candidate, now: float) -> None:
        """Fail the requests with a dropped adapter that keeps a worker out, if there has been no plan for a while: no
        request would ever be answered."""
        plans, restart = self._state.plans, self._state.restart
        is_waiting = plans.phase is PlanPhase.NONE and (restart.is_over or now >= restart.gather_until)
        since = max(candidate.failed_at, plans.members_changed_at)
        if not is_waiting or now - since < GIVE_UP_S:
            return
        held, problem = {entry.key for entry in candidate.hello.adapters}, candidate.problem[:1000]
        for entry in candidate.adapters:
            if entry.key in self._adapters.dropped and entry.key not in held:
                reason = f"{entry.name} was dropped, and worker {candidate.hello.name} can't load it: {problem}"
                for sequence in self._open_sequences(entry.key):
                    self._requests.completer.end(sequence, "failed", now, reason)

    def advance(self, now: float) -> None:
        """Take the next steps: drop what no request has any more, order what members lack, and end a load."""
        if self._adapters.number:
            self._drop_unused()
            self._send_orders(now)
            self._settle(now)

    def _send_orders(self, now: float) -> None:
        adapters, members = self._adapters, self._state.present_workers
        present = {worker.incarnation for worker in members}
        adapters.ordered = {key: value for key, value in adapters.ordered.items() if key in present}
        adapters.answers = {key: value for key, value in adapters.answers.items() if key in present}
        for worker in members:
            number, sent_at = adapters.ordered.get(worker.incarnation, (0, 0.0))
            is_due = worker.incarnation not in adapters.answers and now - sent_at >= RESEND_S
            if (number != adapters.number or is_due) and max(worker.hello.wire_versions) >= VERSION:
                adapters.ordered[worker.incarnation] = adapters.number, now
                adapters.answers.pop(worker.incarnation, None)
                self._out.append(
                    SendToWorker(worker.peer, SetAdapters(number=adapters.number, adapters=adapters.wanted))
                )

    def _settle(self, now: float) -> None:
        """End the load if all members have answered, one has a problem, or its time is over."""
        load = self._adapters.load
        if load is None:
            return
        entries: dict[str, AdapterEntry] = {}  # by worker's name
        for worker in self._state.present_workers:
            answer = self._adapters.answers.get(worker.incarnation)
            if answer is not None and answer.problem:
                self._fail(load, f"worker {worker.name}: {answer.problem}")
                return
            for entry in () if answer is None else answer.adapters:
                if entry.name == load.entry.name:
                    entries[worker.name] = entry
        missing = [worker.name for worker in self._state.present_workers if worker.name not in entries]
        if missing and now < load.deadline:
            return
        if missing or not entries:
            self._fail(load, f"no answer came from {', '.join(missing) or 'any worker'} in time")
            return
        (first, entry), *others = entries.items()
        # two commits on a hub may have the same files
        unlike = (name for name, found in others if replace(found, source=entry.source) != entry)
        if other := next(unlike, ""):
            remedy = "copy the same ones to all hosts, or name an adapter on a hub"
            self._fail(load, f"workers {first} and {other} have different files of it: {remedy}")
            return
        base = self._state.base_manifest
        if base is None or not entry.digest or len(entry.layer_bytes) != base.num_layers:
            self._fail(load, f"worker {first} does not describe it as this build would: install the same version")
            return
        self._adapters.entries = (*self._adapters.entries, entry)
        self._adapters.load = None
        self._refresh_model()
        self._out.note("adapter_loaded", adapter=entry.name, digest=entry.digest, bytes=sum(entry.layer_bytes))
        self._write(load.client, {"adapter": entry.name, "state": "loaded", "bytes": sum(entry.layer_bytes)})

    def _fail(self, load: AdapterLoad, reason: str) -> None:
        """End a load without the adapter. Members that have loaded it drop it."""
        self._adapters.load = None
        self._adapters.number += 1
        self._send_orders(self._state.now)
        self._out.note("adapter_not_loaded", "error", adapter=load.entry.name, reason=reason)
        self._send(load.client, {"error": f"{load.entry.name} was not loaded: {reason}"})

    def _drop_unused(self) -> None:
        """Drop adapters that no request has, nor any step in flight. A load in progress keeps its order's number."""
        adapters, state = self._adapters, self._state
        if not adapters.dropped or adapters.load is not None:
            return
        for key, after in list(adapters.dropped.items()):
            if after is None and not self._is_used(key):
                adapters.dropped[key] = state.next_step
        first = min(state.in_flight, default=state.next_step)
        gone = {key for key, after in adapters.dropped.items() if after is not None and first >= after}
        if gone:
            adapters.entries = tuple(entry for entry in adapters.entries if entry.key not in gone)
            adapters.dropped = {key: after for key, after in adapters.dropped.items() if key not in gone}
            adapters.number += 1
            self._refresh_model()
            self._write()

    # --- the journal and the model -----------------------------------------------------------------------------------

    def forget(self) -> None:
        """Forget the set: the swarm has another model."""
        if self._adapters.entries:
            self._adapters.entries, self._adapters.dropped = (), {}
            self._adapters.number += 1
            self._write()

    def _refresh_model(self) -> None:
        self._state.set_manifest(self._state.base_manifest)

    def _write(self, client: bytes = b"", body: Json | None = None) -> None:
        """Write the set to the journal; then the client gets its answer."""
        self._adapters.ticket += 1
        if body is not None:
            self._adapters.unwritten[self._adapters.ticket] = client, body
        self.write_again()

    def write_again(self) -> None:
        """Write the set, also to a journal that was started over, if there ever was one."""
        adapters = self._adapters
        if not adapters.number:
            return
        self._out.append(WriteAdapters(adapters.ticket, adapters.entries, tuple(adapters.dropped)))

    def on_written(self, ticket: int) -> None:
        for number in [number for number in self._adapters.unwritten if number <= ticket]:
            self._send(*self._adapters.unwritten.pop(number))
