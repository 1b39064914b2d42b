"""Query handler: answers everything that clients and ``swarmctl`` may ask apart from requests: reports, the model and
its files, stopping a worker.

Ended requests may only be in the journal; then it is searched, and the answer waits. Answers that need a plan preview
wait too (``plan_preview``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from swarm.broker.actions import Outbox, ReadList, SayClient, ShowOwnSettings
from swarm.broker.events import ListRead, Solved
from swarm.broker.members.roster import Members
from swarm.broker.questions import absent, settings_report, status
from swarm.broker.questions.helm import Helm
from swarm.broker.questions.what_if import Departure, Suppositions
from swarm.broker.recovery.procedure import Procedure
from swarm.broker.reports import ended
from swarm.broker.reports.statistics import Latencies, PipelineStatistics
from swarm.broker.reports.trace import Tracer
from swarm.broker.requests.endings import RequestSettings
from swarm.broker.state import State, Worker
from swarm.broker.state.archive import Account
from swarm.broker.state.workers import Judgement
from swarm.wire.greeting import Greeting
from swarm.wire.messages import (
    ASSET_PART_BYTES,
    AssetPart,
    Description,
    GetAsset,
    Json,
    Query,
    Report,
    ShowSettings,
    Steer,
    StopWorker,
)
from swarm.wire.schema import schema
from swarm.wire.tensors import pack_bytes

_TELLS_AGAIN = 2  # version of the protocol since which a worker can be ordered to restart


class Inquiries:
    """Answers queries; methods append messages to ``out``. ``version``: the broker's own."""

    def __init__(
        self,
        state: State,
        settings: RequestSettings,
        out: Outbox,
        *,
        version: str,
        procedure: Procedure,
        members: Members,
        tracer: Tracer,
        statistics: PipelineStatistics,
        latencies: Latencies,
        judgements: Callable[[float], Mapping[str, Judgement]],
    ) -> None:
        self._state = state
        self._settings = settings
        self._out = out
        self._version = version
        self._procedure = procedure
        self._members = members
        self._tracer = tracer
        self._statistics = statistics
        self._latencies = latencies
        self._judgements = judgements
        self._suppositions = Suppositions(state, procedure.wanted, out)
        self._helm = Helm(state, out, self._suppositions, procedure)

    def query(self, client: bytes, query: Query, account: Account | None, now: float) -> None:
        """Answer a query, after searching the journal if ended requests may only be there. With an account, only its
        own requests are shown."""
        if query.what == "plan":
            self._suppositions.plan(client, query)
            return
        if query.what == "requests" and not query.request_id and self._settings.has_journal:
            self._out.append(ReadList(client, query, account))
            return
        is_unknown = query.what == "trace" and not self._tracer.knows(query.request_id, self._state.requests, account)
        if self._settings.has_journal and is_unknown:
            self._out.append(ReadList(client, query, account))
            return
        self._tell(client, query, self._report(query, account, now))

    def found(self, found: ListRead | Solved, now: float) -> None:
        """Answer a query with the result that it was waiting for."""
        if isinstance(found, Solved):
            self._suppositions.solved(found)
        else:
            self._list_read(found, now)

    def _list_read(self, read: ListRead, now: float) -> None:
        query, body = read.query, self._report(read.query, read.account, now)
        if query.what != "trace":
            body |= {"kept": ended.listed(read.rows, self._state.requests)}
        elif "error" in body:  # otherwise it has come into memory meanwhile, which has newer data
            body = ended.trace(query.request_id, read.rows)
        if read.problem:
            body |= {"problem": read.problem}
        self._tell(read.client, query, body)

    def _tell(self, client: bytes, query: Query, body: Json) -> None:
        self._out.append(SayClient(client, Report(what=query.what, ok="error" not in body, body=body)))

    def _report(self, query: Query, account: Account | None, now: float) -> Json:
        match query.what:
            case "trace":
                return self._tracer.report(query.request_id, self._state.requests, now, account)
            case "recoveries":
                return self._state.recoveries.report(now)
            case "stats":
                return status.stats(self._state, self._statistics, self._latencies, now, account)
            case "nodes":
                return status.nodes(self._state, self._judgements(now), self._members.vigil.vital_signs, now)
            case "requests":
                return status.requests(self._state, now, account, query.request_id)
            case _:
                return status.status(self._state, now) | self._build()

    def _build(self) -> Json:
        ours = Greeting(schema=schema())
        return {"version": self._version, "protocol": list(ours.versions), "messages": ours.schema}

    def describe(self, client: bytes) -> None:
        """Send the model and the limits."""
        book, manifest = self._state.book, self._state.manifest
        answer = Description(
            manifest=manifest,
            state=book.phase.value if not book.serving else "serving",
            waits_for=book.waits_for,
            max_context=manifest.context if manifest else 0,
            max_queue=self._settings.max_queue,
            swarm_version=self._version,
        )
        self._out.append(SayClient(client, answer))

    def send_asset(self, client: bytes, message: GetAsset) -> None:
        data = self._state.assets.get(message.name)
        if data is None:
            body: dict[str, object] = {"error": f"this swarm has no asset {message.name!r}"}
            self._out.append(SayClient(client, Report(what="asset", ok=False, body=body)))
            return
        part = data[message.offset : message.offset + ASSET_PART_BYTES]
        answer = AssetPart(name=message.name, offset=message.offset, total=len(data), payload=pack_bytes(part))
        self._out.append(SayClient(client, answer, part))

    def steer(self, client: bytes, message: Steer) -> None:
        self._helm.steer(client, message)

    def show_settings(self, client: bytes, message: ShowSettings) -> None:
        """Send a worker's settings as reported when it joined. The broker's own settings come from its process."""
        if not message.worker:
            self._out.append(ShowOwnSettings(client))
            return
        worker = absent.member(self._state, message.worker)
        if worker is None:
            body: Json = {"error": absent.why_none(self._state, message.worker)}
        elif not worker.hello.settings:
            body = {"error": f"{message.worker} runs an older version, which does not report its settings"}
        else:
            body = settings_report.of_worker(message.worker, worker.hello.settings)
        self._out.append(SayClient(client, Report(what="settings", ok="error" not in body, body=body)))

    def stop_worker(self, client: bytes, message: StopWorker) -> None:
        """Stop a worker if a plan without it is possible; with ``force``, stop it without that test."""
        worker = absent.member(self._state, message.worker)
        if worker is None:
            self._stopped(client, {"error": absent.why_none(self._state, message.worker)})
            return
        if message.again:
            if max(worker.hello.wire_versions) < _TELLS_AGAIN:
                error = (
                    f"{worker.name} runs an older version, which can't be restarted remotely: restart it where it runs"
                )
                self._stopped(client, {"error": error})
                return
            worker.come_again()  # stays set even if the worker is not released now

        def told(shortage: str, problem: str) -> None:
            self._stop(client, message, worker, shortage, problem)

        if message.force:
            self._members.let_go(worker, self._state.now)
            self._stopped(client, {"worker": worker.name, "state": worker.state.value})
        else:
            self._suppositions.departure(Departure(worker, told))

    def _stop(self, client: bytes, asked: StopWorker, worker: Worker, shortage: str, problem: str) -> None:
        """Stop a worker if a plan without it is possible; otherwise send the reason."""
        if (shortage or problem) and not worker.is_gone:
            reason = f"it could not be determined whether the swarm can do without {worker.name}: {problem}"
            if shortage:
                reason = f"the swarm can't do without {worker.name}, it would wait for {shortage}"
            self._stopped(
                client, {"error": f"{reason} (--force {'restarts it' if asked.again else 'stops it'} anyway)"}
            )
            return
        self._members.leave(worker, self._state.now)
        self._stopped(client, {"worker": worker.name, "state": worker.state.value})

    def _stopped(self, client: bytes, body: Json) -> None:
        self._out.append(SayClient(client, Report(what="stop", ok="error" not in body, body=body)))
