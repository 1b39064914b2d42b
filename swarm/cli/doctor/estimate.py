"""Estimate of a model's speed here, before any of it is loaded: measured on this machine, planned as a broker does."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace as with_fields

from swarm.broker.planner.load import PlannedLoad, Speeds, StageGauge, StepShape
from swarm.broker.planner.problem import ModelSizes, Shortage
from swarm.broker.planner.tables import HOP_S, STEP_S
from swarm.broker.planning.candidates import Proposal
from swarm.broker.planning.proposals import propose
from swarm.broker.planning.rules import PlanRules
from swarm.broker.settings import make_plan_rules
from swarm.broker.state import State, Worker
from swarm.cli.doctor.checks import PROMPT_TOKENS, SpeedEstimate
from swarm.wire.messages import Hello
from swarm.wire.schema import schema
from swarm.wire.transport.keys import new_pair
from swarm.wire.versions import VERSIONS

if TYPE_CHECKING:
    from swarm.config import Settings

ROWS: Final = (1, 4, 16)  # numbers of sequences that decode together


def measure_machine(settings: Settings) -> Hello:
    """Measure this machine like a worker at its start, with some layers of constant weights. Raises ``ModelError``."""
    from swarm.stage.shell.resources import open_resources

    equipment = open_resources(settings, new_pair())
    executor = equipment.executor
    return Hello(
        epoch=0,
        name="doctor",
        incarnation="doctor",
        pid=os.getpid(),
        host=socket.gethostname(),
        wire_versions=VERSIONS,
        schema=schema(),
        device=executor.device,
        dtype=executor.dtype,
        cores=os.cpu_count() or 1,
        endpoint="tcp://127.0.0.1:1",
        memory_bytes=executor.memory_bytes,
        kv_share=executor.kv_share,
        costs=equipment.costs,
        manifest=executor.manifest,
        held_layers=None,
        held=(),
        logs=(),
    )


def estimate_speed(settings: Settings, hello: Hello, workers: int) -> SpeedEstimate:
    """Estimate the speed with this number of workers like this one, which share the machine's memory and cores."""
    state, rules = State(), make_plan_rules(settings)
    state.set_manifest(hello.manifest)
    for name in [f"w{number}" for number in range(workers)]:
        own = with_fields(hello, name=name, incarnation=name, memory_bytes=hello.memory_bytes // workers)
        state.workers[name] = Worker(own, name.encode(), 0.0)
    proposal = propose(state, rules)
    if isinstance(proposal, Shortage):
        return SpeedEstimate(error=f"it waits for {proposal.text}", is_short=True)
    rates = []
    for rows in ROWS:
        loaded_proposal = propose(
            state, _pin_plan(replace(rules, load=PlannedLoad(rows, rules.load.context, 0.0)), state, proposal)
        )
        if isinstance(loaded_proposal, Shortage):
            return SpeedEstimate(error=f"it waits for {loaded_proposal.text}", is_short=True)
        rates.append((rows, rows / loaded_proposal.forecast.step_s))
    stages = proposal.forecast.stages
    neediest = max(stages, key=lambda stage: stage.needed_bytes)
    return SpeedEstimate(
        tuple(rates),
        _prompt_s(hello, proposal, settings.broker.prefill_chunk),
        tuple(len(layers) for _, layers in proposal.shares),
        neediest.needed_bytes,
        neediest.memory_bytes,
        min(stage.kv_positions for stage in stages),
    )


def _pin_plan(rules: PlanRules, state: State, proposal: Proposal) -> PlanRules:
    """Return rules that force the broker's chosen plan, whatever load it is evaluated for."""
    shares = {state.workers[incarnation].name: layers for incarnation, layers in proposal.shares}
    unused = {worker.name for worker in state.workers.values()} - set(shares)
    pins = shares if len(shares) > 1 else {}  # a single worker has all layers anyway
    return replace(rules, pins=pins, exclude=rules.exclude | unused)


def _prompt_s(hello: Hello, proposal: Proposal, chunk: int) -> float:
    """Return the time of a prompt that the stages compute chunk by chunk: pipelined, or one chunk at a time if
    stages take turns."""
    stages = list(_stages(hello, proposal))
    starts = range(0, PROMPT_TOKENS, chunk)
    shapes = [StepShape.from_rows([(at, min(chunk, PROMPT_TOKENS - at), at + chunk >= PROMPT_TOKENS)]) for at in starts]
    times = [[stage.step_s(shape) for stage in stages] for shape in shapes]
    if proposal.forecast.takes_turns:
        return sum(map(sum, times)) + len(times) * (STEP_S + HOP_S * (len(stages) - 1))
    return sum(times[0]) + sum(max(of_chunk) for of_chunk in times[1:])


def _stages(hello: Hello, proposal: Proposal) -> Iterator[StageGauge]:
    weights = ModelSizes.from_manifest(hello.manifest).layer_weights
    for name, layers in proposal.shares:
        speeds = Speeds.from_costs(hello.costs, alone=proposal.forecast.takes_turns)
        weight = sum(weights[layers.first : layers.stop])
        yield StageGauge(name, speeds, weight, layers.first == 0, layers.stop == hello.manifest.num_layers)
