"""Process of the draft model: requests from the broker in, proposals out, until the broker is gone.

The main thread computes. Another thread reads the requests; at their end the broker is gone, and the process exits at
once, whatever it computes.
"""

from __future__ import annotations

import gc
import os
import queue
import threading
import time
from typing import BinaryIO

import psutil

from swarm.draft.drafter import Drafter
from swarm.errors import ModelError, SwarmError
from swarm.log import get_logger
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.wire.draft_messages import (
    LENGTH_BYTES,
    AskProposals,
    DraftLoaded,
    DraftMessage,
    DraftUnusable,
    body_length,
    decode_ask,
    encode_frame,
)
from swarm.wire.messages import LayerRange

EX_CONFIG = 78  # exit code of a process that should not be started again
MAX_QUEUED = 4  # requests that are read ahead; the broker sends one at a time
MAX_DRAFT_SEQUENCES = 1024
# Memory for keys and values, unless this share of the free memory is less.
MAX_KV_BYTES = 1 << 30
KV_SHARE_OF_FREE = 0.1
MAX_REASON_CHARS = 1000

log = get_logger(__name__)


def serve(model: str, threads: int, source: BinaryIO, out: BinaryIO) -> int:
    """Load the model and answer requests, until ``source`` ends; then the process ends. Return an exit code if the
    model can't be used."""
    requests: queue.Queue[AskProposals] = queue.Queue(MAX_QUEUED)
    threading.Thread(target=_read_requests, args=(source, requests), name="draft-requests", daemon=True).start()

    def send(message: DraftMessage) -> None:
        out.write(encode_frame(message))

    try:
        executor, loaded = load_draft(model, threads)
    except (SwarmError, OSError, RuntimeError, MemoryError) as error:  # torch's own errors are RuntimeErrors
        send(DraftUnusable(str(error)[:MAX_REASON_CHARS]))
        return EX_CONFIG
    send(loaded)
    drafter = Drafter(executor, MAX_DRAFT_SEQUENCES)
    gc.freeze()  # otherwise every full collection walks through all of torch
    while True:
        try:
            send(drafter.propose(requests.get(block=not drafter.has_work)))
        except queue.Empty:
            if (caught_up := drafter.catch_up()) is not None:
                send(caught_up)


def load_draft(model: str, threads: int) -> tuple[TorchExecutor, DraftLoaded]:
    """Load all layers of a model. Raises ``ModelError``, and the errors of torch and of the disk."""
    began = time.perf_counter()
    executor = TorchExecutor(model, threads=threads or None, threads_alone=threads or None, kv_share=1.0)
    manifest = executor.manifest
    if manifest.state_stride:
        raise ModelError(
            f"{manifest.name} keeps states, which can't be rolled back from a wrong proposal, so it can't be a draft "
            "model: use one with attention alone"
        )
    layers = LayerRange(0, manifest.num_layers)
    kv_bytes = min(MAX_KV_BYTES, int(psutil.virtual_memory().available * KV_SHARE_OF_FREE))
    executor.memory_bytes = min(executor.memory_bytes, manifest.fixed_bytes(layers) + kv_bytes)
    executor.prepare(layers, (), MAX_DRAFT_SEQUENCES, lambda done, total: None)
    executor.activate(layers)
    loaded = DraftLoaded(
        manifest.name,
        manifest.vocab_size,
        manifest.context,
        manifest.assets,
        executor.weight_bytes,
        time.perf_counter() - began,
    )
    return executor, loaded


def _read_requests(source: BinaryIO, requests: queue.Queue[AskProposals]) -> None:
    """Read requests until the broker's end of the pipe is closed; then end the process.

    A request that can't be decoded ends it, too, and the broker starts another one.
    """
    code = 1
    try:
        while head := source.read(LENGTH_BYTES):
            requests.put(decode_ask(source.read(body_length(head))))
        code = 0
    except SwarmError as error:
        log.error("draft_request_unreadable", reason=str(error))
    finally:
        os._exit(code)
