"""Reports for ``swarmctl``: plain values, ready for JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from swarm.broker.admin.copies_report import held_as_json, report_copies
from swarm.broker.admin.standby_report import warming_as_json
from swarm.broker.members.monitor import VitalSigns
from swarm.broker.reports import scheduling
from swarm.broker.reports.statistics import PipelineStatistics, RequestLatencies
from swarm.broker.speculation.speculation import Speculation
from swarm.broker.state import Request, SequenceState, State, Worker, WorkerState
from swarm.broker.state.ended_requests import ClientAccount, can_see
from swarm.broker.state.workers import BROKER, Judgement, RouteState
from swarm.wire.messages import BLOCK, Json
from swarm.wire.transport.keys import address_and_key


def report_requests(state: State, now: float, account: ClientAccount | None = None, request_id: str = "") -> Json:
    """Report the requests in memory, or the one with this id; with an account, only its own."""
    named = [state.requests[request_id]] if request_id in state.requests else []
    selected = named if request_id else state.requests.values()
    return {"requests": [_report_request(r, now) for r in selected if can_see(account, r.tenant)]}


def report_status(state: State, now: float) -> Json:
    plans = state.plans
    return {
        "state": "serving" if plans.is_serving else plans.phase.value,
        "waits_for": plans.waits_for,
        "journal_problem": state.journal_problem,
        "journal_notes": list(state.journal_notes),
        "connections_problem": state.accept.problem,
        "connections_notes": state.accept.notes(now),
        "epoch": plans.current.epoch if plans.current else plans.epoch,
        "model": state.manifest.name if state.manifest else None,
        "uptime_s": round(now - state.started_at, 1),
        "num_workers": sum(not w.is_gone for w in state.workers.values()),
        "num_stages": len(plans.current.stages) if plans.current else 0,
        "num_running": len(state.running),
        "num_queued": len(state.waiting),
        "num_requests": len(state.requests),
        "steps_in_flight": len(state.in_flight),
        "tokens_total": int(state.counters.get("tokens", 0)),
        "kv_reserved": (state.reserved_blocks - state.cached_blocks) * BLOCK,
        "kv_cached": state.cached_blocks * BLOCK,
        "kv_shared": state.shared.saved,
        "kv_capacity": plans.kv_blocks * BLOCK if plans.current else 0,
        "loading": _report_loading(state),
    }


def _restriction(state: State, name: str) -> str:
    constraints = state.constraints
    return constraints.restriction(name) or ("excluded" if name in constraints.exclude else "")


def _report_loading(state: State) -> list[Json]:
    """Report the loading progress of the next plan's workers."""
    coming = state.plans.upcoming
    if coming is None:
        return []
    rows: list[Json] = []
    for stage in coming.stages:
        worker = state.workers[stage.incarnation]
        done = stage.incarnation in state.plans.prepared
        total = worker.total_bytes or stage.weight_bytes  # 0 until the worker has reported its progress
        loaded = total if done else min(worker.loaded_bytes, total)
        rows.append({"worker": stage.name, "loaded_bytes": loaded, "total_bytes": total, "done": done})
    return rows


def report_nodes(
    state: State, judgements: Mapping[str, Judgement], signs_of: Callable[[str, float], VitalSigns], now: float
) -> Json:
    """Report every worker with its verdict and the evidence. ``progress_per_s``: layers and loaded tensors over about
    the last second; ``pace``: measured duration of its last steps relative to the prediction; ``refused``: workers that
    were refused."""
    rows: list[Json] = []
    current = state.plans.current
    for incarnation, worker in state.workers.items():
        stage = current.stage_of(incarnation) if current else None
        hello, judgement, signs = worker.hello, judgements[incarnation], signs_of(incarnation, now)
        ready = state.plans.capacity.get(incarnation) if stage else None
        rows.append(
            {
                "name": hello.name,
                "incarnation": incarnation,
                "host": hello.host,
                "pid": hello.pid,
                "build": hello.build or None,  # 0.1.0 does not send it
                "device": hello.device,
                "dtype": hello.dtype,
                "weights": hello.manifest.weights,
                "activations": hello.manifest.activations or hello.dtype,
                "cores": hello.cores,
                "state": worker.state.value,
                "reason": worker.reason,
                "steered": _restriction(state, worker.name),
                "unreachable": "" if worker.is_gone else _describe_unreachable(state, incarnation, now),
                "layers": [stage.layers.first, stage.layers.stop] if stage else None,
                "last_layers": _last_layers(worker),
                "here_for_s": None if worker.is_gone else round(max(0.0, now - worker.joined_at), 3),
                "standby": [] if worker.is_gone else [[layers.first, layers.stop] for layers in worker.warm_layers],
                "warming": warming_as_json(worker, state.manifest, now),
                "copies": held_as_json(state, worker),
                "spill": _report_spill(worker),
                "kernels": ready.kernels if ready else "",
                "lies": worker.num_corrupt_results,
                "faults": worker.num_faults,
                "confirmed": worker.num_confirmed,
                "disagreed_with": dict(worker.disagreed_with),
                "verdict": judgement.verdict.value,
                "evidence": judgement.evidence,
                "verdict_for_s": round(max(0.0, now - judgement.since), 3),
                "beat_age_s": None if signs.beat_age_s is None else round(signs.beat_age_s, 3),
                "doing": signs.doing,
                "progress_per_s": round(signs.rate, 3),
                "pace": None if signs.pace is None else round(signs.pace, 3),
                "loop_lag_s": round(signs.loop_lag_s, 4),
                "blocked_on": signs.blocked_on,
                "memory_bytes": hello.memory_bytes,
                "resident_bytes": int(worker.stats.get("resident_bytes", 0)),
                "limit_bytes": int(worker.stats.get("limit_bytes", 0)),  # of the same process; 0: none, as with a GPU
                "kv_used": int(worker.stats.get("kv_used", 0)),
                "kv_capacity": int(worker.stats.get("kv_capacity", 0)),
                # without the key, which only its peers need
                "endpoint": address_and_key(hello.endpoint)[0],
                "round_trip_s": None if hello.link is None else hello.link.round_trip_s,
                "bytes_per_s": None if hello.link is None else hello.link.bytes_per_s,
                "next": _next_hop(state, incarnation, worker),
                "clock_ahead_s": worker.stats.get("clock_ahead_s"),
                "protocol": list(hello.wire_versions),
                "messages": hello.schema,
            }
        )
    return {"workers": rows, "refused": state.newcomers.report(now)}


def _last_layers(worker: Worker) -> list[int] | None:
    """Return the layers that a lost worker had in the last plan; None if it had none, or left in good order."""
    held = worker.planned_layers if worker.state is WorkerState.OUT else None
    return None if held is None else [held.first, held.stop]


def _report_spill(worker: Worker) -> Json | None:
    """Return the figures of a worker's disk, as it reported them last; None for one without ``worker.spill``."""
    if not worker.hello.spill_from:
        return None
    stats = worker.stats
    return {
        "num_bytes": int(stats.get("spill_bytes", 0)),
        "limit_bytes": int(stats.get("spill_limit_bytes", 0)),
        "chunks_written": int(stats.get("spill_chunks_written", 0)),
        "chunks_read": int(stats.get("spill_chunks_read", 0)),
        "restored_positions": int(stats.get("spill_positions_restored", 0)),
    }


def _next_hop(state: State, incarnation: str, worker: Worker) -> Json | None:
    """Return the next hop of a worker's steps and the TCP statistics of that connection; None if there are none: over a
    Unix socket, through the relay, or without a plan."""
    plan, round_trip_s = state.plans.current, worker.stats.get("next.round_trip_s")
    if plan is None or round_trip_s is None or plan.stage_of(incarnation) is None:
        return None
    later_stages = plan.stages[[stage.incarnation for stage in plan.stages].index(incarnation) + 1 :]
    return {
        "to": later_stages[0].name if later_stages else "the broker",
        "round_trip_s": round_trip_s,
        "bytes_per_s": worker.stats.get("next.bytes_per_s", 0.0),
        "is_least": bool(worker.stats.get("next.is_least")),
    }


def _describe_unreachable(state: State, target: str, now: float) -> str:
    """Describe which senders can't reach this worker's data endpoint, and why. Plans avoid these routes or use the
    relay."""
    sources = {BROKER: "the broker"} | {i: worker.name for i, worker in state.workers.items() if not worker.is_gone}
    lines = []
    for source, name in sources.items():
        route, why = state.routes.state_of(source, target, now), state.routes.reason_for(source, target)
        if route is not RouteState.OPEN:
            lines.append(
                f"{name} can't reach it{' except through the relay' if route is RouteState.RELAYED else ''}: {why}"
            )
    if state.routes.state_of(target, BROKER, now) is RouteState.BLOCKED:
        lines.append(f"it can't reach the broker's data endpoint: {state.routes.reason_for(target, BROKER)}")
    return "; ".join(lines)[:2000]


def report_stats(
    state: State,
    statistics: PipelineStatistics,
    latencies: RequestLatencies,
    *,
    speculation: Speculation,
    now: float,
    account: ClientAccount | None = None,
) -> Json:
    """Report figures. ``pipeline``: counters, sizes and times of all steps. ``requests``: outcomes and tokens over all
    requests. ``histograms``: distributions of times and sizes. ``stages``: figures that each worker reports."""
    stages: Json = {worker.name: nest(worker.stats) for worker in state.workers.values() if not worker.is_gone}
    pipeline: Json = dict(sorted(state.counters.items()))
    pipeline |= {"running": len(state.running), "queued": len(state.waiting), "in_flight": len(state.in_flight)}
    journal = dict(state.journal_figures)
    spread: Json = {f"recovery_{part}": histogram.report() for part, histogram in state.recoveries.parts.items()}
    if "write_s" in journal:
        spread["journal_write_s"] = journal.pop("write_s")
    spread["accepted_tokens"] = speculation.accepted_lengths.report()
    return {
        "pipeline": pipeline | statistics.report(),
        "scheduler": scheduling.report_scheduler(state),
        "queue": scheduling.report_queue(state, account),
        "journal": journal,
        "broker": dict(state.process_figures),
        "requests": latencies.counts(),
        "recoveries": state.recoveries.figures(now),
        "kv_copies": report_copies(state),
        "speculation": speculation.report(),
        "histograms": latencies.histograms() | statistics.histograms() | spread,
        "stages": stages,
    }


def nest(values: dict[str, float]) -> Json:
    """Convert flat names into nested dicts: ``{"a.b": 1}`` → ``{"a": {"b": 1}}``. A name that conflicts with another
    one stays flat."""
    tree: Json = {}
    for name, value in values.items():
        *parents, last = name.split(".")
        place = tree
        for parent in parents:
            below = place.setdefault(parent, {})
            if not isinstance(below, dict):
                place, last = tree, name
                break
            place = below
        place[last] = value
    return tree


def _request_state(request: Request) -> str:
    """Return the state of a request: running if at least one sequence runs."""
    if request.has_ended:
        return "ended"
    return "running" if any(s.state is SequenceState.RUNNING for s in request.sequences) else "waiting"


def _prompt_computed(request: Request) -> int:
    """Return the number of prompt tokens that every stage has acknowledged. Sequences of a request share the prompt, so
    the most advanced one counts; a sequence with a token has computed it completely."""
    return max(s.num_prompt if s.num_generated else min(s.kv, s.num_prompt) for s in request.sequences)


def _report_request(request: Request, now: float) -> Json:
    """Report a request. An ended request stays until it is read or old (see ``reports.ended_requests`` for those in the
    journal)."""
    return {
        "request_id": request.id,
        "state": _request_state(request),
        "reasons": [s.reason for s in request.sequences],
        "num_prompt": len(request.submit.prompt),
        "num_prompt_computed": _prompt_computed(request),
        "num_tokens": sum(s.num_generated for s in request.sequences),
        "max_tokens": request.submit.params.max_tokens,
        "n": len(request.sequences),
        "class": scheduling.class_name(request.submit.priority),
        "tenant": request.tenant,
        "deadline_s": None if request.deadline_at is None else round(request.deadline_at - now, 3),
        "preempted": sum(s.num_preempted for s in request.sequences),
        "age_s": round(now - request.arrived_at, 3),
        "ended_age_s": round(now - request.ended_at, 3) if request.has_ended else None,
        "attached": request.client is not None,
        "detached": request.submit.detached,
        "sequences": [s.id for s in request.sequences],
    }
