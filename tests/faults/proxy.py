"""Somebody between the stages who delays, repeats, reorders, loses and damages messages, by a seed.

Workers and the broker tell others a data endpoint whose port is 10,000 below the real one (failpoints ``advertise`` and
``broker.advertise``); a proxy listens there. So it reaches what TCP would hide. Beats pass through as well.
"""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil
import zmq

OFFSET = 10_000
SPEC = f"port:-{OFFSET}"
REAL_PORTS = range(20_000, 32_768)
_NAMES = 64  # of whom a door hears here; each edge of each epoch has its own
_HELD = 4096  # messages on their way; the broker bounds the steps in flight far below


@dataclass
class Weather:
    """How likely each harm is, per message. ``delay_s``: mean and half width."""

    delay_s: tuple[float, float] = (0.0, 0.0)
    repeat: float = 0.0
    reorder: float = 0.0
    lose: float = 0.0
    flip: float = 0.0
    cut: float = 0.0


class Passage:
    """In a door's place: who knocks here is passed on to the door, each under the name that it gave."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], port: int, door: int) -> None:
        self._context = context
        self._door = f"tcp://127.0.0.1:{door}"
        self._backs: dict[bytes, zmq.Socket[bytes]] = {}
        self.front = context.socket(zmq.ROUTER)
        self.front.set(zmq.ROUTER_HANDOVER, 1)
        self.front.bind(f"tcp://127.0.0.1:{port}")

    def receive(self) -> tuple[bytes, list[bytes]]:
        name, *frames = self.front.recv_multipart()
        return name, frames

    def send(self, name: bytes, frames: list[bytes]) -> bool:
        """False: the door takes nothing."""
        if name not in self._backs:
            while len(self._backs) >= _NAMES:
                self._backs.pop(next(iter(self._backs))).close(0)
            back = self._backs[name] = self._context.socket(zmq.DEALER)
            back.set(zmq.IDENTITY, name)
            back.connect(self._door)
        try:
            self._backs[name].send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        for socket in (self.front, *self._backs.values()):
            socket.close(0)


@dataclass
class Proxy:
    """One thread for all endpoints. ``weather`` may be changed at any time; ``done`` counts what was done."""

    pids: Callable[[], list[int]]
    seed: int
    weather: Weather = field(default_factory=Weather)
    done: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._passages: dict[int, Passage] = {}
        self._late: list[tuple[float, int, int, bytes, list[bytes]]] = []
        self._number = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(10.0)
        self._context.term()

    def _run(self) -> None:
        looked_at = 0.0
        try:
            while not self._stopped.is_set():
                now = time.monotonic()
                if now >= looked_at + 0.1:
                    looked_at = now
                    self._look_for_ports()
                self._turn()
        finally:
            for passage in self._passages.values():
                passage.close()

    def _look_for_ports(self) -> None:
        """Stand before every data port that has come up; leave those that are gone."""
        real: set[int] = set()
        for pid in self.pids():
            try:
                connections = psutil.Process(pid).net_connections(kind="tcp")
            except psutil.Error:
                continue
            real |= {c.laddr.port for c in connections if c.status == psutil.CONN_LISTEN} & set(REAL_PORTS)
        for port in real - self._passages.keys():
            self._passages[port] = Passage(self._context, port - OFFSET, port)
        for port in self._passages.keys() - real:
            self._passages.pop(port).close()

    def _turn(self) -> None:
        waiting_s = min(0.05, max(0.0, self._late[0][0] - time.monotonic())) if self._late else 0.05
        poller = zmq.Poller()
        for passage in self._passages.values():
            poller.register(passage.front, zmq.POLLIN)
        ready = dict(poller.poll(waiting_s * 1000))
        for port, passage in self._passages.items():
            if passage.front in ready:
                self._take(port, *passage.receive())
        now = time.monotonic()
        while self._late and self._late[0][0] <= now:
            _, _, port, name, frames = heapq.heappop(self._late)
            self._pass_on(port, name, frames)

    def _take(self, port: int, name: bytes, frames: list[bytes]) -> None:
        weather, chance = self.weather, self._chance
        if chance.random() < weather.lose:
            self._count("lost")
            return
        if chance.random() < weather.flip:
            frames = self._flipped(frames)
        if chance.random() < weather.cut:
            self._count("cut")
            index = chance.randrange(len(frames))
            frames = [*frames[:index], frames[index][: chance.randrange(len(frames[index]))], *frames[index + 1 :]]
        mean, width = weather.delay_s
        delay_s = max(0.0, mean + chance.uniform(-width, width)) if mean else 0.0
        if chance.random() < weather.reorder:
            self._count("reordered")
            delay_s += 0.02
        self._send_later(port, name, frames, delay_s)
        if chance.random() < weather.repeat:
            self._count("repeated")
            self._send_later(port, name, frames, delay_s + chance.choice((0.0, 0.01, 0.1)))

    def _flipped(self, frames: list[bytes]) -> list[bytes]:
        """One bit of one frame."""
        self._count("flipped")
        index = self._chance.randrange(len(frames))
        damaged = bytearray(frames[index])
        damaged[self._chance.randrange(len(damaged))] ^= 1 << self._chance.randrange(8)
        return [*frames[:index], bytes(damaged), *frames[index + 1 :]]

    def _send_later(self, port: int, name: bytes, frames: list[bytes], delay_s: float) -> None:
        if delay_s <= 0:
            self._pass_on(port, name, frames)
        elif len(self._late) < _HELD:
            self._number += 1
            heapq.heappush(self._late, (time.monotonic() + delay_s, self._number, port, name, frames))

    def _pass_on(self, port: int, name: bytes, frames: list[bytes]) -> None:
        passage = self._passages.get(port)
        if passage is not None:
            self._count("passed" if passage.send(name, frames) else "refused")

    def _count(self, what: str) -> None:
        self.done[what] = self.done.get(what, 0) + 1
