"""The Hello message of a simulated worker."""

from __future__ import annotations

from swarm.sim.actors.routes import kv_endpoint
from swarm.sim.schedules.schedule import Machines
from swarm.sim.views import WorkerView
from swarm.wire.messages import Hello, LayerCost, Manifest
from swarm.wire.schema import schema
from swarm.wire.versions import VERSIONS


def build_hello(worker: WorkerView, manifest: Manifest, machines: Machines) -> Hello:
    """Return the Hello message: identity, device, memory, and stored sequences."""
    core = worker.core
    name, incarnation = core.settings.name, core.settings.incarnation
    return Hello(
        epoch=core.fence,
        lineage=core.lineage,
        name=name,
        incarnation=incarnation,
        pid=1,
        host="machine" if machines.together else name,
        wire_versions=VERSIONS,
        schema=schema(),
        device="cpu",
        dtype="float32",
        cores=1,
        endpoint=incarnation,
        memory_bytes=worker.memory_bytes,
        costs=_costs(machines.slowness.get(name, 1.0)) if machines.measure else (),
        manifest=manifest,
        held_layers=core.layers,
        held=core.hello_inventory(),
        logs=tuple(core.log.ranges()),
        kept=core.pending_plan.standby,
        bits=core.pending_plan.bits,
        key=worker.key,
        ticket=worker.ticket,
        kv_endpoint=kv_endpoint(incarnation),
        spill_from=worker.spill_from,
        adapters=core.adapters.entries,
    )


def _costs(slowness: float) -> tuple[LayerCost, ...]:
    return (
        LayerCost("decode", 1, 32, 0.001 * slowness, False),
        LayerCost("prefill", 256, 0, 0.01 * slowness, False),
        LayerCost("head", 1, 0, 0.0005 * slowness, False),
    )
