"""Messages between the parent and its client processes: a JSON object per line."""

from __future__ import annotations

import msgspec

from swarm.bench.plan import BenchTarget, RequestShape, Scale
from swarm.bench.records import GapHistogram, RequestTiming
from swarm.bench.schedule import PointShare

MAX_LINE_BYTES = 8 * 1024 * 1024  # the longest line accepted
BATCH_SIZE = 500  # records in a line


class RunShare(msgspec.Struct, tag="run", frozen=True):
    """Order to send a share of a point."""

    target: BenchTarget
    shape: RequestShape
    scale: Scale
    share: PointShare
    opens_at: float  # when the window opens (``time.monotonic()``), after the warm-up
    bin_s: float  # width of the bins in which chunks are counted
    first_index: int  # number of the point's first request


class StopShare(msgspec.Struct, tag="stop", frozen=True):
    """Order to end the share now: cancel requests in flight and report the records."""


class ProcessReady(msgspec.Struct, tag="ready", frozen=True):
    """The process has started."""

    port: int = 0  # port on which it serves, if it is a server


class ShareProgress(msgspec.Struct, tag="progress", frozen=True):
    """Progress of a share."""

    num_ok: int
    num_failed: int
    num_in_flight: int
    num_pieces: int
    ttfts: list[float] = []  # times to first token of the last answers, in seconds


class TimingBatch(msgspec.Struct, tag="records", frozen=True):
    """Records of finished requests."""

    records: list[RequestTiming]


class ShareDone(msgspec.Struct, tag="done", frozen=True):
    """The share has ended, and all records were reported."""

    gaps: GapHistogram
    pieces: dict[int, int]
    cpu: float  # share of one core, from the window's opening on


Order = RunShare | StopShare
Report = ProcessReady | ShareProgress | TimingBatch | ShareDone

read_order = msgspec.json.Decoder(Order).decode
read_report = msgspec.json.Decoder(Report).decode


def encode_line(message: Order | Report) -> bytes:
    return msgspec.json.encode(message) + b"\n"
