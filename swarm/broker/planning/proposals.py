"""Proposals: which worker would hold which layers if the plan were made now.

Workers' reports and the operator's rules become the problems that the search solves. Which problem it is depends on how
steps will run:

* in mode ``batch``, and for the objective ``latency``, a step's time is the sum over its stages;
* with several steps in flight it is the slowest stage's;
* in mode ``auto``, stages that all compute on one machine's cores take turns, so their time is the sum, computed with
  all
  cores. If there are other machines too, both ways are considered, and the quicker is taken.

Workers that take turns on one machine can't make each other quicker, and a user who starts several there wants several
(for their memory, or to try it out): for the objective ``throughput`` they get even shares, and the small cost of each
additional stage is shown but not counted. For the objective ``latency`` it does count, and one worker is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from swarm.broker.planner.explain import Alternative, ExtraWorker, Forecast, describe_speedup
from swarm.broker.planner.problem import NO_WORKER, Shortage
from swarm.broker.planner.solve import MAX_EXACT
from swarm.broker.planner.takeover import ReplayWork
from swarm.broker.planning.alternatives import find_alternatives
from swarm.broker.planning.candidates import CandidatePool, Proposal
from swarm.broker.planning.demand import Demand
from swarm.broker.planning.growth import is_due, predict_move
from swarm.broker.planning.measurements import layer_alone_s, list_lost_sequences
from swarm.broker.planning.rules import PlanRules, apply_steering, describe_held, exclude_cordoned
from swarm.broker.state import Plan, StagePlan, State, Worker, WorkerState
from swarm.broker.state.moves import MovePrediction
from swarm.broker.state.workers import BROKER, RouteState
from swarm.errors import StageSetError
from swarm.wire.messages import LayerRange, Manifest, PlanWhatIf, layers_of, loaded_layers, to_ranges

MAX_CONSIDERED = 48  # workers considered for the effect of one more worker


def propose(
    state: State,
    rules: PlanRules,
    *,
    without: Worker | None = None,
    suppose: PlanWhatIf | None = None,
    thorough: bool = False,
) -> Proposal | Shortage:
    """Propose a plan for the current workers, or explain why there is none.

    A worker gets no layers that it has refused. A cordoned worker keeps its layers if a plan allows this; otherwise the
    plan is made without it. ``without``: worker to leave out. ``suppose``: assumptions of a what-if query.
    ``thorough``: include explanations for reports, which take longer to compute than the plan.
    """
    rules = apply_steering(state, rules, state.plans.current)
    proposal = _propose_by_rules(state, rules, without, suppose or PlanWhatIf(), thorough=thorough)
    cordoned = sorted(w.name for w in _list_candidates(state) if w.name in state.constraints.cordoned)
    if isinstance(proposal, Shortage) and cordoned:
        proposal = _propose_by_rules(
            state, exclude_cordoned(state, rules), without, suppose or PlanWhatIf(), thorough=thorough
        )
    if isinstance(proposal, Shortage):
        held = [name for name in cordoned if without is None or name != without.name]
        return (
            replace(proposal, text=f"{proposal.text} ({describe_held(state.constraints, held)})") if held else proposal
        )
    names = {w.incarnation: w.name for w in state.workers.values()}
    standby = tuple(each for each in proposal.standby if names.get(each[0]) not in state.constraints.cordoned)
    return replace(proposal, standby=standby)


def _propose_by_rules(
    state: State, rules: PlanRules, without: Worker | None, suppose: PlanWhatIf, *, thorough: bool
) -> Proposal | Shortage:
    """Propose a plan by these rules, without the fallback for cordoned workers."""
    if suppose.objective:
        rules = replace(rules, objective=suppose.objective)
    gone = {*suppose.without, *rules.exclude}
    workers = [w for w in _list_candidates(state) if w is not without and w.name not in gone]
    refusing: list[Worker] = []
    while state.manifest is not None and workers:
        table = CandidatePool(state, rules, workers, suppose, thorough=thorough)
        proposal = table.best_proposal()
        # the plan for many sequences needs less memory on each machine
        if isinstance(proposal, Shortage) and table.is_quiet_plan:
            rules = replace(rules, objective="throughput")
            continue
        if isinstance(proposal, Shortage):
            return Shortage(proposal.text + _describe_refusals(refusing, " ({})"), proposal.missing_bytes)
        by_id = {w.incarnation: w for w in workers}
        refused = next((i for i, layers in proposal.shares if i and by_id[i].has_refused(layers)), None)
        if refused is None:
            stands = table.prefer_active(proposal) if suppose == PlanWhatIf() else proposal
            if not thorough:
                return stands
            return _add_alternatives(
                stands, find_alternatives(table, stands, proposal, state.plans.current, rules.margin)
            )
        refusing.append(by_id[refused])
        workers.remove(by_id[refused])
    text = _describe_refusals(refusing, "a worker that can load the model: {}")
    nobody = NO_WORKER if without is None else "another worker, since this is the only one"
    gone -= {"" if without is None else without.name}  # the worker may only be assumed to be drained
    if not text and state.manifest is not None and (gone & {w.name for w in _list_candidates(state)}):
        nobody = f"a worker besides {', '.join(sorted(gone))}, which must not be used"
    return Shortage(text or nobody, 0)


def propose_recovery(state: State, rules: PlanRules, fallen: Plan, replays: ReplayWork) -> Proposal | None:
    """Propose, after the loss of some of a plan's stages, the same plan with the lost layers at the workers that let
    sequences run again soonest. ``replays``: of all running sequences. None if that is impossible, and a plan must be
    made from scratch."""
    rules = apply_steering(state, rules, fallen)
    leaving = [w for w in state.workers.values() if w.state is WorkerState.LEAVING and w.incarnation in fallen.members]
    workers = [*_list_usable(state, rules), *leaving]
    if state.manifest is None or not any(w.incarnation in fallen.members for w in workers):
        return None
    proposal = CandidatePool(state, rules, workers, PlanWhatIf()).propose_recovery(fallen, replays)
    by_id = {w.incarnation: w for w in workers}
    if proposal is None or any(by_id[incarnation].has_refused(layers) for incarnation, layers in proposal.shares):
        return None
    return proposal


def explain_plan(state: State, rules: PlanRules, plan: Plan) -> Forecast | None:
    """Complete the plan's forecast with all reasons, the alternatives that were considered, and the effect of one more
    worker. This takes as long as making several plans; only the client that asked waits for it."""
    if plan.forecast is None:
        return None
    if rules.objective == "auto":  # it may mean something else by now, and no other plan was worth it
        rules = replace(rules, objective=plan.objective)
    outlook = _find_reasons(state, rules, plan) or plan.forecast
    others = outlook.others + _find_settings_plan(state, rules, plan, outlook.step_s)
    forecast = replace(plan.forecast, left_out=outlook.left_out, others=others)
    return _add_extra_worker(state, rules, plan, forecast)


def _find_reasons(state: State, rules: PlanRules, plan: Plan) -> Forecast | None:
    """Return the reasons as if the plan were made now. After a loss, the active plan may differ from the one that would
    be made."""
    made = propose(state, rules, thorough=True)
    if isinstance(made, Proposal) and made.is_like(plan):
        return made.forecast
    now = apply_steering(state, rules, plan)
    workers = _list_usable(state, now)
    table = CandidatePool(state, now, workers, PlanWhatIf(), thorough=True) if workers else None
    stands = None if table is None else table.active_proposal()
    if table is None or stands is None:
        return None
    if isinstance(made, Proposal):
        stands = _add_alternatives(stands, find_alternatives(table, stands, made, plan, now.margin))
    return stands.forecast


def _add_alternatives(proposal: Proposal, alternatives: tuple[Alternative, ...]) -> Proposal:
    return replace(proposal, forecast=replace(proposal.forecast, others=alternatives))


def _find_settings_plan(state: State, rules: PlanRules, plan: Plan, now_s: float) -> tuple[Alternative, ...]:
    """Return the plan that the settings alone would give, if the active one was set by an operator. Another objective
    has another load: then seconds can't be compared, and nothing is returned."""
    if not state.constraints.has_overrides:
        return ()
    free = apply_steering(state, rules, plan, state.constraints.without_overrides())
    workers = _list_usable(state, free)
    proposal = CandidatePool(state, free, workers, PlanWhatIf()).best_proposal() if workers else None
    if not isinstance(proposal, Proposal) or proposal.is_like(plan) or proposal.forecast.objective != plan.objective:
        return ()
    gain = describe_speedup(proposal.forecast.step_s, now_s)
    why = f"it is {gain}, but this plan is set by hand" if gain else "it is not faster, and this plan is set by hand"
    return (
        Alternative(proposal.named_shares, proposal.forecast.step_s, now_s, f"the settings alone would give it; {why}"),
    )


def _add_extra_worker(state: State, rules: PlanRules, plan: Plan, forecast: Forecast) -> Forecast:
    """Add the effect of another worker like the plan's quickest, on a machine of its own. Among many workers only one
    order is considered, with the plan's workers and the quickest others: the best plan may be better still."""
    rules = apply_steering(state, rules, plan)
    workers = _list_usable(state, rules)
    used = [worker for worker in workers if worker.incarnation in plan.members]
    if not used:
        return forecast
    best = min(used, key=lambda worker: layer_alone_s(worker, rules.load))
    suppose, is_exact = PlanWhatIf(more=1, like=best.name), len(workers) < MAX_EXACT
    if is_exact:
        proposal = CandidatePool(state, rules, workers, suppose).best_proposal()
        more = None if isinstance(proposal, Shortage) else (proposal.forecast.step_s, proposal.forecast.in_flight)
    else:
        rest = sorted((w for w in workers if w not in used), key=lambda worker: layer_alone_s(worker, rules.load))
        estimate = CandidatePool(state, rules, [*used, *rest[: max(0, MAX_CONSIDERED - len(used))]], suppose).estimate()
        more = None if estimate is None else (estimate.step_s, estimate.in_flight)
    if more is None:
        return forecast
    step_s, in_flight = more
    now_s = _predict_for_in_flight(state, rules, plan, in_flight) or forecast.step_s
    step_s = step_s if is_exact else min(step_s, now_s)
    return replace(forecast, one_more=ExtraWorker(best.name, step_s, now_s, in_flight * forecast.load.rows))


def _predict_for_in_flight(state: State, rules: PlanRules, plan: Plan, in_flight: int) -> float | None:
    """Predict a step's time with the active plan for as many sequences as ``in_flight`` steps of another plan would
    decode: fewer steps with more sequences each. None if the plan can't go on."""
    assert plan.forecast is not None
    if in_flight == plan.forecast.in_flight:
        return plan.forecast.step_s
    rows = max(1, rules.load.rows * in_flight // plan.forecast.in_flight)
    workers = _list_usable(state, rules)
    table = (
        CandidatePool(state, replace(rules, load=replace(rules.load, rows=rows)), workers, PlanWhatIf())
        if workers
        else None
    )
    active = None if table is None else table.active_proposal()
    return None if active is None else active.forecast.step_s * rules.load.rows / rows


def compare_with_active(state: State, rules: PlanRules, proposal: Proposal | Shortage) -> Proposal | Shortage:
    """Compare a previewed plan with the active one for the same number of sequences: more steps in flight carry more
    sequences."""
    plan = state.plans.current
    if isinstance(proposal, Shortage) or plan is None or plan.forecast is None or proposal.now_s is None:
        return proposal
    outlook = proposal.forecast
    if outlook.in_flight == plan.forecast.in_flight or outlook.objective != plan.objective:
        return proposal
    now_s = _predict_for_in_flight(state, apply_steering(state, rules, plan), plan, outlook.in_flight)
    rows = outlook.load.rows
    note = f"both times are for {outlook.in_flight * rows} sequences at a time, per {rows} of them"
    return replace(proposal, now_s=now_s, forecast=replace(outlook, notes=(*outlook.notes, note)))


def _state_key(state: State) -> tuple[object, ...]:
    workers = tuple(
        (w.incarnation, w.state, tuple(w.refusals), w.pace, w.planned_layers)
        for w in state.workers.values()
        if not w.is_gone
    )
    ways = state.routes.list_not_open(state.now)
    epoch = state.plans.current and state.plans.current.epoch
    return (workers, ways, epoch, state.manifest is None, state.constraints.cache_key)


@dataclass(slots=True)
class TargetPlan:
    """Plan that is wanted now, cached; recomputed only when something that it depends on has changed."""

    state: State
    rules: PlanRules
    demand: Demand = field(default_factory=Demand)
    rules_version: int = 0  # counts changes of the rules; part of the cache key
    _cached: tuple[object, Proposal | Shortage] | None = None

    def set_rules(self, rules: PlanRules) -> None:
        """Use these rules from now on."""
        self.rules = replace(rules, is_quiet=self.demand.is_quiet)
        self.rules_version += 1

    def update_demand(self, now: float) -> bool:
        """Judge by the load what objective ``auto`` means; return whether that has changed. The active plan is replaced
        if another is worth it by the new objective, as at any other time."""
        rules = self.rules
        if (self.state.constraints.objective or rules.objective) != "auto" or not rules.quiet_s:
            has_changed = self.demand.reset()
        else:
            num_sequences = len(self.state.running) + len(self.state.waiting)
            has_changed = self.demand.update(num_sequences, now, quiet_s=rules.quiet_s, busy_from=rules.busy_from)
        if has_changed:
            self.set_rules(rules)
        return has_changed

    @property
    def cache_key(self) -> tuple[object, ...]:
        """Cache key: equal as long as the same plan would be made."""
        return (*_state_key(self.state), self.rules_version)

    def propose(self) -> Proposal | Shortage:
        """Return the plan that would be made now, or the shortage that prevents one."""
        state = self.state
        key = self.cache_key
        if self._cached is None or self._cached[0] != key:
            self._cached = key, propose(state, self.rules)
        return self._cached[1]

    def propose_recovery(self, fallen: Plan | None, chunk: int) -> Proposal | None:
        """Return, if a plan fell while requests were under way, the plan that resumes them soonest. ``chunk``:
        positions per replay order."""
        if fallen is None or not (self.state.running or len(self.state.waiting)):
            return None
        replays = ReplayWork.from_sequences(list_lost_sequences(self.state), chunk)
        return propose_recovery(self.state, self.rules, fallen, replays)

    @property
    def should_change(self) -> bool:
        """Whether the active plan should be replaced now: it can't stay, or another one is worth it (``growth``)."""
        current = self.state.plans.current
        if current is None:
            return False
        proposal = self.propose()
        margin = apply_steering(self.state, self.rules, current).margin
        if not isinstance(proposal, Proposal) or not proposal.is_worth_it(current, margin):
            return False
        return is_due(self.state, proposal, margin, self.rules.cooldown_s)

    def predict_move(self, proposal: Proposal) -> MovePrediction:
        """Predict what the change to this proposal gains, for as many sequences as its steps in flight carry."""
        compared = compare_with_active(self.state, self.rules, proposal)
        return predict_move(self.state, compared if isinstance(compared, Proposal) else proposal)

    def shortage_without(self, worker: Worker) -> str | None:
        """Return the shortage that the swarm would have without this worker; None if it could do without."""
        proposal = propose(self.state, self.rules, without=worker)
        return proposal.text if isinstance(proposal, Shortage) else None


def _list_candidates(state: State) -> list[Worker]:
    """Return members in pipeline order: members of the active plan first, in its order, then the others by arrival."""
    current = state.plans.current
    place = {s.incarnation: i for i, s in enumerate(current.stages)} if current else {}
    members = [w for w in state.workers.values() if w.state in (WorkerState.MEMBER, WorkerState.REFUSED)]
    return sorted(
        members, key=lambda w: (place.get(w.incarnation, len(place)), _first_held_layer(w), w.joined_at, w.name)
    )


def _list_usable(state: State, rules: PlanRules) -> list[Worker]:
    """Return the candidate workers that the rules do not exclude."""
    return [worker for worker in _list_candidates(state) if worker.name not in rules.exclude]


def _describe_refusals(workers: list[Worker], text: str) -> str:
    """Fill the text with all refusing workers' reasons; empty if none refuses."""
    return text.format("; ".join(f"{w.name} refused: {w.reason}" for w in workers))[:3000] if workers else ""


def _first_held_layer(worker: Worker) -> int:
    """Return a sort key by which workers that already hold layers keep their order."""
    held = worker.layers
    return held.first if held is not None else 1 << 30


# --- from a proposal to the plan --------------------------------------------------------------------------------------


def draft(state: State, proposal: Proposal, epoch: int) -> Plan:
    """Make the plan of this epoch. A proposal that is no pipeline is a bug, and raises ``StageSetError``."""
    manifest = state.manifest
    assert manifest is not None
    senders = (BROKER, *(who for who, _ in proposal.shares))
    stages = tuple(
        _stage(state, sender, state.workers[who], layers)
        for sender, (who, layers) in zip(senders, proposal.shares, strict=False)
    )
    check_pipeline([stage.layers for stage in stages], manifest.num_layers)
    back = "" if proposal.back is None else proposal.back.choice
    return Plan(epoch, stages, proposal.forecast.objective, proposal.forecast, proposal.standby, back)


def redraft(state: State, plan: Plan, epoch: int) -> Plan:
    """Make the same plan once more, for this epoch, with the present routes."""
    senders = (BROKER, *(stage.incarnation for stage in plan.stages))
    stages = tuple(
        _stage(state, sender, state.workers[stage.incarnation], stage.layers)
        for sender, stage in zip(senders, plan.stages, strict=False)
    )
    return replace(plan, epoch=epoch, stages=stages)


def _stage(state: State, sender: str, worker: Worker, layers: LayerRange) -> StagePlan:
    assert state.manifest is not None
    manifest: Manifest = state.manifest
    is_relayed = state.routes.state_of(sender, worker.incarnation, state.now) is RouteState.RELAYED
    missing = to_ranges(layers_of((layers,)) - loaded_layers(worker.layers, worker.warm_layers))
    return StagePlan(
        incarnation=worker.incarnation,
        name=worker.name,
        layers=layers,
        endpoint=state.routes.relay_endpoint(worker) if is_relayed else state.routes.endpoint_of(worker),
        weight_bytes=manifest.weight_bytes(layers),
        host=worker.hello.host,
        device=worker.hello.device,
        memory_bytes=worker.hello.memory_bytes,
        load_bytes=sum(manifest.weight_bytes(each) for each in missing),
        key=worker.hello.key,
        relay=state.routes.relay_address(worker) if is_relayed else "",
    )


def check_pipeline(stages: Sequence[LayerRange], num_layers: int) -> None:
    """Raise StageSetError unless these stages, in this order, hold every layer once."""
    expected = 0
    for index, layers in enumerate(stages):
        if layers.stop <= layers.first:
            raise StageSetError("empty_stage", f"stage {index}: the layer range {layers} is empty")
        if layers.first != expected:
            kind = "gap" if layers.first > expected else "overlap"
            raise StageSetError(kind, f"stage {index}: {kind}, its layers {layers} should begin at {expected}")
        expected = layers.stop
    if expected != num_layers:
        raise StageSetError("wrong_total", f"the stages end at layer {expected}, the model has {num_layers}")
