"""From a proposal to the plan that is carried out: every stage with its endpoint and its bytes, and why it is so."""

from __future__ import annotations

from dataclasses import replace

from swarm.broker.partition import check_stages, planned_stage
from swarm.broker.plan.explain import sentences
from swarm.broker.state import Plan, StagePlan, State, Worker
from swarm.broker.table import Proposal
from swarm.wire.messages import LayerRange, Manifest, layers_of, loaded_layers, ranges_of


def draft(state: State, proposal: Proposal, epoch: int) -> Plan:
    """The plan of this epoch. One that breaks a rule of the stages is a bug, and goes nowhere."""
    manifest = state.manifest
    assert manifest is not None
    stages = tuple(_stage(state.workers[who], layers, manifest) for who, layers in proposal.shares)
    check_stages([planned_stage(manifest, s.layers, s.device) for s in stages], manifest, "auto", len(stages))
    why = [
        f"{s.name} holds layers {s.layers}: {len(s.layers)} of {manifest.num_layers}, {s.weight_bytes / 2**20:.1f} MiB "
        f"of its {state.workers[s.incarnation].hello.memory_bytes / 2**20:.0f} MiB"
        for s in stages
    ]
    why += sentences(proposal.forecast)
    plan = Plan(epoch, stages, proposal.forecast.objective, (), proposal.forecast, proposal.standby)
    if len(stages) > 1 and plan.shares_cores:
        together = f"all stages share the cores of {stages[0].host}: in mode auto one step is in flight at a time, "
        why.append(together + "and each stage uses all of them in turn")
    if proposal.back is not None:
        why.append(f"after a loss, sequences go on soonest so: {proposal.back.choice}")
    why += [_kept(state.workers[who], layers, manifest) for who, layers in proposal.standby]
    return replace(plan, why=tuple(why))


def _stage(worker: Worker, layers: LayerRange, manifest: Manifest) -> StagePlan:
    missing = ranges_of(layers_of((layers,)) - loaded_layers(worker.layers, worker.kept))
    return StagePlan(
        incarnation=worker.incarnation,
        name=worker.name,
        layers=layers,
        endpoint=worker.hello.endpoint,
        weight_bytes=manifest.weight_bytes(layers),
        host=worker.hello.host,
        device=worker.hello.device,
        load_bytes=sum(manifest.weight_bytes(each) for each in missing),
    )


def _kept(worker: Worker, ranges: tuple[LayerRange, ...], manifest: Manifest) -> str:
    size = sum(manifest.weight_bytes(layers) for layers in ranges)
    named = ", ".join(map(str, ranges))
    return f"{worker.name} keeps layers {named} warm in case their holder dies: {size / 2**20:.1f} MiB (plan.standby)"
