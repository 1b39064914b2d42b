"""Makes of a proposal the plan that is carried out: every stage with its endpoint and its bytes."""

from __future__ import annotations

from swarm.broker.drafts.candidates import Proposal
from swarm.broker.drafts.pipeline import check_pipeline
from swarm.broker.state import Plan, StagePlan, State, Worker
from swarm.wire.messages import LayerRange, Manifest, layers_of, loaded_layers, ranges_of


def draft(state: State, proposal: Proposal, epoch: int) -> Plan:
    """Make the plan of this epoch. One that is no pipeline is a bug, and goes nowhere."""
    manifest = state.manifest
    assert manifest is not None
    stages = tuple(_stage(state.workers[who], layers, manifest) for who, layers in proposal.shares)
    check_pipeline([stage.layers for stage in stages], manifest.num_layers)
    back = "" if proposal.back is None else proposal.back.choice
    return Plan(epoch, stages, proposal.forecast.objective, proposal.forecast, proposal.standby, back)


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
        memory_bytes=worker.hello.memory_bytes,
        load_bytes=sum(manifest.weight_bytes(each) for each in missing),
    )
