"""From measured figures to the seconds of a step, and predicted beside measured."""

from __future__ import annotations

import pytest

from swarm.broker.planner.load import CHUNK, MIN_STEPS, PlanGauge, PlannedLoad, Speeds, StageGauge, StepShape
from swarm.wire.messages import Hop, LayerCost, LayerRange, Row

COSTS = (
    LayerCost("decode", 1, 32, 0.001, False),
    LayerCost("decode", 16, 32, 0.004, False),
    LayerCost("decode", 16, 532, 0.012, False),  # a microsecond for each of 16 × 500 positions more
    LayerCost("prefill", 64, 0, 0.010, False),
    LayerCost("prefill", 256, 0, 0.040, False),
    LayerCost("stage", 1, 32, 0.0005, False),
    LayerCost("stage", 64, 0, 0.0005, False),
    LayerCost("head", 1, 0, 0.002, False),
    LayerCost("head", 16, 0, 0.005, False),
    LayerCost("embed", 64, 0, 0.0001, False),
    LayerCost("decode", 1, 32, 0.0007, True),
    LayerCost("prefill", 64, 0, 0.006, True),
)


def speeds() -> Speeds:
    found = Speeds.from_costs(COSTS, alone=False)
    assert found is not None
    return found


def test_measured_sizes_are_met_and_lines_drawn_between() -> None:
    """A figure that was measured is used as it is; between two sizes a line, beyond the last the same line on."""
    load = PlannedLoad(rows=16, context=0, prompt=0.0)
    assert speeds().layer_s(load) == pytest.approx(0.004)
    assert speeds().layer_s(PlannedLoad(1, 0, 0.0)) == pytest.approx(0.001)
    assert 0.001 < speeds().layer_s(PlannedLoad(8, 0, 0.0)) < 0.004
    assert speeds().layer_s(PlannedLoad(31, 0, 0.0)) == pytest.approx(0.007)
    assert speeds().head_s(load) == pytest.approx(0.005)


def test_context_and_prompts_count() -> None:
    """Each position before costs each row; each token brings its share of a chunk of prompt."""
    assert speeds().layer_s(PlannedLoad(16, 500, 0.0)) == pytest.approx(0.004 + 16 * 500 * 1e-6)
    with_prompts = speeds().layer_s(PlannedLoad(16, 0, 2.0))
    assert with_prompts == pytest.approx(0.004 + 32 / CHUNK * 0.040)


def test_who_measured_one_decode_alone_is_known_by_prompts() -> None:
    """Sixteen sequences read a layer's weights once, as sixteen positions of a prompt do, not sixteen times."""
    costs = [LayerCost("decode", 1, 32, 0.010, False), LayerCost("prefill", 16, 0, 0.016, False)]
    found = Speeds.from_costs(costs, alone=False)
    assert found is not None
    assert found.layer_s(PlannedLoad(1, 0, 0.0)) == pytest.approx(0.010)
    assert found.layer_s(PlannedLoad(16, 0, 0.0)) == pytest.approx(0.016)


def test_alone_has_figures_of_its_own() -> None:
    """A step that is alone uses all cores; where that was not measured, the usual figures serve."""
    alone = Speeds.from_costs(COSTS, alone=True)
    assert alone is not None
    assert alone.layer_s(PlannedLoad(1, 0, 0.0)) == pytest.approx(0.0007)
    usual = tuple(cost for cost in COSTS if not cost.alone)
    assert Speeds.from_costs(usual, alone=True) == speeds()
    assert Speeds.from_costs((), alone=True) is None


def test_noise_never_makes_more_rows_quicker() -> None:
    """A larger size that was measured to be quicker is believed for the smaller one too."""
    found = Speeds.from_costs(
        (LayerCost("decode", 1, 0, 0.002, False), LayerCost("decode", 4, 0, 0.001, False)), alone=False
    )
    assert found is not None
    assert found.layer_s(PlannedLoad(1, 0, 0.0)) == pytest.approx(0.001)


def test_the_shape_of_a_step() -> None:
    """Rows of one position decode, others are prompts; every position's context is counted."""
    shape = StepShape.from_rows([(100, 1, True), (50, 1, True), (10, 4, False)])
    assert shape == StepShape(decodes=2, decode_context=150, positions=4, position_context=48, heads=2)


def test_a_real_step() -> None:
    """Layers, the stage, the head where it is, the embedding where that is."""
    decode = StepShape.from_rows([(0, 1, True)])
    assert speeds().step_s(decode, 3.0, has_head=False, has_embedding=False) == pytest.approx(0.0005 + 3 * 0.001)
    with_head = speeds().step_s(decode, 3.0, has_head=True, has_embedding=True)
    assert with_head == pytest.approx(0.0005 + 0.003 + 0.002 + 0.0001)
    prompt = StepShape.from_rows([(0, 64, False)])
    alone = speeds().step_s(prompt, 1.0, has_head=True, has_embedding=False)
    mixed = speeds().step_s(
        StepShape.from_rows([(0, 64, False), (0, 1, False)]), 1.0, has_head=True, has_embedding=False
    )
    assert mixed == pytest.approx(alone)  # the weights are read for the prompt anyway


def hop(worker: str, compute_s: float, held_s: float) -> Hop:
    return Hop(worker, LayerRange(0, 1), 0.0, compute_s, 0.0, 0.0, 0, held_s)


def test_predicted_beside_measured() -> None:
    """Per stage what was computed and what was predicted for just these steps; the pace is known from enough steps on;
    what no stage held a step for is outside."""
    gauge = PlanGauge()
    gauge.reset([StageGauge("w", speeds(), 2.0, has_embedding=False, has_head=False)])
    for step in range(MIN_STEPS):
        assert gauge.stages["w"].pace is None
        gauge.on_dispatched(step, [Row(1, 0, 1, True)])
        gauge.on_finished(step, [hop("w", 0.005, 0.006)], 0.010)
    stage = gauge.stages["w"]
    assert stage.pace == pytest.approx(2.0)  # predicted: 0.0005 + 2 × 0.001
    assert gauge.num_steps == MIN_STEPS
    assert gauge.outside_s / gauge.num_steps == pytest.approx(0.004)
    gauge.reset([])
    assert gauge.num_steps == 0
    gauge.on_finished(5, [hop("w", 1.0, 1.0)], 1.0)  # of a step that nobody remembers
    assert gauge.num_steps == 0
