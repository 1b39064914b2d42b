"""A way that takes long: a router in this process, between a host and the network that it is in.

The kernels that tests run on have no ``netem``, so frames are carried by hand: from the host's device (a TAP, in place
of its ``eth0``) to the bridge's and back, each after the delay, in the order in which they came.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from tests.faults.linux import call, inside
from tests.integration.hosts import Host

_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_MOST_FRAMES = 4096  # on the way; more are lost, as with any router
_FRAME_BYTES = 65536
_PATIENCE_S = 0.2  # to find out that it is over


def _tap(namespace: str, name: str) -> int:
    """Make a device there, whose frames this process reads and writes."""
    with inside(namespace):
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return device


class _Way:
    """One direction."""

    def __init__(self, source: int, target: int, delay_s: float) -> None:
        self.source, self._target, self._delay_s = source, target, delay_s
        self._frames: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        while True:
            try:
                frame = os.read(self.source, _FRAME_BYTES)
            except BlockingIOError:
                return
            if len(self._frames) < _MOST_FRAMES:
                self._frames.append((time.monotonic() + self._delay_s, frame))

    def hand_over(self) -> float:
        """Pass on what is due; how long until there is more."""
        while self._frames and (left := self._frames[0][0] - time.monotonic()) <= 0:
            try:
                os.write(self._target, self._frames[0][1])
            except BlockingIOError:
                return 0.001
            except OSError:
                pass  # the device is down: so is the way
            self._frames.popleft()
        return left if self._frames else _PATIENCE_S


@contextmanager
def far_away(host: Host, delay_s: float) -> Iterator[None]:
    """Put the host at the end of a way that takes ``delay_s`` in either direction. Nothing may run there yet."""
    number = int(host.address.rpartition(".")[2])
    call(*host.command("ip", "link", "del", "eth0"))
    ends = _tap(host.namespace, "eth0"), _tap(host.bridge, f"t{number}")
    call("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
    call("ip", "-n", host.namespace, "link", "set", "eth0", "up")
    call("ip", "-n", host.bridge, "link", "set", f"t{number}", "master", "br0", "up")
    over = threading.Event()
    carrier = threading.Thread(target=_carry, args=(ends, delay_s, over), name=f"way to {host.name}", daemon=True)
    carrier.start()
    try:
        yield
    finally:
        over.set()
        carrier.join()
        for end in ends:
            os.close(end)


def _carry(ends: tuple[int, int], delay_s: float, over: threading.Event) -> None:
    ways = _Way(ends[0], ends[1], delay_s), _Way(ends[1], ends[0], delay_s)
    wait_s = _PATIENCE_S
    while not over.is_set():
        readable, _, _ = select.select(ends, (), (), wait_s)
        for way in ways:
            if way.source in readable:
                way.take()
        wait_s = min(way.hand_over() for way in ways)
