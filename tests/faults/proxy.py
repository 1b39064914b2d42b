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


class Doorman:
    """Lets everybody in at the passages of its context, and notes the key that each named, with what it says. Whoever
    polls the passages polls ``socket``, too, and then calls ``let_in``."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.socket = context.socket(zmq.REP)
        self.socket.bind("inproc://zeromq.zap.01")  # where libzmq asks

    def let_in(self) -> None:
        version, ticket, *_, key = self.socket.recv_multipart()
        self.socket.send_multipart([version, ticket, b"200", b"OK", key, b""])


class Passage:
    """Stand in a door's place: pass on to the door what is sent here, with the key that its sender named."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], port: int, door: int) -> None:
        self._context = context
        self._door = f"tcp://127.0.0.1:{door}"
        self._key = ""
        self._back: zmq.Socket[bytes] | None = None
        self.front = context.socket(zmq.PULL)
        self.front.set(zmq.PLAIN_SERVER, 1)
        self.front.set(zmq.ZAP_DOMAIN, b"passage")
        self.front.bind(f"tcp://127.0.0.1:{port}")

    def receive(self) -> tuple[str, list[bytes]]:
        """The key, and a message."""
        frames = self.front.recv_multipart(copy=False)
        return str(frames[0].get("User-Id")), [frame.bytes for frame in frames]

    def send(self, key: str, frames: list[bytes]) -> bool:
        """False: the door takes nothing."""
        if self._back is None or key != self._key:
            self._knock(key)
        assert self._back is not None
        try:
            self._back.send_multipart(frames, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def _knock(self, key: str) -> None:
        if self._back is not None:
            self._back.close(0)
        self._key = key
        self._back = self._context.socket(zmq.PUSH)
        self._back.set(zmq.PLAIN_USERNAME, b"proxy")
        self._back.set(zmq.PLAIN_PASSWORD, key.encode())
        self._back.connect(self._door)

    def close(self) -> None:
        self.front.close(0)
        if self._back is not None:
            self._back.close(0)


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
        self._doorman = Doorman(self._context)
        self._passages: dict[int, Passage] = {}
        self._late: list[tuple[float, int, int, str, list[bytes]]] = []
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
            self._doorman.socket.close(0)

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
        poller.register(self._doorman.socket, zmq.POLLIN)
        for passage in self._passages.values():
            poller.register(passage.front, zmq.POLLIN)
        ready = dict(poller.poll(waiting_s * 1000))
        if self._doorman.socket in ready:
            self._doorman.let_in()
        for port, passage in self._passages.items():
            if passage.front in ready:
                self._take(port, *passage.receive())
        now = time.monotonic()
        while self._late and self._late[0][0] <= now:
            _, _, port, key, frames = heapq.heappop(self._late)
            self._pass_on(port, key, frames)

    def _take(self, port: int, key: str, frames: list[bytes]) -> None:
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
        self._send_later(port, key, frames, delay_s)
        if chance.random() < weather.repeat:
            self._count("repeated")
            self._send_later(port, key, frames, delay_s + chance.choice((0.0, 0.01, 0.1)))

    def _flipped(self, frames: list[bytes]) -> list[bytes]:
        """One bit of one frame."""
        self._count("flipped")
        index = self._chance.randrange(len(frames))
        damaged = bytearray(frames[index])
        damaged[self._chance.randrange(len(damaged))] ^= 1 << self._chance.randrange(8)
        return [*frames[:index], bytes(damaged), *frames[index + 1 :]]

    def _send_later(self, port: int, key: str, frames: list[bytes], delay_s: float) -> None:
        if delay_s <= 0:
            self._pass_on(port, key, frames)
        elif len(self._late) < _HELD:
            self._number += 1
            heapq.heappush(self._late, (time.monotonic() + delay_s, self._number, port, key, frames))

    def _pass_on(self, port: int, key: str, frames: list[bytes]) -> None:
        passage = self._passages.get(port)
        if passage is not None:
            self._count("passed" if passage.send(key, frames) else "refused")

    def _count(self, what: str) -> None:
        self.done[what] = self.done.get(what, 0) + 1
