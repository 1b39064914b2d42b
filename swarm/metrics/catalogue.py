"""Catalogue of every figure of the swarm itself, and its place in the broker's reports.

``stats`` and ``status`` are used unchanged; :func:`combine_reports` converts the texts of ``nodes`` to numbers. A
worker that is out or has left exports only ``up`` and its verdict, until the broker has dropped it or a process with
the same name joins.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarm.metrics.collectors import MetricSpec, ReportPath
from swarm.wire.messages import Json

VERDICTS = ("well", "slow", "loading", "blocked", "silent", "hung", "dead", "left", "lied", "failed", "differs")
GONE = ("left", "out")

UP = MetricSpec(
    "swarm_up", "gauge", "1 if the broker answered in time, otherwise 0 without any other figure of the swarm", ()
)


def combine_reports(answers: Mapping[str, Json]) -> Json:
    """Combine the answers to ``stats``, ``status`` and ``nodes`` into one tree, with numbers in place of texts and
    flags."""
    status, nodes = answers.get("status", {}), answers.get("nodes", {})
    rows = nodes.get("workers")
    flags: Json = {
        "serving": int(status.get("state") == "serving"),
        "journal_broken": int(bool(status.get("journal_problem"))),
        "doors_closed": int(bool(status.get("connections_problem"))),
    }
    return {
        "stats": answers.get("stats", {}),
        "status": {**status, **flags},
        "workers": _workers(rows if isinstance(rows, list) else []),
    }


def _workers(rows: list[Json]) -> Json:
    """Return the workers by name. If two have the same name, the present one counts."""
    workers: Json = {}
    for row in sorted(rows, key=lambda row: row.get("state") not in GONE):
        name, is_gone = str(row.get("name")), row.get("state") in GONE
        verdicts: Json = {verdict: int(row.get("verdict") == verdict) for verdict in VERDICTS}
        workers[name] = (
            {"up": 0, "verdicts": verdicts} if is_gone else {**row, "up": 1, "verdicts": verdicts} | _layer_fields(row)
        )
    return workers


def _layer_fields(row: Json) -> Json:
    layers = row.get("layers")
    if not isinstance(layers, list):
        return {"num_layers": 0}
    first, stop = layers
    return {"num_layers": stop - first, "first_layer": first}


# --- helpers that define an entry of the catalogue --------------------------------------------------------------------


def _counter(name: str, text: str, path: str, scale: float = 1.0) -> MetricSpec:
    return MetricSpec(f"swarm_{name}_total", "counter", text, (ReportPath(path),), (), scale)


def _gauge(name: str, text: str, path: str) -> MetricSpec:
    return MetricSpec(f"swarm_{name}", "gauge", text, (ReportPath(path),))


def _histogram(name: str, text: str, path: str) -> MetricSpec:
    return MetricSpec(f"swarm_{name}", "histogram", text, (ReportPath(path),))


def _labelled_counter(name: str, text: str, label: str, *sources: ReportPath) -> MetricSpec:
    """Return a counter with one label, which is not ``worker``."""
    return MetricSpec(f"swarm_{name}_total", "counter", text, sources, (label,))


def _stage_figure(name: str, text: str, path: str, scale: float = 1.0, *, is_counter: bool = False) -> MetricSpec:
    """Return a figure of each worker; ``path`` is its place in the worker's statistics."""
    source = ReportPath(f"stats.stages.*.{path}", ("*",))
    if is_counter:
        return MetricSpec(f"swarm_{name}_total", "counter", text, (source,), ("worker",), scale)
    return MetricSpec(f"swarm_{name}", "gauge", text, (source,), ("worker",), scale)


def _seconds(name: str, text: str, path: str) -> MetricSpec:
    return _stage_figure(f"stage_{name}_seconds", text, f"microseconds.{path}.total", 1e-6, is_counter=True)


def _direction_counter(name: str, text: str, kind: str, paths: tuple[str, str], scale: float = 1.0) -> MetricSpec:
    """Return a counter of each worker with a direction: in and out."""
    sources = tuple(
        ReportPath(f"stats.stages.*.{kind}.{path}.total", ("*", way))
        for way, path in zip(("in", "out"), paths, strict=True)
    )
    return MetricSpec(f"swarm_stage_{name}_total", "counter", text, sources, ("worker", "direction"), scale)


def _worker_gauge(name: str, text: str, path: str) -> MetricSpec:
    """Return a figure of each worker from the broker's report about it."""
    return MetricSpec(f"swarm_worker_{name}", "gauge", text, (ReportPath(f"workers.*.{path}", ("*",)),), ("worker",))


# --- the catalogue ----------------------------------------------------------------------------------------------------

WHOLE = (
    _gauge("serving", "1 while a plan serves, otherwise 0: requests wait", "status.serving"),
    _gauge("uptime_seconds", "Seconds since the broker's process started", "status.uptime_s"),
    _gauge("epoch", "The plan's number, which only grows", "status.epoch"),
    _gauge("stages", "Stages of the plan in force", "status.num_stages"),
    _gauge("workers", "Workers that are present, with layers or without", "status.num_workers"),
    _gauge("doors_closed", "1 while a listener accepts no connections, for lack of descriptors", "status.doors_closed"),
    _counter("plans", "Plans made", "stats.pipeline.plans"),
    _counter("own_pauses", "Pauses of the broker's own process of over 0.25 s", "stats.pipeline.own_pauses"),
    _counter("broken_rules", "Violated invariants of the broker's state: a bug", "stats.pipeline.rules_broken"),
)

REQUESTS = (
    _labelled_counter(
        "requests",
        "Ended requests, by the worst outcome of their continuations",
        "outcome",
        ReportPath("stats.requests.ended.*", ("*",)),
    ),
    _labelled_counter(
        "sequences",
        "Ended continuations, by outcome; a request with n=4 has four",
        "outcome",
        *(
            ReportPath(f"stats.pipeline.sequences_{each}", (each,))
            for each in ("stop", "length", "cancelled", "failed")
        ),
    ),
    _labelled_counter(
        "rejected", "Rejected requests, by reason", "reason", ReportPath("stats.pipeline.rejected_*", ("*",))
    ),
    _counter(
        "late_sequences",
        "Requests that failed because their deadline could not be met",
        "stats.pipeline.sequences_too_late",
    ),
    _gauge("requests_known", "Requests in the broker's memory, ended ones among them", "status.num_requests"),
    _gauge("running_sequences", "Continuations with KV memory in the stages", "status.num_running"),
    _gauge("waiting_sequences", "Continuations that wait for KV memory", "status.num_queued"),
    _histogram("queue_seconds", "Seconds from a request's arrival to its first step", "stats.histograms.queue_s"),
    _histogram(
        "first_token_seconds", "Seconds from a request's arrival to its first token", "stats.histograms.first_token_s"
    ),
    _histogram(
        "inter_token_seconds", "Seconds between two tokens of a continuation", "stats.histograms.between_tokens_s"
    ),
    _histogram(
        "request_seconds",
        "Seconds from the arrival to the end of finished requests",
        "stats.histograms.request_s",
    ),
    _counter(
        "prompt_tokens", "Tokens of prompts whose first answer token has been generated", "stats.requests.prompt_tokens"
    ),
    _counter(
        "cached_prompt_tokens",
        "Prompt tokens found in the prefix cache",
        "stats.requests.cached_prompt_tokens",
    ),
    _counter("generated_tokens", "Generated tokens", "stats.pipeline.tokens"),
    _counter(
        "prefix_hits", "Sequences that began as a copy of another sequence's beginning", "stats.pipeline.prefix_hits"
    ),
    _counter("preemptions", "Preemptions of a sequence by another one", "stats.pipeline.preemptions"),
    _counter(
        "plan_evictions",
        "Running sequences that wait again because a new plan could not keep them",
        "stats.pipeline.plan_evictions",
    ),
)

_PROPOSERS = ("suffix", "draft", "grammar")
SPECULATION = (
    _labelled_counter(
        "proposed_tokens",
        "Tokens that were guessed and verified, by proposer",
        "proposer",
        *(ReportPath(f"stats.speculation.{each}.proposed", (each,)) for each in _PROPOSERS),
    ),
    _labelled_counter(
        "accepted_tokens",
        "Of these, tokens that were right, by proposer",
        "proposer",
        *(ReportPath(f"stats.speculation.{each}.accepted", (each,)) for each in _PROPOSERS),
    ),
    *(
        MetricSpec(
            f"swarm_{what}_tokens_at_total",
            "counter",
            text,
            tuple(ReportPath(f"stats.speculation.{each}.positions.*.{what}", (each, "*")) for each in _PROPOSERS),
            ("proposer", "position"),
        )
        for what, text in (
            ("proposed", "Tokens that were guessed and verified, by proposer and position in the proposal"),
            ("accepted", "Of these, tokens that were right, by proposer and position in the proposal"),
        )
    ),
    _histogram("accepted_length_tokens", "Accepted tokens of each proposal", "stats.histograms.accepted_tokens"),
    _counter("speculative_steps", "Steps that carried proposed tokens", "stats.pipeline.speculative_steps"),
)

STEPS = (
    _counter("steps", "Steps sent through the stages", "stats.pipeline.steps"),
    _counter("overlapped_steps", "Steps sent while others were in flight", "stats.pipeline.overlapped_calls"),
    _gauge("steps_in_flight", "Steps in the stages now", "status.steps_in_flight"),
    _histogram(
        "micro_batches",
        "Steps in flight when one is sent, including itself: stages at work",
        "stats.histograms.micro_batches",
    ),
    _counter(
        "positions",
        "Positions in these steps: prompt tokens and generated ones, computed for the first time or again",
        "stats.pipeline.positions",
    ),
    _histogram("step_rows", "Sequences in a step", "stats.histograms.step_rows"),
    _histogram("step_positions", "Positions in a step", "stats.histograms.step_positions"),
    _histogram("batch_rows", "Sequences in all steps in flight when one is sent", "stats.histograms.batch_rows"),
    _histogram("queue_depth", "Sequences that wait for KV memory when a step is sent", "stats.histograms.queue_depth"),
    _histogram("step_seconds", "Seconds of a step through all stages and back", "stats.histograms.step_s"),
    _counter(
        "wire_seconds",
        "Seconds of steps outside the stages: encoding, sockets, networks",
        "stats.pipeline.microseconds.bridge.total",
        1e-6,
    ),
    _counter("wire_bytes", "Bytes of steps between stages", "stats.pipeline.sizes.bytes_bridged.total"),
    _gauge(
        "kv_used_positions",
        "Positions of keys and values reserved for running sequences",
        "stats.scheduler.kv_used",
    ),
    _gauge("kv_cached_positions", "Positions kept for prompts with a common beginning", "stats.scheduler.kv_cached"),
    _gauge(
        "kv_shared_positions",
        "Positions that do not count because another sequence shares their memory",
        "stats.scheduler.kv_shared",
    ),
    _gauge("kv_capacity_positions", "Positions that fit into the plan's stages", "stats.scheduler.kv_capacity"),
)

STAGES = (
    _stage_figure("stage_steps", "Steps computed by the stage", "steps", is_counter=True),
    _stage_figure("stage_positions", "Positions computed by the stage", "positions", is_counter=True),
    _stage_figure(
        "stage_overlapped_steps",
        "Steps computed by the stage while others were in flight",
        "overlapped_calls",
        is_counter=True,
    ),
    _stage_figure(
        "stage_queued_steps",
        "Steps waiting at the stage when it began one, summed over all computed steps",
        "sizes.queue_depth.total",
        is_counter=True,
    ),
    _seconds("busy", "Seconds from a step's arrival at the stage to sending it on", "total"),
    _seconds("idle", "Seconds that the stage waited for a step", "idle"),
    _seconds("wait", "Seconds that steps waited at the stage for others", "wait"),
    _seconds("compute", "Seconds of computing layers, norm and head", "compute"),
    _seconds("head", "Seconds of norm and head, a part of computing, on the last stage", "head"),
    _seconds("copy", "Seconds of copying outputs to the host, a part of computing, on the other stages", "copy"),
    _seconds("sample", "Seconds of drawing tokens, on the last stage", "sample"),
    _direction_counter(
        "serialize_seconds",
        "Seconds of decoding and checking (in), of encoding and sending to the socket (out)",
        "microseconds",
        ("bridge_in", "bridge_out"),
        1e-6,
    ),
    _direction_counter("wire_bytes", "Bytes of steps received, and sent", "sizes", ("bytes_in", "bytes_out")),
    _stage_figure("stage_kv_used_positions", "Positions of keys and values stored in the stage", "kv_used"),
    _stage_figure("stage_kv_capacity_positions", "Positions that fit into the stage", "kv_capacity"),
    _stage_figure("stage_sequences", "Sequences stored in the stage", "sequences"),
    _stage_figure("stage_log_bytes", "Memory of the activation log, from which lost stages are rebuilt", "log_bytes"),
    _stage_figure(
        "stage_log_evicted",
        "Entries evicted from the activation log for lack of memory",
        "log_evicted",
        is_counter=True,
    ),
    _stage_figure("stage_weight_bytes", "Weights in memory", "weight_bytes"),
    _stage_figure(
        "stage_refused_frames",
        "Damaged messages between stages, which were refused",
        "refused_frames",
        is_counter=True,
    ),
    _stage_figure(
        "stage_refused_connections",
        "Connections refused by the stage's listener",
        "knockers_refused",
        is_counter=True,
    ),
)

WORKERS = (
    _worker_gauge("up", "1 while the worker is present, 0 when it is out or has left", "up"),
    MetricSpec(
        "swarm_worker_verdict",
        "gauge",
        "1 for the broker's verdict on the worker, 0 for all others",
        (ReportPath("workers.*.verdicts.*", ("*", "*")),),
        ("worker", "verdict"),
    ),
    _worker_gauge("layers", "The worker's layers of the plan in force; 0: it is a spare", "num_layers"),
    _worker_gauge("first_layer", "The first of them", "first_layer"),
    _worker_gauge("beat_age_seconds", "Seconds since the worker's last heartbeat", "beat_age_s"),
    _worker_gauge("loop_lag_seconds", "Seconds by which the worker's control loop is late", "loop_lag_s"),
    _worker_gauge("pace_ratio", "How many times longer than predicted the worker's last steps took", "pace"),
    _worker_gauge("lies", "Proven wrong results of the worker", "lies"),
    _worker_gauge("faults", "Recent failures of the worker's steps, or of its device's tests", "faults"),
    _stage_figure("worker_resident_bytes", "Memory of the worker's process", "resident_bytes"),
    _stage_figure("worker_device_bytes", "Used memory of the worker's device", "device_memory_bytes"),
    _stage_figure(
        "worker_device_reserved_bytes",
        "Memory of the device that the worker's process has reserved, with what it keeps for later",
        "device_memory_reserved_bytes",
    ),
    _stage_figure(
        "worker_device_peak_bytes",
        "Most memory that the worker's process has used on its GPU",
        "device_memory_peak_bytes",
    ),
    _stage_figure("worker_device_total_bytes", "Memory that the worker's device has", "device_memory_total_bytes"),
    _stage_figure(
        "worker_device_utilization",
        "Share of the last second in which the worker's GPU computed, for all processes",
        "device_utilization",
    ),
    _stage_figure("worker_cpu_seconds", "Processor time of the worker's process", "cpu_s", is_counter=True),
    _stage_figure("worker_descriptors", "Descriptors that the worker has open", "descriptors"),
    _stage_figure("worker_descriptor_limit", "Descriptors that the worker may have open", "descriptor_limit"),
    _stage_figure("worker_threads", "Threads of the worker's interpreter", "threads"),
    _counter("beats", "Heartbeats received from workers", "stats.pipeline.beats"),
    _counter("workers_lost", "Workers that were lost", "stats.pipeline.workers_lost"),
    _counter("failed_steps", "Steps that raised an error at a worker", "stats.pipeline.steps_failed"),
    _stage_figure(
        "stage_memory_shortages",
        "Steps for which the device had too little memory at first",
        "memory_shortages",
        is_counter=True,
    ),
)

TROUBLES = (
    _counter("recoveries", "Ended recoveries", "stats.recoveries.ended"),
    _gauge("recovery_under_way", "1 while the swarm recovers from a loss", "stats.recoveries.under_way"),
    _gauge(
        "recovery_under_way_seconds",
        "Seconds since the current recovery began; 0: none is under way",
        "stats.recoveries.under_way_s",
    ),
    MetricSpec(
        "swarm_recovery_seconds",
        "histogram",
        "Seconds that each part of a recovery took; detect counts from the last sign of life, total from the detection",
        (ReportPath("stats.histograms.recovery_*_s", ("*",)),),
        ("part",),
    ),
    _counter(
        "replayed_layer_positions",
        "Layers times positions computed again from logs",
        "stats.pipeline.replayed_layer_positions",
    ),
    _counter(
        "copied_layer_positions",
        "Layers times positions that stages took over from copies of keys and values",
        "stats.pipeline.kv_copies_used_positions",
    ),
    _counter(
        "restored_positions",
        "Positions whose keys and values were read from disk instead of computed",
        "stats.pipeline.restored_positions",
    ),
    _stage_figure("stage_spill_bytes", "Files of keys and values in the worker's folder on disk", "spill_bytes"),
    _stage_figure(
        "stage_spill_damaged_files",
        "Files of keys and values that were removed because they were damaged",
        "spill_files_damaged",
        is_counter=True,
    ),
    _gauge("kv_copies_bytes", "Memory of copies of keys and values", "stats.kv_copies.bytes"),
    _gauge("kv_copies_behind", "Most positions by which a copy is behind its sequence", "stats.kv_copies.behind"),
    _labelled_counter(
        "refused_frames",
        "Messages at the broker's listeners that could not be decoded, and were refused",
        "door",
        *(
            ReportPath(f"stats.pipeline.malformed_{door}", (name,))
            for door, name in (("client", "client"), ("control", "worker"), ("beat", "beat"), ("data", "data"))
        ),
    ),
    _counter(
        "damaged_messages",
        "Damaged messages on the path of steps, each of which caused a new epoch",
        "stats.pipeline.damaged_messages",
    ),
    _counter(
        "disagreeing_rechecks", "Samples that two workers computed differently", "stats.pipeline.rechecks_disagreed"
    ),
)

PROCESSES = (
    _gauge("journal_broken", "1 while the journal can't be written: requests are rejected", "status.journal_broken"),
    _histogram("journal_write_seconds", "Seconds of the journal's transactions", "stats.histograms.journal_write_s"),
    _counter("journal_writes", "Facts written to the journal", "stats.journal.writes"),
    _counter("journal_failures", "Failed writes to the journal", "stats.journal.failures"),
    _counter(
        "journal_renewals",
        "Times that a new journal replaced one that could not be trusted",
        "stats.journal.renewals",
    ),
    _gauge("journal_bytes", "Size of the journal's files", "stats.journal.bytes"),
    _gauge("broker_resident_bytes", "Memory of the broker's process", "stats.broker.resident_bytes"),
    _counter("broker_cpu_seconds", "Processor time of the broker's process", "stats.broker.cpu_s"),
    _gauge("broker_descriptors", "Descriptors that the broker has open", "stats.broker.descriptors"),
    _gauge("broker_descriptor_limit", "Descriptors that the broker may have open", "stats.broker.descriptor_limit"),
    _gauge("broker_threads", "Threads of the broker's process", "stats.broker.threads"),
)

FIGURES = (*WHOLE, *REQUESTS, *SPECULATION, *STEPS, *STAGES, *WORKERS, *TROUBLES, *PROCESSES)
