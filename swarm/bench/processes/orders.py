"""What parent and client processes tell each other: a JSON object per line."""

from __future__ import annotations

import msgspec

from swarm.bench.plan import Scale, Shape, Target
from swarm.bench.records import Histogram, Record
from swarm.bench.schedule import Share

LINE_BYTES = 8 * 1024 * 1024  # the longest line that is read
BATCH = 500  # records in a line


class Run(msgspec.Struct, tag="run", frozen=True):
    """Send a share of a point. ``opens_at``: when the window opens (``time.monotonic()``), after the warm-up;
    ``bin_s``: how the window is cut for rates by time. ``first_index``: the number of the point's first request."""

    target: Target
    shape: Shape
    scale: Scale
    share: Share
    opens_at: float
    bin_s: float
    first_index: int


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """End the share now: cut what is in flight, and tell what there is."""


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The process is there. ``port``: where it serves, if it is a server."""

    port: int = 0


class Progress(msgspec.Struct, tag="progress", frozen=True):
    """So far. ``ttfts``: of the last answers, in seconds."""

    num_ok: int
    num_failed: int
    num_in_flight: int
    num_pieces: int
    ttfts: list[float] = []


class Records(msgspec.Struct, tag="records", frozen=True):
    records: list[Record]


class Done(msgspec.Struct, tag="done", frozen=True):
    """The share has ended; all records were told. ``cpu``: of one core, from the window's opening on."""

    gaps: Histogram
    pieces: dict[int, int]
    cpu: float


Order = Run | Stop
Report = Ready | Progress | Records | Done

read_order = msgspec.json.Decoder(Order).decode
read_report = msgspec.json.Decoder(Report).decode


def line(message: Order | Report) -> bytes:
    return msgspec.json.encode(message) + b"\n"
