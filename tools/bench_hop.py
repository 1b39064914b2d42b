#!/usr/bin/env python3
"""Measure what a hop costs with our wire, against bare pyzmq on the same frames.

Two processes on TCP loopback, one plain thread each, one PUSH per direction. Every mode sends the same two frames
(msgpack header, float32 tensor), bare ones over libzmq's sockets alone, the others over our channels, where who listens
reads the connection itself. The modes take turns within one run, so that whatever else the machine does hits all alike.

    bare           send_multipart and recv_multipart of frames that were made beforehand
    swarm          pack, encode, send; receive, decode, array view; no checksum
    swarm+sum      the same with the xxh3 checksum made and verified

Latency is half a round trip. Throughput is one-way, acknowledged at the end of a burst.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from time import perf_counter

import numpy as np
import zmq
from bench_lib import report

from swarm.wire import tensors
from swarm.wire.channel import PullChannel, PushChannel
from swarm.wire.codec import DATA
from swarm.wire.messages import Hop, LayerRange, Row, Step, TensorSpec
from swarm.wire.sockets import DATA_PORTS

HOST = "127.0.0.1"
DEADLINE_S = 30.0
HIDDEN = 1024
ROWS = {2: (Row(7, 100, 1, True), Row(8, 31, 1, True)), 256: (Row(7, 0, 256, False),)}
TOKENS = tuple(range(20_000, 20_256))
HOPS = (Hop("w0", LayerRange(0, 8), 1e-4, 2e-3, 0.0, 1e-4, 8192),)
MODES = ("bare", "swarm", "swarm+sum")
SIZES = {"8 KB": 2, "1 MB": 256}  # rows of 1024 float32
TARGETS = {"8 KB": 1.3, "1 MB": 1.1}
Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


@dataclass
class Measured:
    """Samples of one mode at one size: one-way seconds per message, messages per second of each burst."""

    latency_s: list[float] = field(default_factory=list)
    per_second: list[float] = field(default_factory=list)


@dataclass
class Line:
    """One line of results. Ratios above 1 mean slower than bare; they are medians over pairs of neighbouring turns."""

    size: str
    mode: str
    p50_us: float
    p99_us: float
    messages_per_s: float
    mb_per_s: float
    latency_ratio: float
    throughput_ratio: float
    target: float


class Peer:
    """One end: a pull and, once ``connect`` is told of the other end, a push to it; and the same as bare sockets."""

    push: PushChannel

    def __init__(self) -> None:
        self._context = zmq.Context()
        self.pull = PullChannel(HOST, DATA.frame_limit_bytes)
        self._bare_in, self._bare_out = self._context.socket(zmq.PULL), self._context.socket(zmq.PUSH)
        self._bare_in.set(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
        self._bare_out.set(zmq.SNDTIMEO, int(DEADLINE_S * 1000))
        port = self._bare_in.bind_to_random_port(f"tcp://{HOST}", min_port=DATA_PORTS[0], max_port=DATA_PORTS[-1])
        self.endpoints = f"{self.pull.endpoint} tcp://{HOST}:{port}"

    def connect(self, endpoints: str) -> None:
        """Connect to the other end's ``endpoints``."""
        own, bare = endpoints.split()
        self.push = PushChannel(self._context, own)
        self._bare_out.connect(bare)

    def close(self) -> None:
        self.push.close()
        self.pull.close()
        self._bare_in.close(0)
        self._bare_out.close(0)
        self._context.term()

    def send(self, frames: Sequence[tensors.Bytes]) -> None:
        while not self.push.send(frames):
            if not self.pull.wait(DEADLINE_S, outgoing=[self.push]):
                raise TimeoutError("the other end does not read")

    def receive(self) -> list[memoryview]:
        if not self.pull.wait(DEADLINE_S):
            raise TimeoutError("the other end does not answer")
        frames = self.pull.receive()
        assert frames is not None
        return frames

    def send_array(self, array: Array, *, checked: bool) -> None:
        spec, data = tensors.pack(array, checked=checked)
        self.send(DATA.encode(a_step(spec), data))

    def receive_array(self) -> Array:
        step, payload = DATA.decode(self.receive())
        assert isinstance(step, Step)
        assert step.tensor is not None
        assert payload is not None
        return tensors.unpack(step.tensor, payload)

    def send_bare(self, frames: Sequence[tensors.Bytes | zmq.Frame]) -> None:
        self._bare_out.send_multipart(frames, copy=False)

    def receive_bare(self) -> list[zmq.Frame]:
        frames: list[zmq.Frame] = self._bare_in.recv_multipart(copy=False)
        return frames


def a_step(spec: TensorSpec) -> Step:
    """Make a step as it looks half-way through three stages: two decodes, or a prefill chunk of 256 positions."""
    num_tokens = spec.shape[0]
    return Step(epoch=3, step=12345, rows=ROWS[num_tokens], tokens=TOKENS[:num_tokens], hops=HOPS, tensor=spec)


def ways(peer: Peer, mode: str, num_rows: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Choose how a mode sends and receives. Each end sends an array of its own, as a stage does."""
    array = np.random.default_rng(1).standard_normal((num_rows, HIDDEN), np.float32)
    if mode != "bare":
        return (lambda: peer.send_array(array, checked=mode == "swarm+sum")), peer.receive_array
    spec, data = tensors.pack(array)
    frames = DATA.encode(a_step(spec), data)
    return (lambda: peer.send_bare(frames)), peer.receive_bare


# --- the child: answers, in the mode that it is told ------------------------------------------------------------------


def serve(answer_to: str) -> None:
    """Answer turns. Each starts with one frame ``mode test num_rows count``; an empty one ends it all."""
    peer = Peer()
    peer.connect(answer_to)
    print(peer.endpoints, flush=True)
    while order := bytes(peer.receive()[0]).decode():
        mode, test, num_rows, count = order.split()
        answer(peer, mode, test, int(num_rows), int(count))
    peer.close()


def answer(peer: Peer, mode: str, test: str, num_rows: int, count: int) -> None:
    send, receive = ways(peer, mode, num_rows)
    for _ in range(count):
        receive()
        if test == "latency":
            send()
    if test == "throughput":
        peer.send([b"done"])


# --- the parent: measures ---------------------------------------------------------------------------------------------


def turn(peer: Peer, mode: str, test: str, num_rows: int, *, count: int, measured: Measured) -> None:
    """Play one mode's turn: ``count`` round trips, or one burst of ``count`` messages."""
    send, receive = ways(peer, mode, num_rows)
    peer.send([f"{mode} {test} {num_rows} {count}".encode()])
    start = perf_counter()
    for _ in range(count):
        sent = perf_counter()
        send()
        if test == "latency":
            receive()
            measured.latency_s.append((perf_counter() - sent) / 2)
    if test == "throughput":
        peer.receive()
        measured.per_second.append(count / (perf_counter() - start))


def with_child(work: Callable[[Peer], dict[tuple[str, str], Measured]]) -> dict[tuple[str, str], Measured]:
    """Start the other end, let ``work`` talk to it, and end it, whatever happens."""
    peer = Peer()
    command = [sys.executable, __file__, "--serve", peer.endpoints]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            peer.connect(child.stdout.readline())
            results = work(peer)
            peer.send([b""])
            child.wait(DEADLINE_S)
            peer.close()
        finally:
            child.kill()
    return results


def measure(peer: Peer, rounds: int) -> dict[tuple[str, str], Measured]:
    results = {(size, mode): Measured() for size in SIZES for mode in MODES}
    for round_ in range(-1, rounds):  # the first round warms up
        for size, num_rows in SIZES.items():
            small = num_rows < 16
            for test, count in (("latency", 200 if small else 50), ("throughput", 1000 if small else 100)):
                for mode in MODES if round_ % 2 else MODES[::-1]:
                    into = results[size, mode] if round_ >= 0 else Measured()
                    turn(peer, mode, test, num_rows, count=count, measured=into)
    return results


def summary(results: dict[tuple[str, str], Measured]) -> list[Line]:
    return [line(size, mode, measured, results[size, "bare"]) for (size, mode), measured in results.items()]


def line(size: str, mode: str, measured: Measured, bare: Measured) -> Line:
    per_second = median(measured.per_second)
    return Line(
        size=size,
        mode=mode,
        p50_us=float(np.percentile(measured.latency_s, 50)) * 1e6,
        p99_us=float(np.percentile(measured.latency_s, 99)) * 1e6,
        messages_per_s=per_second,
        mb_per_s=per_second * SIZES[size] * HIDDEN * 4 / 1e6,
        latency_ratio=float(np.percentile(measured.latency_s, 50) / np.percentile(bare.latency_s, 50)),
        throughput_ratio=median(b / m for b, m in zip(bare.per_second, measured.per_second, strict=True)),
        target=TARGETS[size],
    )


def shown(lines: list[Line]) -> list[str]:
    head = (
        f"{'size':<6}{'mode':<11}{'p50 us':>9}{'p99 us':>9}{'msg/s':>9}{'MB/s':>8}{'latency x':>11}{'through. x':>12}"
    )
    return [head] + [
        f"{row.size:<6}{row.mode:<11}{row.p50_us:>9.1f}{row.p99_us:>9.1f}{row.messages_per_s:>9.0f}"
        f"{row.mb_per_s:>8.0f}{row.latency_ratio:>11.2f}{row.throughput_ratio:>12.2f}   (target {row.target})"
        for row in lines
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    results = with_child(lambda peer: measure(peer, rounds=3 if arguments.quick else 30))
    lines = summary(results)
    found = {"results": [asdict(row) for row in lines]}
    report("a hop", found, shown(lines), {"libzmq": zmq.zmq_version()}, as_json=arguments.json)


if __name__ == "__main__":
    main()
