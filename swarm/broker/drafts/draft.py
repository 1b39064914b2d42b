"""Makes of a proposal the plan that is carried out: every stage with its endpoint and its bytes.

Pins and a mode that can't go together are refused before the search (``planner.lacking``, ``candidates``), with what to
change; a device that nobody serves is refused at the worker's hello. What the search finds is checked once more here:
a plan that is no pipeline is a bug, and nobody may hear of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm.broker.drafts.candidates import Proposal
from swarm.broker.state import Plan, StagePlan, State, Worker
from swarm.broker.state.workers import BROKER, Way
from swarm.errors import StageSetError
from swarm.wire.messages import LayerRange, Manifest, layers_of, loaded_layers, ranges_of


def draft(state: State, proposal: Proposal, epoch: int) -> Plan:
    """Make the plan of this epoch. One that is no pipeline is a bug, and goes nowhere."""
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


def _stage(state: State, sender: str, worker: Worker, layers: LayerRange) -> StagePlan:
    assert state.manifest is not None
    manifest: Manifest = state.manifest
    is_relayed = state.ways.to(sender, worker.incarnation, state.now) is Way.RELAYED
    missing = ranges_of(layers_of((layers,)) - loaded_layers(worker.layers, worker.kept))
    return StagePlan(
        incarnation=worker.incarnation,
        name=worker.name,
        layers=layers,
        endpoint=state.ways.endpoint_by_relay(worker) if is_relayed else worker.hello.endpoint,
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
