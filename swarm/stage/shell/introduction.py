"""How a worker introduces itself to a broker."""

from __future__ import annotations

import os
import socket

from swarm.stage.core import EX_CONFIG, StageCore
from swarm.stage.shell.equipment import Equipment
from swarm.stage.shell.way import StepDoor
from swarm.version import __version__
from swarm.wire.messages import Hello, LinkCost
from swarm.wire.schema import schema
from swarm.wire.versions import VERSIONS


def introduction(core: StageCore, equipment: Equipment, door: StepDoor, key: str, link: LinkCost | None) -> Hello:
    """Tell who this worker is, what it has and what it holds. ``key``: by which it knocks at others' doors."""
    executor, own = equipment.executor, core.settings
    return Hello(
        epoch=core.fence,
        lineage=core.lineage,
        name=own.name,
        incarnation=own.incarnation,
        pid=os.getpid(),
        host=socket.gethostname(),
        wire_versions=VERSIONS,
        schema=schema(),
        device=executor.device,
        dtype=executor.dtype,
        cores=os.cpu_count() or 1,
        endpoint=door.endpoint,
        ticket=door.ticket,
        build=__version__,
        key=key,
        memory_bytes=executor.memory_bytes,
        kv_share=executor.kv_share,
        costs=equipment.costs,
        link=link,
        manifest=executor.manifest,
        held_layers=core.layers,
        held=core.introduction(),
        logs=tuple(core.log.ranges()),
        kept=core.preparation.kept,
    )


def code_without(hello: Hello) -> int:
    """How to end if this can't be sent. What a worker says of itself before it holds anything, it says again at the
    next start; only what it holds is gone then."""
    return 1 if hello.held or hello.logs else EX_CONFIG
