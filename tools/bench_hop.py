#!/usr/bin/env python3
"""Measure what a hop costs with our wire, against bare pyzmq on the same frames.

Two processes on TCP loopback, one plain thread each, one PUSH per direction. Every mode sends the same two frames
(msgpack header, float32 tensor), bare ones over libzmq's sockets alone, the others over our channels, which speak
ZMTP themselves. The modes take turns within one run, so that whatever else the machine does hits all alike.

    bare           send_multipart and recv_multipart of frames that were made beforehand
    swarm          pack, encode, send; receive, decode, array view; no checksum
    swarm+sum      the same with the xxh3 checksum made and verified
    bare+curve     bare, with libzmq's CURVE at both ends
    swarm+curve    swarm, at a door with a lock
    swarm+relay    swarm+curve, through a relay in a process of its own
    swarm+ipc      swarm, by the back door that there is on one host, of a door with a lock

Latency is half a round trip. Throughput is one-way, acknowledged at the end of a burst. Processor time is that of both
ends and of the relay, all threads, for each message one way; other work on the machine hardly moves it. Beside what a
lock costs stands what libsodium's cipher takes alone, sealing and opening as many bytes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter, process_time, sleep

import numpy as np
import zmq
from bench_lib import report
from nacl._sodium import ffi, lib

from swarm.wire import tensors
from swarm.wire.codec import DATA
from swarm.wire.messages import Hop, LayerRange, Row, Step, TensorSpec
from swarm.wire.pull import PullChannel
from swarm.wire.push import PushChannel
from swarm.wire.sockets import DATA_PORTS, bind, endpoint_of
from swarm.wire.transport.keys import AuthPolicy, KeyPair, public_of, via_relay
from swarm.wire.transport.relay import Relay

HOST = "127.0.0.1"
DEADLINE_S = 30.0
HIDDEN = 1024
ROWS = {2: (Row(7, 100, 1, True), Row(8, 31, 1, True)), 256: (Row(7, 0, 256, False),)}
TOKENS = tuple(range(20_000, 20_256))
HOPS = (Hop("w0", LayerRange(0, 8), 1e-4, 2e-3, 0.0, 1e-4, 8192),)
MODES = ("bare", "swarm", "swarm+sum", "swarm+ipc", "bare+curve", "swarm+curve", "swarm+relay")
DOORS = ("", "curve", "ipc", "relay")
TICKETS = ("ab" * 16, "cd" * 16)  # of the doors of the parent and of the child
PAIR = KeyPair(public_of("11" * 32), "11" * 32)  # of both ends
SIZES = {"8 KB": 2, "1 MB": 256}  # rows of 1024 float32
TARGETS = {"8 KB": 1.3, "1 MB": 1.1}
Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]


@dataclass
class Measured:
    """Samples of one mode at one size: one-way seconds per message, messages per second of each burst."""

    latency_s: list[float] = field(default_factory=list)
    per_second: list[float] = field(default_factory=list)
    computed_s: list[float] = field(default_factory=list)  # for each message, of each turn of latency


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
    computed_us: float
    computed_ratio: float
    target: float


class Peer:
    """One end: a pull and, once ``connect`` is told of the other end, a push to it; and the same as bare sockets."""

    def __init__(self, relay: str, ticket: str) -> None:
        self._context = zmq.Context()
        lock = AuthPolicy(PAIR, lambda _: True)
        self._pulls = {
            "": PullChannel(HOST, DATA.frame_limit_bytes),
            "curve": PullChannel(HOST, DATA.frame_limit_bytes, auth=lock),
            "ipc": PullChannel(HOST, DATA.frame_limit_bytes, auth=lock, unix_socket=True),
            "relay": PullChannel(HOST, DATA.frame_limit_bytes, auth=lock),
        }
        self._pulls["relay"].use_relay(f"{relay}/{ticket}")
        self.relay_pid = 0  # the parent knows it
        self._pushes: dict[str, PushChannel] = {}
        self._bare_in = [self._bare(zmq.PULL, locked=locked) for locked in (False, True)]
        self._bare_out = [self._bare(zmq.PUSH, locked=locked) for locked in (False, True)]
        ports = [
            each.bind_to_random_port(f"tcp://{HOST}", min_port=DATA_PORTS[0], max_port=DATA_PORTS[-1])
            for each in self._bare_in
        ]
        by = {"relay": via_relay(self._pulls["relay"].endpoint, relay, ticket)}
        own = [by.get(door, pull.endpoint) for door, pull in self._pulls.items()]
        self.endpoints = " ".join(own + [f"tcp://{HOST}:{port}" for port in ports])

    def _bare(self, kind: int, *, locked: bool) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.set(zmq.RCVTIMEO, int(DEADLINE_S * 1000))
        made.set(zmq.SNDTIMEO, int(DEADLINE_S * 1000))
        if locked:
            made.set(zmq.CURVE_PUBLICKEY, bytes.fromhex(PAIR.public))
            made.set(zmq.CURVE_SECRETKEY, bytes.fromhex(PAIR.secret))
            if kind == zmq.PULL:
                made.set(zmq.CURVE_SERVER, 1)
            else:
                made.set(zmq.CURVE_SERVERKEY, bytes.fromhex(PAIR.public))
        return made

    def connect(self, endpoints: str) -> None:
        """Connect to the other end's ``endpoints``."""
        *own, bare, bare_locked = endpoints.split()
        for door, each in zip(self._pulls, own, strict=True):
            self._pushes[door] = PushChannel(each, pair=PAIR)
        for made, address in zip(self._bare_out, (bare, bare_locked), strict=True):
            made.connect(address)

    def close(self) -> None:
        for channel in (*self._pushes.values(), *self._pulls.values()):
            channel.close()
        for made in (*self._bare_in, *self._bare_out):
            made.close(0)
        self._context.term()

    def send(self, frames: Sequence[tensors.Bytes], *, door: str = "") -> None:
        while not self._pushes[door].send(frames):
            if not self._pulls[door].wait(DEADLINE_S, outgoing=[self._pushes[door]]):
                raise TimeoutError("the other end does not read")

    def receive(self, *, door: str = "") -> list[memoryview]:
        pull = self._pulls[door]
        if not pull.wait(DEADLINE_S):
            raise TimeoutError("the other end does not answer")
        frames = pull.receive()
        assert frames is not None
        return frames

    def send_array(self, array: Array, *, checked: bool, door: str) -> None:
        spec, data = tensors.pack(array, checked=checked)
        self.send(DATA.encode(a_step(spec), data), door=door)

    def receive_array(self, *, door: str) -> Array:
        step, payload = DATA.decode(self.receive(door=door))
        assert isinstance(step, Step)
        assert step.tensor is not None
        assert payload is not None
        return tensors.unpack(step.tensor, payload)

    def send_bare(self, frames: Sequence[tensors.Bytes | zmq.Frame], *, locked: bool) -> None:
        self._bare_out[locked].send_multipart(frames, copy=False)

    def receive_bare(self, *, locked: bool) -> list[zmq.Frame]:
        frames: list[zmq.Frame] = self._bare_in[locked].recv_multipart(copy=False)
        return frames


def a_step(spec: TensorSpec) -> Step:
    """Make a step as it looks half-way through three stages: two decodes, or a prefill chunk of 256 positions."""
    num_tokens = spec.shape[0]
    return Step(epoch=3, step=12345, rows=ROWS[num_tokens], tokens=TOKENS[:num_tokens], hops=HOPS, tensor=spec)


def ways(peer: Peer, mode: str, num_rows: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Choose how a mode sends and receives. Each end sends an array of its own, as a stage does."""
    array = np.random.default_rng(1).standard_normal((num_rows, HIDDEN), np.float32)
    kind, _, how = mode.partition("+")
    if kind == "swarm":
        door = how if how in DOORS else ""
        return (
            lambda: peer.send_array(array, checked=how == "sum", door=door),
            lambda: peer.receive_array(door=door),
        )
    locked = how == "curve"
    spec, data = tensors.pack(array)
    frames = DATA.encode(a_step(spec), data)
    return (lambda: peer.send_bare(frames, locked=locked)), lambda: peer.receive_bare(locked=locked)


# --- the child: answers, in the mode that it is told ------------------------------------------------------------------


def serve(answer_to: str, relay: str) -> None:
    """Answer turns. Each starts with one frame ``mode test num_rows count``; an empty one ends it all."""
    peer = Peer(relay, TICKETS[1])
    peer.connect(answer_to)
    print(peer.endpoints, flush=True)
    while order := bytes(peer.receive()[0]).decode():
        mode, test, num_rows, count = order.split()
        answer(peer, mode, test, int(num_rows), int(count))
    peer.close()


def answer(peer: Peer, mode: str, test: str, num_rows: int, count: int) -> None:
    send, receive = ways(peer, mode, num_rows)
    began = process_time()
    for _ in range(count):
        receive()
        if test == "latency":
            send()
    peer.send([f"{process_time() - began}".encode()])


def pass_on() -> None:
    """Be a relay, until nobody needs it any more."""
    bound = bind(HOST, 0)
    print(endpoint_of(bound), flush=True)
    relay = Relay([bound], on_error=lambda error: print(error, file=sys.stderr))
    relay.admit(frozenset(TICKETS))
    sys.stdin.read()
    relay.close()


def relay_s(peer: Peer) -> float:
    """Processor time of the relay's process, as the scheduler counts it. Waits until what it has to do is done."""
    sleep(0.001)
    tasks = Path(f"/proc/{peer.relay_pid}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


# --- the parent: measures ---------------------------------------------------------------------------------------------


def turn(peer: Peer, mode: str, test: str, num_rows: int, *, count: int, measured: Measured) -> None:
    """Play one mode's turn: ``count`` round trips, or one burst of ``count`` messages."""
    send, receive = ways(peer, mode, num_rows)
    peer.send([f"{mode} {test} {num_rows} {count}".encode()])
    relay_began = relay_s(peer)
    start, began = perf_counter(), process_time()
    for _ in range(count):
        sent = perf_counter()
        send()
        if test == "latency":
            receive()
            measured.latency_s.append((perf_counter() - sent) / 2)
    theirs_s = float(bytes(peer.receive()[0]))
    if test == "throughput":
        measured.per_second.append(count / (perf_counter() - start))
    else:
        theirs_s += relay_s(peer) - relay_began
        measured.computed_s.append((process_time() - began + theirs_s) / (2 * count))


def with_child(work: Callable[[Peer], dict[tuple[str, str], Measured]]) -> dict[tuple[str, str], Measured]:
    """Start the other end, let ``work`` talk to it, and end it, whatever happens."""
    relaying = [sys.executable, __file__, "--relay"]
    with subprocess.Popen(relaying, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as between:
        assert between.stdout is not None
        relay = between.stdout.readline().strip()
        peer = Peer(relay, TICKETS[0])
        peer.relay_pid = between.pid
        command = [sys.executable, __file__, "--serve", peer.endpoints, relay]
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
                between.kill()
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
        computed_us=median(measured.computed_s) * 1e6,
        computed_ratio=median(m / b for b, m in zip(bare.computed_s, measured.computed_s, strict=True)),
        target=TARGETS[size],
    )


def cipher_us(num_rows: int) -> float:
    """Measure libsodium alone, in place, on as many bytes as a message of this size has: sealed once, opened once."""
    spec, data = tensors.pack(np.zeros((num_rows, HIDDEN), np.float32))
    sizes = [len(frame) + 1 for frame in DATA.encode(a_step(spec), data)]
    key, nonce, room = bytes(range(32)), bytes(24), np.zeros(max(sizes) + 16, np.uint8)
    at = ffi.from_buffer(room)
    took = []
    for _ in range(200):
        began = perf_counter()
        for size in sizes:
            lib.crypto_box_easy_afternm(at, at + 16, size, nonce, key)
            assert lib.crypto_box_open_easy_afternm(at + 16, at, size + 16, nonce, key) == 0
        took.append(perf_counter() - began)
    return median(took) * 1e6


def shown(lines: list[Line]) -> list[str]:
    head = (
        f"{'size':<6}{'mode':<13}{'p50 us':>9}{'p99 us':>9}{'msg/s':>9}{'MB/s':>8}{'latency x':>11}{'through. x':>12}"
        f"{'cpu us':>9}{'cpu x':>7}"
    )
    return [head] + [
        f"{row.size:<6}{row.mode:<13}{row.p50_us:>9.1f}{row.p99_us:>9.1f}{row.messages_per_s:>9.0f}"
        f"{row.mb_per_s:>8.0f}{row.latency_ratio:>11.2f}{row.throughput_ratio:>12.2f}"
        f"{row.computed_us:>9.1f}{row.computed_ratio:>7.2f}   (target {row.target})"
        for row in lines
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the rounds")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--relay", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(*arguments.serve)
        return
    if arguments.relay:
        pass_on()
        return
    results = with_child(lambda peer: measure(peer, rounds=3 if arguments.quick else 30))
    lines = summary(results)
    alone = {size: cipher_us(num_rows) for size, num_rows in SIZES.items()}
    found = {"results": [asdict(row) for row in lines], "cipher_us": alone}
    words = [f"{size}: the cipher alone, sealed and opened, {took:.1f} us" for size, took in alone.items()]
    report("a hop", found, shown(lines) + words, {"libzmq": zmq.zmq_version()}, as_json=arguments.json)


if __name__ == "__main__":
    main()
