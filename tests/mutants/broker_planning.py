"""Mutants of swarm/broker/planning."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="objective-auto-turns-at-once",
        breaks="The objective `auto` changes the plan with every change of load.",
        target="swarm.broker.planning.demand:Demand.update",
        old="if self._due_s < (min(BUSY_S, quiet_s) if self.is_quiet else self._patience_s(quiet_s)):",
        new="if self._due_s < 0 * (min(BUSY_S, quiet_s) if self.is_quiet else self._patience_s(quiet_s)):",
        caught_by="tests/unit/broker/planning/test_demand.py::test_a_minute_with_one_sequence_is_quiet",
    ),
    Mutant(
        name="planned-with-the-dead",
        breaks="A lost worker can get layers in a plan.",
        target="swarm.broker.planning.proposals:_list_candidates",
        old="members = [w for w in state.workers.values() if w.state in (WorkerState.MEMBER, WorkerState.REFUSED)]",
        new="members = [w for w in state.workers.values() if w.state is not WorkerState.LEFT]",
        caught_by="sim crash",
    ),
    Mutant(
        name="objective-auto-refuses-what-fitted",
        breaks="The plan for low load has less KV capacity, so that accepted lengths no longer fit.",
        target="swarm.broker.planning.rules:PlanRules.resolve_objective",
        old='return replace(self, objective="latency", kv_positions=max(self.kv_positions, context))',
        new='return replace(self, objective="latency", kv_positions=self.kv_positions)',
        caught_by="tests/unit/broker/planning/test_objective_auto.py::test_no_request_becomes_too_large",
    ),
    Mutant(
        name="cordoned-gets-layers",
        breaks="A cordoned worker gets the layers of a lost worker.",
        target="swarm.broker.planning.rules:apply_steering",
        old="pins={**rules.pins, **steering.pins, **cordoned_layers},",
        new="pins={**rules.pins, **steering.pins},",
        caught_by="tests/unit/broker/admin/test_helm.py::test_a_cordoned_worker_serves_what_it_has_and_gets_nothing_new",
    ),
    Mutant(
        name="plan-changes-at-every-join",
        breaks="Under load, every worker that joins moves layers once more.",
        target="swarm.broker.planning.growth:is_due",
        old="if state.now < state.moves.quiet_until:",
        new="if False:",
        caught_by="tests/unit/broker/planning/test_growth.py::test_under_load_the_plan_changes_once_per_cooldown",
    ),
    Mutant(
        name="move-that-does-not-pay",
        breaks="Layers move under load although the move costs more than it gains.",
        target="swarm.broker.planning.growth:is_due",
        old="return not is_for_speed or pays_for_itself(predict_move(state, proposal), cooldown_s)",
        new="return True",
        caught_by="tests/unit/broker/planning/test_growth.py"
        "::test_a_change_that_costs_too_much_is_not_made_while_requests_run",
    ),
)
