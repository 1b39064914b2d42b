"""Query handler: answers everything that clients and ``swarmctl`` may ask apart from requests: reports, the model and
its files, stopping a worker.

Ended requests may only be in the journal; then it is searched, and the answer waits. Answers that need a plan preview
wait too (``plan_preview``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from swarm.broker.actions import Outbox, ReadList, SendToClient, ShowOwnSettings
from swarm.broker.admin import departed, status
from swarm.broker.admin.operator import OperatorCommands
from swarm.broker.admin.plan_preview import PlanPreviews, WorkerDeparture
from swarm.broker.events import ListRead, Solved
from swarm.broker.members.membership import WorkerMembership
from swarm.broker.recovery.reconfiguration import Reconfiguration
from swarm.broker.reports import ended_requests
from swarm.broker.reports.statistics import PipelineStatistics, RequestLatencies
from swarm.broker.reports.trace import RequestTracer
from swarm.broker.requests.completion import RequestSettings
from swarm.broker.speculation.drafts import Drafts
from swarm.broker.speculation.speculation import Speculation
from swarm.broker.state import State, Worker
from swarm.broker.state.ended_requests import ClientAccount
from swarm.broker.state.workers import Judgement
from swarm.config.display import ShownSetting, settings_report
from swarm.wire.greeting import Greeting
from swarm.wire.messages import (
    ASSET_PART_BYTES,
    AssetPart,
    Description,
    GetAsset,
    Json,
    PlanCommand,
    Query,
    Report,
    Setting,
    ShowSettings,
    StopWorker,
)
from swarm.wire.schema import schema
from swarm.wire.tensors import pack_bytes

_RESTART_VERSION = 2  # version of the protocol since which a worker can be ordered to restart


class QueryHandler:
    """Answers queries; methods append messages to ``out``. ``version``: the broker's own."""

    def __init__(
        self,
        state: State,
        settings: RequestSettings,
        out: Outbox,
        *,
        version: str,
        procedure: Reconfiguration,
        members: WorkerMembership,
        tracer: RequestTracer,
        statistics: PipelineStatistics,
        latencies: RequestLatencies,
        judgements: Callable[[float], Mapping[str, Judgement]],
        speculation: Speculation,
        drafts: Drafts | None = None,
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
        self._speculation = speculation
        self._drafts = drafts
        self._previews = PlanPreviews(state, procedure.target, out)
        self._operator = OperatorCommands(state, out, self._previews, procedure)

    def query(self, client: bytes, query: Query, account: ClientAccount | None, now: float) -> None:
        """Answer a query, after searching the journal if ended requests may only be there. With an account, only its
        own requests are shown."""
        if query.what == "plan":
            self._previews.preview(client, query)
            return
        if query.what == "requests" and not query.request_id and self._settings.has_journal:
            self._out.append(ReadList(client, query, account))
            return
        is_unknown = query.what == "trace" and not self._tracer.has_trace(
            query.request_id, self._state.requests, account
        )
        if self._settings.has_journal and is_unknown:
            self._out.append(ReadList(client, query, account))
            return
        self._send_report(client, query, self._report(query, account, now))

    def on_result(self, result: ListRead | Solved, now: float) -> None:
        """Answer a query with the result that it was waiting for."""
        if isinstance(result, Solved):
            self._previews.on_solved(result)
        else:
            self._on_list_read(result, now)

    def _on_list_read(self, read: ListRead, now: float) -> None:
        query, body = read.query, self._report(read.query, read.account, now)
        if query.what != "trace":
            body |= {"kept": ended_requests.exclude_in_memory(read.rows, self._state.requests)}
        elif "error" in body:  # otherwise it has come into memory meanwhile, which has newer data
            body = ended_requests.build_trace(query.request_id, read.rows)
        if read.problem:
            body |= {"problem": read.problem}
        self._send_report(read.client, query, body)

    def _send_report(self, client: bytes, query: Query, body: Json) -> None:
        self._out.append(SendToClient(client, Report(what=query.what, ok="error" not in body, body=body)))

    def _report(self, query: Query, account: ClientAccount | None, now: float) -> Json:
        match query.what:
            case "trace":
                return self._tracer.report(query.request_id, self._state.requests, now, account)
            case "recoveries":
                return self._state.recoveries.report(now)
            case "stats":
                body = status.report_stats(
                    self._state,
                    self._statistics,
                    self._latencies,
                    speculation=self._speculation,
                    now=now,
                    account=account,
                )
                return body if self._drafts is None else body | {"draft": self._drafts.report()}
            case "nodes":
                return status.report_nodes(self._state, self._judgements(now), self._members.monitor.vital_signs, now)
            case "requests":
                return status.report_requests(self._state, now, account, query.request_id)
            case _:
                return status.report_status(self._state, now) | self._build_info()

    def _build_info(self) -> Json:
        ours = Greeting(schema=schema())
        return {"version": self._version, "protocol": list(ours.versions), "messages": ours.schema}

    def describe(self, client: bytes) -> None:
        """Send the model and the limits."""
        plans, manifest = self._state.plans, self._state.manifest
        answer = Description(
            manifest=manifest,
            state=plans.phase.value if not plans.is_serving else "serving",
            waits_for=plans.waits_for,
            max_context=manifest.context if manifest else 0,
            max_queue=self._settings.max_queue,
            swarm_version=self._version,
        )
        self._out.append(SendToClient(client, answer))

    def send_asset(self, client: bytes, message: GetAsset) -> None:
        data = self._state.assets.get(message.name)
        if data is None:
            body: dict[str, object] = {"error": f"this swarm has no asset {message.name!r}"}
            self._out.append(SendToClient(client, Report(what="asset", ok=False, body=body)))
            return
        part = data[message.offset : message.offset + ASSET_PART_BYTES]
        answer = AssetPart(name=message.name, offset=message.offset, total=len(data), payload=pack_bytes(part))
        self._out.append(SendToClient(client, answer, part))

    def steer(self, client: bytes, message: PlanCommand) -> None:
        self._operator.execute(client, message)

    def show_settings(self, client: bytes, message: ShowSettings) -> None:
        """Send a worker's settings as reported when it joined. The broker's own settings come from its process."""
        if not message.worker:
            self._out.append(ShowOwnSettings(client))
            return
        worker = departed.find_member(self._state, message.worker)
        if worker is None:
            body: Json = {"error": departed.absence_reason(self._state, message.worker)}
        elif not worker.hello.settings:
            body = {"error": f"{message.worker} runs an older version, which does not report its settings"}
        else:
            body = _report_settings(message.worker, worker.hello.settings)
        self._out.append(SendToClient(client, Report(what="settings", ok="error" not in body, body=body)))

    def stop_worker(self, client: bytes, message: StopWorker) -> None:
        """Stop a worker if a plan without it is possible; with ``force``, stop it without that test."""
        worker = departed.find_member(self._state, message.worker)
        if worker is None:
            self._send_stop_report(client, {"error": departed.absence_reason(self._state, message.worker)})
            return
        if message.again:
            if max(worker.hello.wire_versions) < _RESTART_VERSION:
                error = (
                    f"{worker.name} runs an older version, which can't be restarted remotely: restart it where it runs"
                )
                self._send_stop_report(client, {"error": error})
                return
            worker.request_restart()  # stays set even if the worker is not released now

        def on_answer(shortage: str, problem: str) -> None:
            self._stop(client, message, worker, shortage, problem)

        if message.force:
            self._members.release(worker, self._state.now)
            self._send_stop_report(client, {"worker": worker.name, "state": worker.state.value})
        else:
            self._previews.ask_departure(WorkerDeparture(worker, on_answer))

    def _stop(self, client: bytes, message: StopWorker, worker: Worker, shortage: str, problem: str) -> None:
        """Stop a worker if a plan without it is possible; otherwise send the reason."""
        if (shortage or problem) and not worker.is_gone:
            reason = f"it could not be determined whether the swarm can do without {worker.name}: {problem}"
            if shortage:
                reason = f"the swarm can't do without {worker.name}, it would wait for {shortage}"
            self._send_stop_report(
                client, {"error": f"{reason} (--force {'restarts it' if message.again else 'stops it'} anyway)"}
            )
            return
        self._members.start_leave(worker, self._state.now)
        self._send_stop_report(client, {"worker": worker.name, "state": worker.state.value})

    def _send_stop_report(self, client: bytes, body: Json) -> None:
        self._out.append(SendToClient(client, Report(what="stop", ok="error" not in body, body=body)))


def _report_settings(name: str, settings: Iterable[Setting]) -> Json:
    """Return a worker's settings, as it sent them to the broker, in the layout of ``swarm config show``."""
    return settings_report(
        name, [ShownSetting(setting.name, _decode_value(setting.value), setting.origin) for setting in settings]
    )


def _decode_value(text: str) -> object:
    """Decode a JSON value; return text that is no JSON unchanged."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return text
