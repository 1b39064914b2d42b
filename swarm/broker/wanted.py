"""Who would hold which layers if the plan were made now.

From what workers said and what is set by hand to the problems that the search solves. Which problem it is depends on
how steps will run:

* in mode ``batch``, and for the objective ``latency``, a step's time is the sum over its stages;
* with several steps in flight it is the slowest stage's;
* in mode ``auto``, stages that all compute on one machine's cores take turns, so theirs is the sum, computed with all
  cores. If there are other machines too, both ways are looked at, and the quicker is taken.

Workers that take turns on one machine can't make each other quicker, and who starts several there wants several (for
their memory, or to try it out): for the objective ``throughput`` they get even shares, and the little that each more
stage costs is told but doesn't count. For the objective ``latency`` it does count, and one of them is enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from swarm.broker.plan import tables
from swarm.broker.plan.explain import MAX_EXPLAINED, Forecast, forecast, why_left_out
from swarm.broker.plan.load import MOST_S, Load, Speeds
from swarm.broker.plan.problem import Device, Line, Link, Model, Problem, Share, Shortage
from swarm.broker.plan.search import EQUAL
from swarm.broker.plan.solve import EXACT, in_this_order, solve
from swarm.broker.state import State, Worker, WorkerState
from swarm.wire.messages import Hello, LayerRange, LinkCost, Manifest, Suppose

UNKNOWN_S = 0.001  # a layer's time, if nobody measured one: then all are alike
MOST_BYTES_PER_S = 1e15  # whatever a worker says about its wire
MAX_BESIDE = 48  # workers that are looked at for what one more would change
MAX_HOSTS = 4  # machines that are looked at by themselves, the quickest


@dataclass(frozen=True, slots=True)
class PlanRules:
    """What a plan must keep to. ``margin``: a plan in force is changed for speed alone if the new one is quicker by
    more than this part. ``pins``, ``caps``, ``exclude``: by workers' names. ``min_layers_per_s``: of one decoding
    sequence, a worker's least speed."""

    mode: str = "auto"
    objective: str = "auto"
    load: Load = field(default_factory=Load)
    kv_positions: int = 0
    margin: float = 0.1
    step_positions: int = 512
    max_running: int = 64
    min_memory_bytes: int = 0
    min_layers_per_s: float = 0.0
    pins: Mapping[str, LayerRange] = field(default_factory=dict)
    caps: Mapping[str, int] = field(default_factory=dict)
    exclude: frozenset[str] = frozenset()

    def why_not(self, hello: Hello) -> str | None:
        """Why this worker is not wanted as a member; None if it is."""
        if hello.memory_bytes < self.min_memory_bytes:
            return (
                f"it may use {hello.memory_bytes / 2**20:.0f} MiB for the model, and this swarm takes workers from "
                f"{self.min_memory_bytes / 2**20:.0f} MiB on (plan.min_memory): raise its memory limit"
            )
        speeds = Speeds.of(hello.costs, alone=True)
        if speeds is None or not self.min_layers_per_s:
            return None
        rate = 1 / max(speeds.layer_s(Load(1, self.load.context, 0.0)), 1e-9)
        if rate >= self.min_layers_per_s:
            return None
        return (
            f"it was measured to compute {rate:.3g} layers a second, and this swarm takes workers from "
            f"{self.min_layers_per_s:.3g} on (plan.min_layers_per_s): give it more threads or another device"
        )


@dataclass(frozen=True, slots=True)
class Proposal:
    """``shares``: (incarnation, layers) in pipeline order; "" for a worker that is only supposed."""

    shares: tuple[tuple[str, LayerRange], ...]
    forecast: Forecast
    now_s: float | None  # the step's time with the plan in force; None if there is none, or it can't go on


def propose(
    state: State, rules: PlanRules, *, without: Worker | None = None, suppose: Suppose | None = None
) -> Proposal | Shortage:
    """The plan that would be made now. Nobody gets what it has refused; with fewer workers the others' ranges change,
    so they are looked at again."""
    suppose = suppose or Suppose()
    if suppose.objective:
        rules = replace(rules, objective=suppose.objective)
    gone = {*suppose.without, *rules.exclude}
    workers = [w for w in _candidates(state) if w is not without and w.name not in gone]
    refusing: list[Worker] = []
    while state.manifest is not None and workers:
        found = _Table(state, rules, workers, suppose).best()
        if isinstance(found, Shortage):
            return Shortage(found.text + _refusals(refusing, " ({})"), found.missing_bytes)
        by_id = {w.incarnation: w for w in workers}
        refused = next((i for i, layers in found.shares if i and by_id[i].refuses(layers)), None)
        if refused is None:
            if suppose == Suppose():
                found = _Table(state, rules, workers, suppose).kept(found)
            return _with_one_more(state, rules, workers, found) if not suppose.more else found
        refusing.append(by_id[refused])
        workers.remove(by_id[refused])
    text = _refusals(refusing, "a worker that can load the model: {}")
    nobody = "a worker: none has joined yet" if without is None else "another worker, since this is the only one"
    if not text and state.manifest is not None and (gone & {w.name for w in _candidates(state)}):
        nobody = f"a worker besides {', '.join(sorted(gone))}, which must not be used"
    return Shortage(text or nobody, 0)


def _with_one_more(state: State, rules: PlanRules, workers: Sequence[Worker], found: Proposal) -> Proposal:
    """What one more worker like the quickest of the plan would change, on a machine of its own. Among many workers only
    one order is looked at, of those of the plan and the quickest others: it may be better still."""
    by_id = {w.incarnation: w for w in workers}
    used = [by_id[incarnation] for incarnation, _ in found.shares]
    best = min(used, key=lambda worker: _alone_s(worker, rules.load))
    suppose = Suppose(more=1, like=best.name)
    if len(workers) < EXACT:
        more = _Table(state, rules, workers, suppose).best()
        step_s = None if isinstance(more, Shortage) else more.forecast.step_s
    else:
        rest = sorted((w for w in workers if w not in used), key=lambda worker: _alone_s(worker, rules.load))
        step_s = _Table(state, rules, [*used, *rest[: max(0, MAX_BESIDE - len(used))]], suppose).about()
    if step_s is None:
        return found
    if len(workers) >= EXACT:
        step_s = min(step_s, found.forecast.step_s)
    return replace(found, forecast=replace(found.forecast, one_more_s=step_s, like=best.name))


def _alone_s(worker: Worker, load: Load) -> float:
    """A layer's time with all cores of the host."""
    speeds = Speeds.of(worker.hello.costs, alone=True)
    return UNKNOWN_S if speeds is None else speeds.layer_s(load)


class _Table:
    """The workers at hand, as devices, and what is asked of them."""

    def __init__(self, state: State, rules: PlanRules, workers: Sequence[Worker], suppose: Suppose) -> None:
        assert state.manifest is not None
        self._manifest: Manifest = state.manifest
        self._rules = rules
        self._current = state.book.current
        self._ids = [w.incarnation for w in workers] + [""] * suppose.more
        like = next((w for w in workers if w.name == suppose.like), workers[0])
        self._workers = [*workers, *([like] * suppose.more)]
        self._names = [w.name for w in workers] + [f"{like.name}+{n + 1}" for n in range(suppose.more)]
        self._is_latency = rules.objective == "latency"
        self._load = Load(1, rules.load.context, rules.load.prompt) if self._is_latency else rules.load

    def best(self) -> Proposal | Shortage:
        """The quickest of all ways; with room for the keys and values that are wanted, or failing that, without."""
        for kv_positions in dict.fromkeys((self._rules.kv_positions, 0)):
            found = [each for problem, chosen in self._problems(kv_positions) if (each := self._solve(problem, chosen))]
            if found:
                quickest = min(seconds for seconds, *_ in found)
                _, problem, line, chosen = next(each for each in found if each[0] <= quickest * (1 + EQUAL))
                return self._proposal(problem, line, chosen)
        problem, _ = next(self._problems(0))
        shortage = solve(problem)
        assert isinstance(shortage, Shortage)
        return shortage

    def about(self) -> float | None:
        """A step's time with all of them in this order, the last one anywhere, quickly found; None if there is none."""
        found = []
        for kv_positions in dict.fromkeys((self._rules.kv_positions, 0)):
            for problem, chosen in self._problems(kv_positions):
                line = in_this_order(problem)
                if line is not None:
                    found.append(tables.step_seconds(self._honest(problem, chosen), line))
            if found:
                return min(found)
        return None

    def _solve(self, problem: Problem, chosen: list[int]) -> tuple[float, Problem, Line, list[int]] | None:
        line = solve(problem)
        if isinstance(line, Shortage):
            return None
        honest = self._honest(problem, chosen)
        if self._rules.mode == "auto" and not problem.takes_turns and len(line) > 1 and self._on_one_machine(line):
            return None  # they would take turns, and are looked at so
        return tables.step_seconds(honest, line), problem, line, chosen

    def _on_one_machine(self, line: Line) -> bool:
        used = [self._workers[share.device].hello for share in line]
        return all(h.device == "cpu" for h in used) and len({self._host(share.device) for share in line}) == 1

    # --- the problems ------------------------------------------------------------------------------------------------

    def _problems(self, kv_positions: int) -> Iterator[tuple[Problem, list[int]]]:
        everybody = list(range(len(self._ids)))
        alone = self._host_groups()
        if self._is_latency or self._rules.mode == "batch" or (self._rules.mode == "auto" and len(alone) == 1):
            yield self._problem(everybody, kv_positions, takes_turns=True), everybody
            return
        yield self._problem(everybody, kv_positions, takes_turns=False), everybody
        pinned = {i for i in everybody if self._names[i] in self._rules.pins}
        for group in alone[:MAX_HOSTS] if self._rules.mode == "auto" else []:
            if pinned <= set(group):
                yield self._problem(group, kv_positions, takes_turns=True), group

    def _host_groups(self) -> list[list[int]]:
        """Workers of one machine's cores, a list for each machine; one list of all if there is but one machine."""
        if any(worker.hello.device != "cpu" for worker in self._workers):
            found: dict[str, list[int]] = {"": []}
        else:
            found = {}
        for index, worker in enumerate(self._workers):
            if worker.hello.device == "cpu":
                found.setdefault(self._host(index), []).append(index)
        speed = {
            host: min((_alone_s(self._workers[i], self._load) for i in group), default=0.0)
            for host, group in found.items()
        }
        groups = sorted((host for host in found), key=lambda host: speed[host])
        return [found[host] for host in groups if found[host] or len(found) > 1]

    def _host(self, index: int) -> str:
        host = self._workers[index].hello.host
        return host if self._ids[index] else f"{host}'{index}"  # one that is supposed has a machine of its own

    def _problem(self, chosen: list[int], kv_positions: int, *, takes_turns: bool) -> Problem:
        devices = [self._device(i, alone=takes_turns) for i in chosen]
        free = takes_turns and not self._is_latency
        if takes_turns:
            devices = _alike(devices)
        if free:
            devices = [replace(device, stage_s=0.0) for device in devices]
        model = Model.of(self._manifest, positions=self._rules.step_positions, vocabulary_rows=self._rules.max_running)
        moved = int((self._load.rows + self._load.positions) * self._manifest.hidden_size * 4)
        return Problem(
            model=replace(model, hop_bytes=moved),
            devices=tuple(devices),
            takes_turns=takes_turns,
            free_hops=free,
            kv_positions=kv_positions,
        )

    def _honest(self, problem: Problem, chosen: list[int]) -> Problem:
        """With what the choice left aside: hops, and what each stage costs beside its layers."""
        own = [self._device(i, alone=problem.takes_turns) for i in chosen]
        if problem.takes_turns:
            own = _alike(own)
        return replace(problem, devices=tuple(own), free_hops=False)

    def _device(self, index: int, *, alone: bool) -> Device:
        worker, name = self._workers[index], self._names[index]
        hello = worker.hello
        speeds, pace = Speeds.of(hello.costs, alone=alone), worker.pace
        known = [s.layer_s(self._load) for w in self._workers if (s := Speeds.of(w.hello.costs, alone=alone))]
        unknown = median(known) if known else UNKNOWN_S
        pin = self._rules.pins.get(name)
        return Device(
            name=name,
            memory_bytes=hello.memory_bytes,
            layer_s=pace * (speeds.layer_s(self._load) if speeds else unknown),
            stage_s=pace * speeds.stage_s(self._load) if speeds else 0.0,
            embed_s=pace * speeds.embed_s(self._load) if speeds else 0.0,
            head_s=pace * speeds.head_s(self._load) if speeds else 0.0,
            host=self._host(index),
            kind=hello.device,
            cores=hello.cores,
            link=_link(hello.link),
            held=worker.layers if self._ids[index] else None,
            pinned=pin,
            max_layers=self._rules.caps.get(name),
        )

    # --- the answer --------------------------------------------------------------------------------------------------

    def _proposal(self, problem: Problem, line: Line, chosen: list[int]) -> Proposal:
        honest = self._honest(problem, chosen)
        excluded = tuple((name, "it is excluded by hand") for name in sorted(self._rules.exclude))
        objective = "latency" if self._is_latency else "throughput"
        others = self._others(problem, chosen, tables.step_seconds(honest, line))
        told = forecast(honest, line, self._load, objective, others + excluded)
        if problem.kv_positions < self._rules.kv_positions:
            note = f"there is no room for keys and values of {self._rules.kv_positions} positions everywhere"
            told = replace(told, notes=(*told.notes, note))
        shares = tuple((self._ids[chosen[share.device]], share.layers) for share in line)
        return Proposal(shares, told, self._now_s(problem.kv_positions))

    def _others(self, problem: Problem, chosen: list[int], now_s: float) -> tuple[tuple[str, str], ...]:
        """Those who were not looked at together with the chosen ones, and why: what all together would do."""
        rest = [i for i in range(len(self._ids)) if i not in chosen]
        if not rest:
            return ()
        everybody = list(range(len(self._ids)))
        whole = self._honest(self._problem(everybody, problem.kv_positions, takes_turns=False), everybody)
        thorough = len(everybody) <= EXACT
        return tuple(
            (self._names[i], why_left_out(whole, i, now_s, thorough and count < MAX_EXPLAINED))
            for count, i in enumerate(rest)
        )

    def kept(self, found: Proposal) -> Proposal:
        """The plan in force instead of this one, if it can go on and this one is no better than the margin; but where
        stages take turns, a newcomer gets its part."""
        in_force = self._in_force(self._rules.kv_positions) or self._in_force(0)
        if in_force is None or self._current is None or found.now_s is None:
            return found
        members = [stage.incarnation for stage in self._current.stages]
        newcomers = {incarnation for incarnation, _ in found.shares} - set(members)
        if (
            newcomers
            and found.forecast.takes_turns
            and set(members) <= {incarnation for incarnation, _ in found.shares}
        ):
            return found
        if found.now_s > found.forecast.step_s * (1 + self._rules.margin) or self._is_refused():
            return found
        if list(found.shares) == [(stage.incarnation, stage.layers) for stage in self._current.stages]:
            return found
        return self._proposal(*in_force, list(range(len(self._ids))))

    def _is_refused(self) -> bool:
        places = {incarnation: i for i, incarnation in enumerate(self._ids) if incarnation}
        stages = () if self._current is None else self._current.stages
        return any(self._workers[places[s.incarnation]].refuses(s.layers) for s in stages)

    def _now_s(self, kv_positions: int) -> float | None:
        """What a step takes with the plan in force; None if it can't go on."""
        in_force = self._in_force(kv_positions)
        return None if in_force is None else tables.step_seconds(*in_force)

    def _in_force(self, kv_positions: int) -> tuple[Problem, Line] | None:
        """The plan in force; None if there is none, or it may not be so any more."""
        places = {incarnation: i for i, incarnation in enumerate(self._ids) if incarnation}
        if self._current is None or any(s.incarnation not in places for s in self._current.stages):
            return None
        everybody = list(range(len(self._ids)))
        turns = self._is_latency or self._rules.mode == "batch"
        turns = turns or (self._rules.mode == "auto" and self._current.shares_cores)
        problem = self._honest(self._problem(everybody, kv_positions, takes_turns=turns), everybody)
        line = tuple(Share(places[s.incarnation], s.layers) for s in self._current.stages)
        for share in line:
            device = problem.devices[share.device]
            own = tables.seconds(problem.model, device, kv_positions)
            if not own[share.layers.first, share.layers.stop] < float("inf"):
                return None
        return problem, line


def _link(measured: LinkCost | None) -> Link:
    """The way as it was measured, within bounds that can be reckoned with."""
    if measured is None:
        return Link()
    return Link(min(measured.round_trip_s / 2, MOST_S), max(1.0, min(measured.bytes_per_s, MOST_BYTES_PER_S)))


def _alike(devices: Sequence[Device]) -> list[Device]:
    """Processes that use the same cores in turn are equally quick: whatever tells them apart disturbed a measurement.
    The best figure of each kind is the least disturbed."""
    groups: dict[tuple[str, str, int], list[Device]] = {}
    for device in devices:
        groups.setdefault((device.host, device.kind, device.cores), []).append(device)
    found = []
    for device in devices:
        group = groups[device.host, device.kind, device.cores] if device.host and device.kind == "cpu" else [device]
        found.append(
            replace(
                device,
                layer_s=min(d.layer_s for d in group),
                stage_s=min(d.stage_s for d in group),
                embed_s=min(d.embed_s for d in group),
                head_s=min(d.head_s for d in group),
            )
        )
    return found


def _candidates(state: State) -> list[Worker]:
    """Members in pipeline order: those of the present plan first, where they are, then by arrival."""
    current = state.book.current
    place = {s.incarnation: i for i, s in enumerate(current.stages)} if current else {}
    members = [w for w in state.workers.values() if w.state in (WorkerState.MEMBER, WorkerState.REFUSED)]
    return sorted(members, key=lambda w: (place.get(w.incarnation, len(place)), _held_first(w), w.joined_at, w.name))


def _refusals(workers: list[Worker], text: str) -> str:
    """The text with everybody's reason; empty if nobody refuses."""
    return text.format("; ".join(f"{w.name} refused: {w.reason}" for w in workers))[:3000] if workers else ""


def _held_first(worker: Worker) -> int:
    """Workers that hold layers already keep their order."""
    held = worker.layers
    return held.first if held is not None else 1 << 30
