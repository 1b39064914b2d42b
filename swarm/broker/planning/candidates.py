"""Pool of workers as the planner's devices: from workers' reports to problems that the search solves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from swarm.broker.planner import tables
from swarm.broker.planner.explain import MAX_EXPLAINED, Forecast, NamedShares, left_out_reason, make_forecast
from swarm.broker.planner.load import PlannedLoad, Speeds
from swarm.broker.planner.problem import Device, LayerShare, Line, ModelSizes, PlanningProblem, Shortage
from swarm.broker.planner.search import ROUNDING
from swarm.broker.planner.solve import MAX_EXACT, solve, solve_fixed_order
from swarm.broker.planner.standby import choose_standby
from swarm.broker.planner.takeover import ORDERS_S, ReplayWork, Takeover, find_takeover, predict_replay_s
from swarm.broker.planning import measurements
from swarm.broker.planning.rules import PlanRules, exclusion_reason
from swarm.broker.state import Plan, State, Worker
from swarm.broker.state.workers import BROKER, RouteState
from swarm.wire.messages import LayerRange, Manifest, PlanWhatIf

QUIET_NOTE = "objective auto: latency while at most one sequence is under way (plan.quiet_s), throughput again once"
MAX_HOSTS = 4  # machines that are considered on their own, the quickest first


@dataclass(frozen=True, slots=True)
class RecoveryOption:
    """Possible recovery after a loss, with its predicted times. ``is_warm``: no weights need to be loaded. ``choice``:
    which worker takes which layers, as text."""

    load_s: float  # predicted time to load the missing layers
    replay_s: float  # predicted time to replay what was lost
    is_warm: bool
    choice: str


@dataclass(frozen=True, slots=True)
class Proposal:
    """Plan that could be made, with its forecast. ``shares``: (incarnation, layers) in pipeline order; "" for an
    assumed worker. ``standby``: the layers that each worker keeps warm for others."""

    shares: tuple[tuple[str, LayerRange], ...]
    forecast: Forecast
    now_s: float | None  # predicted time of a step with the active plan; None if there is none, or it can't go on
    standby: tuple[tuple[str, tuple[LayerRange, ...]], ...] = ()
    back: RecoveryOption | None = None  # set only when the plan restores one that fell

    @property
    def named_shares(self) -> NamedShares:
        """Shares by workers' names."""
        return tuple((stage.worker, stage.layers) for stage in self.forecast.stages)

    def is_like(self, plan: Plan) -> bool:
        """Whether the same workers have the same layers, in the same order."""
        return list(self.shares) == [(stage.incarnation, stage.layers) for stage in plan.stages]

    def is_worth_it(self, current: Plan, margin: float) -> bool:
        """Whether to replace the active plan by this one.

        True if the active plan cannot continue, or if this plan is faster by more than the margin; also, where stages
        take turns, if this plan adds a worker and removes none.
        """
        if self.is_like(current):
            return False
        chosen = {incarnation for incarnation, _ in self.shares}
        if self.now_s is None or (self.forecast.takes_turns and current.members < chosen):
            return True
        return self.now_s > self.forecast.step_s * (1 + margin)


@dataclass(frozen=True, slots=True)
class PlanOption:
    """Possible plan: shares of layers by workers' names, in pipeline order, with the predicted time of a step."""

    shares: NamedShares
    step_s: float
    takes_turns: bool  # one step at a time goes through all stages, so its time is their sum

    @property
    def in_flight(self) -> int:
        return 1 if self.takes_turns else len(self.shares)


class CandidatePool:
    """Workers that a plan may use, as devices, and the load to plan for. ``thorough``: see ``Forecast``."""

    def __init__(
        self,
        state: State,
        rules: PlanRules,
        workers: Sequence[Worker],
        suppose: PlanWhatIf,
        *,
        thorough: bool = False,
    ) -> None:
        assert state.manifest is not None
        self._state = state
        self._manifest: Manifest = state.manifest
        self._suppose = suppose
        self._thorough = thorough
        self._current = state.plans.current
        self._ids = [w.incarnation for w in workers] + [""] * suppose.more  # of assumed workers: ""
        # the worker that assumed ones resemble
        template = next((w for w in workers if w.name == suppose.like), workers[0])
        self._workers = [*workers, *([template] * suppose.more)]
        self._names = [w.name for w in workers] + [f"{template.name}+{n + 1}" for n in range(suppose.more)]
        # by incarnation: the names of the workers that it can't reach, or reaches only through the relay
        self._blocked = measurements.route_targets(state, workers, RouteState.BLOCKED)
        self._relayed = measurements.route_targets(state, workers, RouteState.RELAYED)
        self._broker_latencies = measurements.find_broker_latencies(
            [(self._host(i), worker.hello.link) for i, worker in enumerate(self._workers)]
        )
        hosts = list(map(self._host, range(len(self._ids))))
        self._rules = rules = rules.resolve_objective(self._workers, hosts, self._manifest.context)
        self._is_latency = rules.objective == "latency"
        self.is_quiet_plan = self._is_latency and rules.is_quiet  # as long as the load is low
        self._min_kv_positions = rules.kv_positions if self.is_quiet_plan else 0
        self._context = 0  # positions before the replayed ones
        self._devices: dict[tuple[int, bool], Device] = {}  # several problems share the same devices
        self._load = PlannedLoad(1, rules.load.context, rules.load.prompt) if self._is_latency else rules.load

    def __len__(self) -> int:
        return len(self._ids)

    def best_proposal(self) -> Proposal | Shortage:
        """Return the quickest plan; with capacity for the requested keys and values, or, if that fails, without."""
        if self._single_stage_shortage is not None:
            return self._single_stage_shortage
        for kv_positions in dict.fromkeys((self._rules.kv_positions, self._min_kv_positions)):
            solutions = [
                each for problem, chosen in self._problems(kv_positions) if (each := self._solve(problem, chosen))
            ]
            if solutions:
                quickest = min(seconds for seconds, *_ in solutions)
                _, problem, line, chosen = next(each for each in solutions if each[0] <= quickest * (1 + ROUNDING))
                return self._make_proposal(problem, line, chosen)
        problem, _ = next(self._problems(kv_positions))
        shortage = solve(problem)
        assert isinstance(shortage, Shortage)
        return shortage

    def estimate(self) -> PlanOption | None:
        """Return a quick upper bound of a step's time: fixed order, only the last device moves; None if impossible."""
        for kv_positions in dict.fromkeys((self._rules.kv_positions, 0)):
            problems = [(self._add_all_costs(*each), each[0]) for each in self._problems(kv_positions)]
            options = [
                _make_option(honest, line) for honest, of in problems if (line := solve_fixed_order(of)) is not None
            ]
            if options:
                return min(options, key=lambda option: option.step_s)
        return None

    def quickest_option(self) -> PlanOption | None:
        """Return the line that is quickest by its figures alone, with all costs besides layers: no preference for even
        shares or for keeping layers in place."""
        for kv_positions in dict.fromkeys((self._rules.kv_positions, 0)):
            problems = [(self._add_all_costs(*each), each[1]) for each in self._problems(kv_positions)]
            exact = [(replace(problem, tolerance=0.0), chosen) for problem, chosen in problems]
            solutions = [each for problem, chosen in exact if (each := self._solve(problem, chosen))]
            if solutions:
                _, problem, line, _ = min(solutions, key=lambda each: each[0])
                return _make_option(problem, line)
        return None

    def exclude_worker(self, name: str) -> CandidatePool | None:
        """Return the pool without this worker; None if it would be empty."""
        rest = [w for w, own in zip(self._workers, self._ids, strict=True) if own and w.name != name]
        return CandidatePool(self._state, self._rules, rest, self._suppose) if rest else None

    def _solve(
        self, problem: PlanningProblem, chosen: list[int]
    ) -> tuple[float, PlanningProblem, Line, list[int]] | None:
        line = solve(problem)
        if isinstance(line, Shortage):
            return None
        honest = self._add_all_costs(problem, chosen)
        if self._rules.mode == "auto" and not problem.takes_turns and self._is_on_one_machine(line):
            over = self._solve_across_machines(problem, line)  # a line on one machine takes turns: another problem
            if over is None:
                return None
            line = over
        return tables.predicted_seconds(honest, line), problem, line, chosen

    def _solve_across_machines(self, problem: PlanningProblem, line: Line) -> Line | None:
        """Return a line that also uses the quickest worker on another machine or GPU; None if there is none."""
        used = {problem.devices[share.device].place for share in line}
        others = [i for i, device in enumerate(problem.devices) if device.place not in used]
        if not others:
            return None
        line_across = solve(problem, frozenset((min(others, key=lambda i: problem.devices[i].layer_s),)))
        return None if isinstance(line_across, Shortage) or self._is_on_one_machine(line_across) else line_across

    def _is_on_one_machine(self, line: Line) -> bool:
        """Whether several stages would share the cores of one machine, or one GPU."""
        used = {(self._host(share.device), self._workers[share.device].hello.device) for share in line}
        return len(line) > 1 and len(used) == 1

    @property
    def _single_stage_shortage(self) -> Shortage | None:
        """Shortage if one worker is pinned to all layers in a mode that needs two stages, else None."""
        whole = LayerRange(0, self._manifest.num_layers)
        pinned = [name for name in self._names if self._rules.pins.get(name) == whole]
        if self._rules.mode != "overlapped" or not pinned:
            return None
        text = f"another pin for {pinned[0]}, or another broker.mode: all layers are pinned to it, and mode overlapped"
        return Shortage(f"{text} needs two stages", 0)

    # --- problems ----------------------------------------------------------------------------------------------------

    def _problems(self, kv_positions: int) -> Iterator[tuple[PlanningProblem, list[int]]]:
        everybody = list(range(len(self._ids)))
        alone = measurements.group_by_machine(self._workers, list(map(self._host, everybody)), self._load)
        if self._is_latency or self._rules.mode == "batch" or (self._rules.mode == "auto" and len(alone) == 1):
            yield self._problem(everybody, kv_positions, takes_turns=True), everybody
            return
        yield self._problem(everybody, kv_positions, takes_turns=False), everybody
        pinned = {i for i in everybody if self._names[i] in self._rules.pins}
        for group in alone[:MAX_HOSTS] if self._rules.mode == "auto" else []:
            if pinned <= set(group):
                yield self._problem(group, kv_positions, takes_turns=True), group

    def _host(self, index: int) -> str:
        host = self._workers[index].hello.host
        return host if self._ids[index] else f"{host}'{index}"  # an assumed worker has a machine of its own

    def _problem(self, chosen: list[int], kv_positions: int, *, takes_turns: bool) -> PlanningProblem:
        devices = [self._device(i, alone=takes_turns) for i in chosen]
        free = takes_turns and not self._is_latency  # shares are even then: hops and stages cost nothing
        if takes_turns:
            devices = measurements.equalize(devices)
        if free:
            devices = [replace(device, stage_s=0.0) for device in devices]
        model = ModelSizes.from_manifest(
            self._manifest,
            positions=self._rules.step_positions,
            vocabulary_rows=self._rules.max_running,
            max_sequences=self._rules.max_sequences,
        )
        moved = int((self._load.rows + self._load.positions) * self._manifest.row_width * 4)
        return PlanningProblem(
            model=replace(model, hop_bytes=moved),
            devices=tuple(devices),
            takes_turns=takes_turns,
            free_hops=free,
            kv_positions=kv_positions,
        )

    def _add_all_costs(self, problem: PlanningProblem, chosen: list[int]) -> PlanningProblem:
        """Return the problem with the costs that the choice ignored: hops, and each stage's cost besides its layers."""
        own = [self._device(i, alone=problem.takes_turns) for i in chosen]
        if problem.takes_turns:
            own = measurements.equalize(own)
        return replace(problem, devices=tuple(own), free_hops=False)

    def _device(self, index: int, *, alone: bool) -> Device:
        key = index, alone
        if key not in self._devices:
            self._devices[key] = self._make_device(index, alone=alone)
        return self._devices[key]

    def _make_device(self, index: int, *, alone: bool) -> Device:
        worker, name, own = self._workers[index], self._names[index], self._ids[index]
        hello = worker.hello
        speeds, pace = Speeds.from_costs(hello.costs, alone=alone), worker.pace
        unknown = 0.0 if speeds else measurements.guess_layer_s(self._workers, self._load, alone=alone)
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
            link=measurements.bound_link(hello.link),
            held=worker.layers if own else None,
            kept=worker.warm_layers if own else (),
            load_bytes_per_s=measurements.load_rate(worker, self._workers),
            replay_s=measurements.replay_pace(worker, self._workers, self._state.plans.gauge)
            * (speeds.replay_s(self._context) if speeds else unknown / 16),
            pinned=pin,
            max_layers=self._rules.caps.get(name),
            cant_reach=self._blocked.get(own, frozenset()) if own else frozenset(),
            relayed_to=self._relayed.get(own, frozenset()) if own else frozenset(),
            is_shut=name in self._blocked[BROKER],
            is_relayed=name in self._relayed[BROKER],
            is_mute=self._cant_reach_broker(own),
            kv_share=hello.kv_share,
            broker_s=self._broker_latencies.get(self._host(index), 0.0) if alone else 0.0,
            away_s=self._broker_latencies.get(self._host(index), 0.0),
            rest_s=0.0 if alone else pace * measurements.idle_penalty_s(hello.costs, self._load),
            use=0.0 if alone else measurements.device_fraction(hello, self._load),
        )

    def _cant_reach_broker(self, own: str) -> bool:
        return bool(own) and self._state.routes.state_of(own, BROKER, self._state.now) is RouteState.BLOCKED

    # --- proposals ---------------------------------------------------------------------------------------------------

    def _make_proposal(self, problem: PlanningProblem, line: Line, chosen: list[int]) -> Proposal:
        honest = self._add_all_costs(problem, chosen)
        steering = self._state.constraints
        excluded = tuple((name, exclusion_reason(steering, name)) for name in sorted(self._rules.exclude))
        objective = "latency" if self._is_latency else "throughput"
        others = self._explain_unconsidered(problem, chosen, tables.predicted_seconds(honest, line))
        outlook = make_forecast(honest, line, self._load, objective, others + excluded, thorough=self._thorough)
        if problem.kv_positions < self._rules.kv_positions:
            note = f"there is no room for keys and values of {self._rules.kv_positions} positions everywhere"
            outlook = replace(outlook, notes=(*outlook.notes, note))
        if self.is_quiet_plan:
            outlook = replace(outlook, notes=(*outlook.notes, f"{QUIET_NOTE} {self._rules.busy_from} are"))
        shares = tuple((self._ids[chosen[share.device]], share.layers) for share in line)
        real = tuple(LayerShare(chosen[share.device], share.layers) for share in line)
        return Proposal(shares, outlook, self._active_step_s(problem.kv_positions), self._choose_standby(problem, real))

    def _choose_standby(self, problem: PlanningProblem, line: Line) -> tuple[tuple[str, tuple[LayerRange, ...]], ...]:
        """Choose the layers that every worker keeps for others, whether or not it was considered for the plan."""
        everybody = self._problem(list(range(len(self._ids))), problem.kv_positions, takes_turns=problem.takes_turns)
        standby_layers = choose_standby(everybody, line, self._rules.standby)
        return tuple((self._ids[index], layers) for index, layers in sorted(standby_layers.items()))

    def propose_recovery(self, fallen: Plan, replays: ReplayWork) -> Proposal | None:
        """Return the fastest way to restore a plan that fell, from the whole pool; see ``proposals``."""
        self._context = replays.context
        places, everybody = self._places(), list(range(len(self._ids)))
        survivors = tuple(LayerShare(places[s.incarnation], s.layers) for s in fallen.stages if s.incarnation in places)
        for kv_positions in dict.fromkeys((self._rules.kv_positions, 0)):
            problem = self._problem(everybody, kv_positions, takes_turns=self._takes_turns(fallen))
            honest = self._add_all_costs(problem, everybody)
            takeover = find_takeover(honest, survivors, replays)
            if takeover is not None and tables.is_connected(honest, takeover.line):
                work = replays.reduce_to(takeover.taken, honest)
                replay_s = work.predict_s(self._replay_alone_s(work, takeover, problem), self._state.costs.usual_step_s)
                is_warm, load_s = not takeover.load_s, ORDERS_S + takeover.load_s
                back = RecoveryOption(load_s, replay_s, is_warm, self._describe_choice(problem, takeover))
                return replace(self._make_proposal(problem, takeover.line, everybody), back=back)
        return None

    def _replay_alone_s(self, work: ReplayWork, takeover: Takeover, problem: PlanningProblem) -> float:
        """Predict the duration of replays beside which no step runs. With copies, the positions that are left have more
        positions before them than those for which the takeover was chosen."""
        if self._context == work.context:
            return takeover.replay_s
        self._context = work.context
        self._devices.clear()
        everybody = list(range(len(self._ids)))
        again = self._problem(everybody, problem.kv_positions, takes_turns=problem.takes_turns)
        return predict_replay_s(self._add_all_costs(again, everybody), takeover.taken, work)

    def _describe_choice(self, problem: PlanningProblem, takeover: Takeover) -> str:
        parts = []
        for share in takeover.taken:
            missing = tables.moved_bytes(problem.model, problem.devices[share.device])
            to_load = missing[share.layers.first, share.layers.stop]
            how = f"{to_load / 2**20:.1f} MiB to load" if to_load else "warm"
            parts.append(f"{self._names[share.device]} takes {share.layers.label} ({how})")
        return "; ".join(parts) or "every worker keeps its layers"

    def _places(self) -> dict[str, int]:
        return {incarnation: index for index, incarnation in enumerate(self._ids) if incarnation}

    def _takes_turns(self, plan: Plan) -> bool:
        in_turns = self._is_latency or self._rules.mode == "batch"
        return in_turns or (self._rules.mode == "auto" and plan.shares_cores)

    def _explain_unconsidered(
        self, problem: PlanningProblem, chosen: list[int], now_s: float
    ) -> tuple[tuple[str, str], ...]:
        """Return why workers outside of the chosen group were left out: the predicted effect of using all together."""
        rest = [i for i in range(len(self._ids)) if i not in chosen]
        if not rest:
            return ()
        everybody = list(range(len(self._ids)))
        whole = self._add_all_costs(self._problem(everybody, problem.kv_positions, takes_turns=False), everybody)
        thorough = self._thorough and len(everybody) <= MAX_EXACT
        return tuple(
            (self._names[i], left_out_reason(whole, i, now_s, thorough and count < MAX_EXPLAINED))
            for count, i in enumerate(rest)
        )

    def active_proposal(self) -> Proposal | None:
        """Return the active plan as a proposal made now; None if there is none, or it can't go on."""
        active = self._active_line()
        return None if active is None else self._make_proposal(*active, list(range(len(self._ids))))

    def prefer_active(self, proposal: Proposal) -> Proposal:
        """Return the active plan instead of this proposal, if it can go on and the proposal is not worth a change."""
        in_force = self._active_line()
        if in_force is None or self._current is None or proposal.is_like(self._current) or self._is_refused():
            return proposal
        if proposal.is_worth_it(self._current, self._rules.margin):
            return proposal
        return self._make_proposal(*in_force, list(range(len(self._ids))))

    def _is_refused(self) -> bool:
        places = self._places()
        stages = () if self._current is None else self._current.stages
        return any(self._workers[places[s.incarnation]].has_refused(s.layers) for s in stages)

    def _active_step_s(self, kv_positions: int) -> float | None:
        """Predict a step's time with the active plan; None if it can't go on."""
        in_force = self._find_active_line(kv_positions)
        return None if in_force is None else tables.predicted_seconds(*in_force)

    def _active_line(self) -> tuple[PlanningProblem, Line] | None:
        """Return the active plan as a line, with the KV capacity that the rules ask for if it has it."""
        return self._find_active_line(self._rules.kv_positions) or self._find_active_line(0)

    def _find_active_line(self, kv_positions: int) -> tuple[PlanningProblem, Line] | None:
        """Return the active plan as a line with its problem; None if there is none, or it is no longer allowed."""
        places = self._places()
        if self._current is None or any(s.incarnation not in places for s in self._current.stages):
            return None
        everybody = list(range(len(self._ids)))
        turns = self._takes_turns(self._current)
        problem = self._add_all_costs(self._problem(everybody, kv_positions, takes_turns=turns), everybody)
        line = tuple(LayerShare(places[s.incarnation], s.layers) for s in self._current.stages)
        if any(d.pinned is not None and all(s.device != i for s in line) for i, d in enumerate(problem.devices)):
            return None  # a worker with a pin has joined, and must get its layers
        for share in line:
            device = problem.devices[share.device]
            own = tables.range_seconds(problem.model, device, kv_positions)
            if not own[share.layers.first, share.layers.stop] < float("inf"):
                return None
        return problem, line


def _make_option(problem: PlanningProblem, line: Line) -> PlanOption:
    shares = tuple((problem.devices[share.device].name, share.layers) for share in line)
    return PlanOption(shares, tables.predicted_seconds(problem, line), problem.takes_turns)
