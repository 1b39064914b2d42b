"""Mutants of swarm/broker/planner."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="warm-layers-as-good-as-active-ones",
        breaks="A departure makes all layers change hands although their workers could stay in place.",
        target="swarm.broker.planner.solve:_secondary_cost",
        old="moved = (loaded + _KV_WEIGHT * lacking) / (1 + _KV_WEIGHT)",
        new="moved = loaded",
        caught_by="tests/unit/broker/planner/test_plan_search.py"
        "::test_among_equals_layers_stay_with_their_keys_and_values",
    ),
    Mutant(
        name="a-shut-way-is-planned",
        breaks="A plan over a blocked connection is accepted when there is no other plan.",
        target="swarm.broker.planner.solve:solve",
        old="connected = [line for line in (settled, solution[1]) if tables.is_connected(problem, line)]",
        new="connected = [settled]",
        caught_by="tests/unit/broker/planner/test_plan_ways.py::test_where_there_is_no_order_the_ways_are_named",
    ),
    Mutant(
        name="relay-costs-nothing",
        breaks="A relayed connection is planned with the cost of one hop instead of two.",
        target="swarm.broker.planner.tables:hop_seconds",
        old="both = busy[index] + busy[place] + RELAY_S",
        new="both = max(busy[index], busy[place])",
        caught_by="tests/unit/broker/planner/test_plan_ways.py::test_what_is_relayed_takes_both_ways",
    ),
    Mutant(
        name="shut-ways-cost-nothing",
        breaks="The planner ignores the cost of a blocked connection.",
        target="swarm.broker.planner.tables:hop_seconds",
        old="seconds[index, place] += BLOCKED_S",
        new="seconds[index, place] += 0.0",
        caught_by="tests/unit/broker/planner/test_plan_ways.py::test_the_order_avoids_what_is_shut",
    ),
    Mutant(
        name="far-away-costs-nothing",
        breaks="The predicted step time leaves out the time between the broker and the first and last stage.",
        target="swarm.broker.planner.tables:exit_route_s",
        old="return BLOCKED_S if device.is_mute else device.broker_s",
        new="return BLOCKED_S if device.is_mute else 0.0",
        caught_by="tests/unit/broker/planning/test_plan_wanted.py::test_the_broker_s_ways_are_in_a_step_that_waits_for_them",
    ),
    Mutant(
        name="mute-stage-is-the-last",
        breaks="A worker that cannot reach the broker's data address becomes the last stage.",
        target="swarm.broker.planner.tables:exit_route_s",
        old="return BLOCKED_S if device.is_mute else device.broker_s",
        new="return device.broker_s",
        caught_by="tests/unit/broker/planner/test_plan_ways.py::test_there_is_a_plan_exactly_if_there_is_an_open_order",
    ),
    Mutant(
        name="plans-without-states",
        breaks="A plan counts on memory for positions that a stage reserves for states.",
        target="swarm.broker.planner.problem:ModelSizes.kv_positions",
        old="room = max(0, room - state_bytes * count_reserved(state_bytes, room, self.max_sequences))",
        new="room = max(0, room)",
        caught_by="tests/unit/stage/test_states.py::test_the_planner_counts_states_as_a_stage_does",
    ),
)
