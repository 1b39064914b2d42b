"""Rendering of reports for people. Unknown fields are shown under their own names: a newer broker may report more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.text import Text

from swarm.admin.report_rows import describe_held_back, format_layers_short, get_number, read_rows, release_commands
from swarm.cli.output import format_bytes
from swarm.screen import ReportTable

Body = Mapping[str, object]
Column = tuple[str, str]  # key, heading

_NODE_COLUMNS: tuple[Column, ...] = (
    ("name", "worker"),
    ("state", "state"),
    ("steered", "by hand"),
    ("layers", "layers"),
    ("device", "device"),
    ("standby", "standby"),
    ("verdict", "verdict"),
    ("verdict_for_s", "for"),
    ("pace", "pace"),
    ("kv", "kv"),
    ("memory", "memory"),
    ("process", "process"),
)
# Omitted in a narrow window, the first one first.
_NODE_OPTIONAL = ("for", "standby", "device", "memory", "pace", "process")
# Only --json shows these. (Evidence and kernels, with the type of weights, are printed below the table, because
# sentences don't fit into columns. The remaining columns fit into 120 characters. Doubts are rare, so they have no
# columns either.)
_NODE_HIDDEN = {"incarnation", "endpoint", "kv_used", "kv_capacity", "cores", "kernels", "doing", "blocked_on"} | {
    "lies",
    "faults",
    "confirmed",
    "disagreed_with",
    "evidence",
    "reason",
    "unreachable",
    "dtype",
    "weights",
    "activations",
    "beat_age_s",  # Part of the evidence.
    "progress_per_s",
    "loop_lag_s",
    "memory_bytes",
    "resident_bytes",
    "limit_bytes",
    "host",
    "pid",
    "build",  # Shown by swarmctl version.
    "protocol",
    "messages",
    "round_trip_s",  # Shown by swarmctl doctor.
    "bytes_per_s",
    "next",
    "clock_ahead_s",
    "last_layers",
    "here_for_s",
    "warming",  # Shown by swarmctl standby and plan.
    "copies",
    "spill",  # Printed below the table.
}
_STAGE_COLUMNS: tuple[Column, ...] = (
    ("worker", "worker"),
    ("layers", "layers"),
    ("weight_bytes", "weights"),
    ("kv_capacity", "kv positions"),
    ("predicted_s", "predicted"),
    ("hop_s", "hop"),
    ("expected_s", "expected"),
    ("seen_s", "measured"),
    ("seen_steps", "steps"),
    ("needed_bytes", "needs"),
    ("memory_bytes", "memory"),
    ("kv_positions", "kv positions"),
    ("load_s", "load"),
    ("warm_up_s", "warm-up"),
    ("resident_bytes", "resident"),
)
_STAGE_OPTIONAL = ("steps", "hop", "resident", "warm-up", "weights", "expected", "load")
_REQUEST_COLUMNS: tuple[Column, ...] = (
    ("request_id", "request"),
    ("state", "state"),
    ("num_prompt", "prompt"),
    ("num_prompt_computed", "computed"),
    ("num_tokens", "tokens"),
    ("max_tokens", "at most"),
    ("age_s", "age"),
    ("ended_age_s", "ended"),
)
_REQUEST_OPTIONAL = ("computed", "ended", "prompt", "at most")
_ENDED_HIDDEN = {  # Columns without meaning for requests that have ended.
    "sequences",
    "state",
    "n",
    "class",
    "tenant",
    "attached",
    "deadline_s",
    "preempted",
    "num_prompt_computed",
}


# --- the reports ------------------------------------------------------------------------------------------------------


def status(body: Body) -> RenderableType:
    return fields(body, hidden={"protocol", "messages"})  # Shown by swarmctl version.


def nodes(body: Body) -> RenderableType:
    workers = [_join_columns(worker) for worker in read_rows(body.get("workers"))]
    table = render_table(workers, _NODE_COLUMNS, _NODE_HIDDEN, _NODE_OPTIONAL, none="no workers", is_dense=True)
    parts = (
        *_render_evidence(workers),
        *_render_kernels(workers, "name"),
        *_render_doubts(workers),
        *_render_spill(workers),
        *_render_refused(body),
    )
    return Group(_add_unknown_fields(table, body, {"workers", "refused"}), *parts)


def standby(body: Body) -> RenderableType:
    """Render which worker keeps which layers warm, then the layers without a standby."""
    rows = read_rows(body.get("workers"))
    table = render_table(rows, _NODE_COLUMNS, {"warming", "copies"}, _NODE_OPTIONAL, none="no workers")
    unrecoverable = _as_list(body.get("nobody_may_load"))
    without_standby = [layer for layer in _as_list(body.get("not_kept")) if layer not in unrecoverable]
    notes = [_describe_warming(row, warming) for row in rows if isinstance(warming := row.get("warming"), Mapping)]
    if without_standby:
        notes.append(f"{_describe_without_standby(without_standby)}, and would have to be loaded if the holder died")
    if unrecoverable:
        held = (
            f"{describe_held_back(rows)} ({release_commands(rows)})"
            if describe_held_back(rows)
            else "there is no other worker"
        )
        notes.append(
            f"{_describe_without_standby(unrecoverable)}, and no worker may take over if the holder dies: {held}"
        )
    if not any(row.get("layers") for row in rows):
        notes.append("no worker has layers: there is nothing to keep")
    notes = notes or ["every layer has a standby"]
    for row in rows:
        notes += _describe_held(row, row.get("copies"))
    return Group(table, *(Text(f"· {each}") for each in notes))


def _describe_held(row: Body, held: object) -> Iterator[str]:
    """Describe the copies of keys and values that a worker holds."""
    if not isinstance(held, Mapping):
        return
    for route in read_rows(held.get("routes")):
        behind = f"at most {route['behind']} of a sequence behind" if route.get("behind") else "complete"
        yield (
            f"{row['name']} holds copies of {route['source']}'s keys and values in layers "
            f"{format_value('layers', route['layers'])}: {route['positions']} positions, {behind}"
        )
    if held.get("num_bytes"):
        yield f"{row['name']}'s copies take {format_value('num_bytes', held['num_bytes'])}"


def _describe_warming(row: Body, warming: Body) -> str:
    loaded = " of ".join(format_value(name, warming[name]) for name in ("warm_bytes", "wanted_bytes"))
    ready = warming["ready_in_s"]
    rest = "as steps leave time for it" if ready is None else f"in about {format_value('ready_in_s', ready)}"
    return f"{row['name']} has loaded {loaded} of its standby layers; the rest follows {rest}"


def _describe_without_standby(layers: list[object]) -> str:
    return f"layers {join_names(layers)} have no standby" if len(layers) > 1 else f"layer {layers[0]} has no standby"


def plan(body: Body) -> RenderableType:
    hidden = {"stages", "why", "coming", "forecast", "by_hand", "copies", "moves"}
    parts: list[RenderableType] = [fields(body, hidden=hidden)]
    parts.append(_render_stages(body.get("stages")))
    parts += _render_kernels(read_rows(body.get("stages")), "worker")
    parts += [Text(f"· {format_value('', reason)}") for reason in _as_list(body.get("why"))]
    coming = body.get("coming")
    if isinstance(coming, Mapping):
        parts += [Text(f"\ncoming: epoch {coming.get('epoch')}"), _render_stages(coming.get("stages"))]
    return Group(*parts)


def requests(body: Body) -> RenderableType:
    """Render requests. A request that has ended and has no reader is listed as ended, even if the broker still holds
    it."""
    known = read_rows(body.get("requests"))
    over = [row for row in known if row.get("state") == "ended" and not row.get("attached")]
    rows = [row for row in known if row not in over]
    ended = sorted([*over, *read_rows(body.get("kept"))], key=_ended_age_s)
    parts = [render_table(rows, _REQUEST_COLUMNS, {"sequences"}, _REQUEST_OPTIONAL, none="no requests under way")]
    if ended:
        table = render_table(ended, _REQUEST_COLUMNS, _ENDED_HIDDEN, _REQUEST_OPTIONAL)
        parts += [Text("ended, the latest first:"), table]
    return _add_unknown_fields(Group(*parts), body, {"requests", "kept"})


def _ended_age_s(row: Body) -> float:
    age_s = row.get("ended_age_s")
    return age_s if isinstance(age_s, int | float) else 0.0


def recoveries(body: Body) -> RenderableType:
    """Render a paragraph for each recovery: the cause, the new plan, and a line of durations."""
    rows = read_rows(body.get("recoveries"))
    parts = [part for recovery in rows for part in _render_recovery(recovery)]
    return Group(*parts) if parts else Text("nothing was lost since this broker was started")


def _render_recovery(recovery: Body) -> list[RenderableType]:
    measured, predicted = recovery.get("measured"), recovery.get("predicted")
    ended = recovery.get("resumed_all_at") is not None
    head = f"epoch {recovery.get('epoch')}: {recovery.get('evidence') or recovery.get('cause')}"
    lines = [Text(head if ended else f"{head} (under way)"), Text(f"  {recovery.get('choice') or 'no plan yet'}")]
    table = ReportTable(box=box.SIMPLE)
    names = ("detect_s", "plan_s", "load_s", "activate_s", "replay_s", "resume_s", "total_s")
    for title in ("", *(format_heading(name) for name in names)):
        table.add_column(title, justify="right")
    for title, row in (("predicted", predicted), ("measured", measured)):
        if isinstance(row, Mapping):
            # The measured total includes phases without a prediction, so a predicted one would be too short.
            shown = {**row, "total_s": None} if title == "predicted" else row
            table.add_row(title, *(format_value(name, shown.get(name)) for name in names))
    computed, least = recovery.get("layer_positions"), recovery.get("least_layer_positions")
    told = f"  {recovery.get('sequences')} sequences, {computed} layer·positions computed again, {least} were lost"
    if copied := recovery.get("copied_layer_positions"):
        told += f", copies saved {copied}"
    if restored := recovery.get("restored_layer_positions"):
        told += f", {restored} were read from disk"
    return [*lines, table, Text(told)]


def adapters(body: Body) -> RenderableType:
    """Render the adapters of a swarm."""
    return render_table(read_rows(body.get("adapters")), [], set(), none="no adapters")


def fields(body: Body, hidden: set[str] | None = None) -> RenderableType:
    """Render names and values, one per line, without empty ones."""
    grid = ReportTable.grid(padding=(0, 2))
    for key, value in body.items():
        if key not in (hidden or ()) and not _is_empty(value):
            grid.add_row(Text(format_heading(key)), Text(format_value(key, value)))
    return grid


# --- their parts ------------------------------------------------------------------------------------------------------


def _render_kernels(rows: Sequence[Body], name_key: str) -> list[RenderableType]:
    """Render one line for all workers with the same kernels."""
    users: dict[str, list[str]] = {}
    for row in rows:
        if row.get("kernels"):
            users.setdefault(str(row["kernels"]), []).append(str(row.get(name_key)))
    return [Text(f"· kernels of {', '.join(names)}: {kernels}") for kernels, names in users.items()]


def _render_doubts(workers: Sequence[Body]) -> list[RenderableType]:
    """Render which workers' results were proven wrong, and which workers disagreed with others."""
    lines, reported = [], set()
    for worker in workers:
        name, lies, others = str(worker.get("name")), worker.get("lies"), worker.get("disagreed_with")
        if lies:
            lines.append(f"· {name} sent hidden states that are not finite, {_format_times(lies)}")
        if faults := worker.get("faults"):
            lines.append(
                f"· {name} could not compute its steps, or failed a test of its device, {_format_times(faults)}"
            )
        for other, count in others.items() if isinstance(others, Mapping) else ():
            pair = frozenset((name, other))
            if pair not in reported:
                lines.append(
                    f"· {name} and {other} computed the same and differed {_format_times(count)}: one of them is wrong"
                )
            reported.add(pair)
    return [Text(line) for line in lines]


def _render_refused(body: Body) -> list[RenderableType]:
    """Render refused workers, the latest last."""
    return [
        Text(
            f"· {row.get('name')} was refused {row.get('ago_s')} s ago (process {row.get('pid')} on "
            f"{row.get('host')}): {row.get('reason')}"
        )
        for row in read_rows(body.get("refused"))
    ]


def _format_times(count: object) -> str:
    return "once" if count == 1 else f"{count} times"


def _render_stages(stages: object) -> RenderableType:
    rows = read_rows(stages)
    hidden = {"incarnation", "kernels", "by_relay"}
    return render_table(rows, _STAGE_COLUMNS, hidden, _STAGE_OPTIONAL, none="no stages")


def counters(stages: Mapping[str, Body]) -> RenderableType:
    """Render a line per counter, with a column per stage."""
    table = ReportTable("counter", box=box.SIMPLE)
    for name in stages:
        table.add_column(Text(name), justify="right")
    for counter in dict.fromkeys(str(counter) for values in stages.values() for counter in values):
        cells = [format_value(counter, values[counter]) if counter in values else "–" for values in stages.values()]
        table.add_row(Text(format_heading(counter)), *map(Text, cells))
    return table


def _render_evidence(workers: Sequence[Body]) -> list[RenderableType]:
    """Render a line for each verdict. The reason for which a worker left is usually its evidence, too."""
    lines: list[RenderableType] = []
    for worker in workers:
        reasons = dict.fromkeys(str(worker[key]) for key in ("evidence", "reason", "unreachable") if worker.get(key))
        if reasons:
            lines.append(Text(f"· {worker.get('name')} is {worker.get('verdict') or 'there'}: {'; '.join(reasons)}"))
    return lines


def _render_spill(workers: Sequence[Body]) -> list[RenderableType]:
    """Render what each worker has on disk. Workers of one machine share the folder."""
    return [
        Text(
            f"· {worker.get('name')}: {format_value('num_bytes', spill.get('num_bytes'))} of "
            f"{format_value('limit_bytes', spill.get('limit_bytes'))} of keys and values on disk; it has written "
            f"{spill.get('chunks_written')} chunks, read {spill.get('chunks_read')}, and restored "
            f"{spill.get('restored_positions')} positions"
        )
        for worker in workers
        if isinstance(spill := worker.get("spill"), Mapping)
    ]


def _join_columns(worker: Body) -> Body:
    """Return the row with related values joined into one column. A member that is cordoned or excluded has that as its
    state."""
    capacity, resident, state = get_number(worker, "kv_capacity"), worker.get("resident_bytes"), worker.get("state")
    limit = f" of {format_value('limit_bytes', worker['limit_bytes'])}" if worker.get("limit_bytes") else ""
    return {
        **worker,
        "state": (worker.get("steered") or state) if state == "member" else state,
        "steered": None,
        "kv": f"{get_number(worker, 'kv_used') / capacity:.0%}" if capacity else None,
        "memory": f"{format_value('resident_bytes', resident)}{limit}" if resident else None,
        "process": f"{worker.get('pid')} on {worker.get('host')}",
    }


def render_table(
    rows: Sequence[Body],
    known: Sequence[Column],
    hidden: set[str],
    optional: Sequence[str] = (),
    *,
    none: str = "",
    is_dense: bool = False,
) -> RenderableType:
    """Render known columns first, then all other columns of the rows; omit columns without any value.

    ``optional``: headings that may be omitted in a narrow window; if there are any, unknown columns are omitted first.
    ``none``: the text without rows.
    """
    if not rows:
        return Text(none)
    names = {key for key, _ in known}
    unknown = dict.fromkeys(key for row in rows for key in row if key not in names and key not in hidden)
    columns = [*known, *((key, format_heading(key)) for key in unknown)]
    columns = [(key, title) for key, title in columns if any(not _is_empty(row.get(key)) for row in rows)]
    others = [format_heading(key) for key in unknown] if optional else []
    table = ReportTable(optional=(*reversed(others), *optional), box=box.SIMPLE, collapse_padding=is_dense)
    for key, title in columns:
        is_number = all(isinstance(row.get(key), int | float | None) for row in rows)
        table.add_column(Text(title), justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(format_value(key, row.get(key))) for key, _ in columns))
    return table


def _add_unknown_fields(part: RenderableType, body: Body, shown: set[str]) -> RenderableType:
    rest = {key: value for key, value in body.items() if key not in shown}
    return Group(part, fields(rest)) if rest else part


# --- values -----------------------------------------------------------------------------------------------------------


def format_heading(key: str) -> str:
    if key.endswith("_per_s"):
        return key.removesuffix("_per_s").replace("_", " ") + "/s"
    for unit in ("_bytes", "_s"):
        key = key.removesuffix(unit)
    return key.removeprefix("num_").replace("_", " ")


def format_value(key: str, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _format_number(key, value)
    if isinstance(value, Mapping):
        return ", ".join(f"{format_heading(str(name))} {format_value(str(name), item)}" for name, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _format_list(key, value)
    return "–" if value is None else str(value)


def _format_list(key: str, values: Sequence[object]) -> str:
    if key == "layers" and len(values) == 2 and isinstance(values[1], int):
        return format_layers_short(values)
    if key == "standby":
        return ", ".join(format_value("layers", item) for item in values)
    separator = "; " if any(isinstance(item, Mapping) for item in values) else ", "
    return separator.join(format_value("", item) for item in values)


def _format_number(key: str, value: float) -> str:
    if key.endswith("_bytes"):
        return format_bytes(value)
    if key.endswith("_s") and not key.endswith("_per_s"):
        return _format_duration(value)
    return f"{value:.0f}" if value == int(value) else f"{value:.4g}"


def _format_duration(seconds: float) -> str:
    steps: tuple[tuple[float, Callable[[float], str]], ...] = (
        (0.001, lambda s: f"{s * 1e6:.0f} µs" if s else "0 s"),
        (1.0, lambda s: f"{s * 1000:.1f} ms"),
        (120.0, lambda s: f"{s:.1f} s"),
        (7200.0, lambda s: f"{s / 60:.0f} min"),
    )
    size = abs(seconds)
    text = next((say(size) for limit, say in steps if size < limit), f"{size / 3600:.1f} h")
    return f"-{text}" if seconds < 0 else text


def join_names(names: object) -> str:
    return ", ".join(map(str, names)) if isinstance(names, list) else ""


def _is_empty(value: object) -> bool:
    return value is None or value in ("", [], {}, ())


def _as_list(value: object) -> list[object]:
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else []
