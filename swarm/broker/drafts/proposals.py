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

from swarm.broker.drafts.candidates import Proposal, Table
from swarm.broker.drafts.demand import Demand
from swarm.broker.drafts.figures import alone_s
from swarm.broker.drafts.rules import PlanRules, how_held, steered, without_the_cordoned
from swarm.broker.drafts.weighed import weigh
from swarm.broker.planner.explain import Forecast, OneMore, Weighed, quicker
from swarm.broker.planner.problem import NOBODY, Shortage
from swarm.broker.planner.recover import Replays
from swarm.broker.planner.solve import EXACT
from swarm.broker.state import Plan, StagePlan, State, Worker, WorkerState
from swarm.broker.state.workers import BROKER, Way
from swarm.errors import StageSetError
from swarm.wire.messages import LayerRange, Manifest, Suppose, layers_of, loaded_layers, ranges_of

MAX_BESIDE = 48  # workers considered for the effect of one more worker


def propose(
    state: State,
    rules: PlanRules,
    *,
    without: Worker | None = None,
    suppose: Suppose | None = None,
    thorough: bool = False,
) -> Proposal | Shortage:
    """Propose a plan as of now. A worker gets no layers that it has refused; with fewer workers the others' ranges
    change, so the others are considered again. ``thorough``: with reasons that take longer to find than the plan, for
    reports. A cordoned worker keeps its layers; if there is no such plan, one is made without it."""
    rules = steered(state, rules, state.book.current)
    found = _proposed(state, rules, without, suppose or Suppose(), thorough=thorough)
    cordoned = sorted(w.name for w in _candidates(state) if w.name in state.steering.cordoned)
    if isinstance(found, Shortage) and cordoned:
        found = _proposed(state, without_the_cordoned(state, rules), without, suppose or Suppose(), thorough=thorough)
    if isinstance(found, Shortage):
        held = [name for name in cordoned if without is None or name != without.name]
        return replace(found, text=f"{found.text} ({how_held(state.steering, held)})") if held else found
    names = {w.incarnation: w.name for w in state.workers.values()}
    kept = tuple(each for each in found.standby if names.get(each[0]) not in state.steering.cordoned)
    return replace(found, standby=kept)


def _proposed(
    state: State, rules: PlanRules, without: Worker | None, suppose: Suppose, *, thorough: bool
) -> Proposal | Shortage:
    """Propose a plan by these rules, without the fallback for cordoned workers."""
    if suppose.objective:
        rules = replace(rules, objective=suppose.objective)
    gone = {*suppose.without, *rules.exclude}
    workers = [w for w in _candidates(state) if w is not without and w.name not in gone]
    refusing: list[Worker] = []
    while state.manifest is not None and workers:
        table = Table(state, rules, workers, suppose, thorough=thorough)
        found = table.best()
        # the plan for many sequences needs less memory on each machine
        if isinstance(found, Shortage) and table.is_quietly:
            rules = replace(rules, objective="throughput")
            continue
        if isinstance(found, Shortage):
            return Shortage(found.text + _refusals(refusing, " ({})"), found.missing_bytes)
        by_id = {w.incarnation: w for w in workers}
        refused = next((i for i, layers in found.shares if i and by_id[i].refuses(layers)), None)
        if refused is None:
            stands = table.kept(found) if suppose == Suppose() else found
            if not thorough:
                return stands
            return _with_others(stands, weigh(table, stands, found, state.book.current, rules.margin))
        refusing.append(by_id[refused])
        workers.remove(by_id[refused])
    text = _refusals(refusing, "a worker that can load the model: {}")
    nobody = NOBODY if without is None else "another worker, since this is the only one"
    gone -= {"" if without is None else without.name}  # the worker may only be assumed to be drained
    if not text and state.manifest is not None and (gone & {w.name for w in _candidates(state)}):
        nobody = f"a worker besides {', '.join(sorted(gone))}, which must not be used"
    return Shortage(text or nobody, 0)


def come_back(state: State, rules: PlanRules, fallen: Plan, replays: Replays) -> Proposal | None:
    """Propose, after the loss of some of a plan's stages, the same plan with the lost layers at the workers that let
    sequences run again soonest. ``replays``: of all running sequences. None if that is impossible, and a plan must be
    made from scratch."""
    rules = steered(state, rules, fallen)
    leaving = [w for w in state.workers.values() if w.state is WorkerState.LEAVING and w.incarnation in fallen.members]
    workers = [*_usable(state, rules), *leaving]
    if state.manifest is None or not any(w.incarnation in fallen.members for w in workers):
        return None
    found = Table(state, rules, workers, Suppose()).come_back(fallen, replays)
    by_id = {w.incarnation: w for w in workers}
    if found is None or any(by_id[incarnation].refuses(layers) for incarnation, layers in found.shares):
        return None
    return found


def explained(state: State, rules: PlanRules, plan: Plan) -> Forecast | None:
    """Complete the plan's forecast with all reasons, the alternatives that were considered, and the effect of one more
    worker. This takes as long as making several plans; only the client that asked waits for it."""
    if plan.forecast is None:
        return None
    if rules.objective == "auto":  # it may mean something else by now, and no other plan was worth it
        rules = replace(rules, objective=plan.objective)
    found = _reasons(state, rules, plan) or plan.forecast
    others = found.others + _by_the_settings(state, rules, plan, found.step_s)
    forecast = replace(plan.forecast, left_out=found.left_out, others=others)
    return _with_one_more(state, rules, plan, forecast)


def _reasons(state: State, rules: PlanRules, plan: Plan) -> Forecast | None:
    """Return the reasons as if the plan were made now. After a loss, the active plan may differ from the one that would
    be made."""
    made = propose(state, rules, thorough=True)
    if isinstance(made, Proposal) and made.is_like(plan):
        return made.forecast
    now = steered(state, rules, plan)
    workers = _usable(state, now)
    table = Table(state, now, workers, Suppose(), thorough=True) if workers else None
    stands = None if table is None else table.in_force()
    if table is None or stands is None:
        return None
    if isinstance(made, Proposal):
        stands = _with_others(stands, weigh(table, stands, made, plan, now.margin))
    return stands.forecast


def _with_others(found: Proposal, others: tuple[Weighed, ...]) -> Proposal:
    return replace(found, forecast=replace(found.forecast, others=others))


def _by_the_settings(state: State, rules: PlanRules, plan: Plan, now_s: float) -> tuple[Weighed, ...]:
    """Return the plan that the settings alone would give, if the active one was set by an operator. Another objective
    has another load: then seconds can't be compared, and nothing is returned."""
    if not state.steering.is_by_hand:
        return ()
    free = steered(state, rules, plan, state.steering.by_the_settings())
    workers = _usable(state, free)
    found = Table(state, free, workers, Suppose()).best() if workers else None
    if not isinstance(found, Proposal) or found.is_like(plan) or found.forecast.objective != plan.objective:
        return ()
    gain = quicker(found.forecast.step_s, now_s)
    why = f"{gain}, but this one is by hand" if gain else "no quicker, and this one is by hand"
    return (Weighed(found.named, found.forecast.step_s, now_s, f"the settings alone would give it, {why}"),)


def _with_one_more(state: State, rules: PlanRules, plan: Plan, forecast: Forecast) -> Forecast:
    """Add the effect of another worker like the plan's quickest, on a machine of its own. Among many workers only one
    order is considered, with the plan's workers and the quickest others: the best plan may be better still."""
    rules = steered(state, rules, plan)
    workers = _usable(state, rules)
    used = [worker for worker in workers if worker.incarnation in plan.members]
    if not used:
        return forecast
    best = min(used, key=lambda worker: alone_s(worker, rules.load))
    suppose, is_exact = Suppose(more=1, like=best.name), len(workers) < EXACT
    if is_exact:
        found = Table(state, rules, workers, suppose).best()
        more = None if isinstance(found, Shortage) else (found.forecast.step_s, found.forecast.in_flight)
    else:
        rest = sorted((w for w in workers if w not in used), key=lambda worker: alone_s(worker, rules.load))
        about = Table(state, rules, [*used, *rest[: max(0, MAX_BESIDE - len(used))]], suppose).about()
        more = None if about is None else (about.step_s, about.in_flight)
    if more is None:
        return forecast
    step_s, in_flight = more
    now_s = _for_as_many(state, rules, plan, in_flight) or forecast.step_s
    step_s = step_s if is_exact else min(step_s, now_s)
    return replace(forecast, one_more=OneMore(best.name, step_s, now_s, in_flight * forecast.load.rows))


def _for_as_many(state: State, rules: PlanRules, plan: Plan, in_flight: int) -> float | None:
    """Predict a step's time with the active plan for as many sequences as ``in_flight`` steps of another plan would
    decode: fewer steps with more sequences each. None if the plan can't go on."""
    assert plan.forecast is not None
    if in_flight == plan.forecast.in_flight:
        return plan.forecast.step_s
    rows = max(1, rules.load.rows * in_flight // plan.forecast.in_flight)
    workers = _usable(state, rules)
    table = Table(state, replace(rules, load=replace(rules.load, rows=rows)), workers, Suppose()) if workers else None
    found = None if table is None else table.in_force()
    return None if found is None else found.forecast.step_s * rules.load.rows / rows


def compared(state: State, rules: PlanRules, found: Proposal | Shortage) -> Proposal | Shortage:
    """Compare a previewed plan with the active one for the same number of sequences: more steps in flight carry more
    sequences."""
    plan = state.book.current
    if isinstance(found, Shortage) or plan is None or plan.forecast is None or found.now_s is None:
        return found
    told = found.forecast
    if told.in_flight == plan.forecast.in_flight or told.objective != plan.objective:
        return found
    now_s = _for_as_many(state, steered(state, rules, plan), plan, told.in_flight)
    note = f"both times are for {told.in_flight * told.load.rows} sequences at a time, per {told.load.rows} of them"
    return replace(found, now_s=now_s, forecast=replace(told, notes=(*told.notes, note)))


def _of_the_state(state: State) -> tuple[object, ...]:
    workers = tuple(
        (w.incarnation, w.state, tuple(w.refusals), w.pace, w.planned) for w in state.workers.values() if not w.is_gone
    )
    ways = state.ways.at(state.now)
    epoch = state.book.current and state.book.current.epoch
    return (workers, ways, epoch, state.manifest is None, state.steering.key)


@dataclass(slots=True)
class Wanted:
    """Plan that is wanted now, cached; recomputed only when something that it depends on has changed."""

    state: State
    rules: PlanRules
    demand: Demand = field(default_factory=Demand)
    times_ruled: int = 0  # counts changes of the rules; part of the cache key
    _remembered: tuple[object, Proposal | Shortage] | None = None

    def rule(self, rules: PlanRules) -> None:
        """Use these rules from now on."""
        self.rules = replace(rules, is_quiet=self.demand.is_quiet)
        self.times_ruled += 1

    def look_at_demand(self, now: float) -> bool:
        """Judge by the load what objective ``auto`` means; return whether that has changed. The active plan is replaced
        if another is worth it by the new objective, as at any other time."""
        rules = self.rules
        if (self.state.steering.objective or rules.objective) != "auto" or not rules.quiet_s:
            has_changed = self.demand.forget()
        else:
            num_sequences = len(self.state.running) + len(self.state.waiting)
            has_changed = self.demand.look(num_sequences, now, quiet_s=rules.quiet_s, busy_from=rules.busy_from)
        if has_changed:
            self.rule(rules)
        return has_changed

    @property
    def rests_on(self) -> tuple[object, ...]:
        """Cache key: equal as long as the same plan would be made."""
        return (*_of_the_state(self.state), self.times_ruled)

    def now(self) -> Proposal | Shortage:
        """Return the plan that would be made now, or the shortage that prevents one."""
        state = self.state
        key = self.rests_on
        if self._remembered is None or self._remembered[0] != key:
            self._remembered = key, propose(state, self.rules)
        return self._remembered[1]

    def way_back(self, fallen: Plan | None, chunk: int) -> Proposal | None:
        """Return, if a plan fell while requests were under way, the plan that resumes them soonest. ``chunk``:
        positions per replay order."""
        if fallen is None or not (self.state.running or len(self.state.waiting)):
            return None
        replays = Replays.of((sequence.kv for sequence in self.state.running), chunk)
        return come_back(self.state, self.rules, fallen, replays)

    @property
    def is_change(self) -> bool:
        """Whether the active plan should be replaced: it can't stay, or another one is worth it."""
        current = self.state.book.current
        if current is None:
            return False
        found = self.now()
        margin = steered(self.state, self.rules, current).margin
        return isinstance(found, Proposal) and found.is_worth_it(current, margin)

    def shortage_without(self, worker: Worker) -> str | None:
        """Return the shortage that the swarm would have without this worker; None if it could do without."""
        found = propose(self.state, self.rules, without=worker)
        return found.text if isinstance(found, Shortage) else None


def _candidates(state: State) -> list[Worker]:
    """Return members in pipeline order: those of the active plan first, in its order, then by arrival."""
    current = state.book.current
    place = {s.incarnation: i for i, s in enumerate(current.stages)} if current else {}
    members = [w for w in state.workers.values() if w.state in (WorkerState.MEMBER, WorkerState.REFUSED)]
    return sorted(members, key=lambda w: (place.get(w.incarnation, len(place)), _held_first(w), w.joined_at, w.name))


def _usable(state: State, rules: PlanRules) -> list[Worker]:
    """Return the candidates that the rules don't exclude."""
    return [worker for worker in _candidates(state) if worker.name not in rules.exclude]


def _refusals(workers: list[Worker], text: str) -> str:
    """Fill the text with all refusing workers' reasons; empty if none refuses."""
    return text.format("; ".join(f"{w.name} refused: {w.reason}" for w in workers))[:3000] if workers else ""


def _held_first(worker: Worker) -> int:
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


def draft_again(state: State, plan: Plan, epoch: int) -> Plan:
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
    is_relayed = state.ways.to(sender, worker.incarnation, state.now) is Way.RELAYED
    missing = ranges_of(layers_of((layers,)) - loaded_layers(worker.layers, worker.kept))
    return StagePlan(
        incarnation=worker.incarnation,
        name=worker.name,
        layers=layers,
        endpoint=state.ways.endpoint_by_relay(worker) if is_relayed else state.ways.endpoint_of(worker),
        weight_bytes=manifest.weight_bytes(layers),
        host=worker.hello.host,
        device=worker.hello.device,
        memory_bytes=worker.hello.memory_bytes,
        load_bytes=sum(manifest.weight_bytes(each) for each in missing),
        key=worker.hello.key,
        relay=state.ways.relay_to(worker) if is_relayed else "",
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
