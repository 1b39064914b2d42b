"""Listening sockets that stop listening while accepting fails for want of descriptors (or memory).

libzmq tries an ``accept`` that failed again at once, for as long as somebody waits to be let in, and so keeps a
processor busy. Unbinding would end that, and every connection that came in there too. So the kernel is told to drop
whatever knocks (a filter on the listening socket, which new connections alone go through), and those that had knocked
before are let in and sent away, over a few descriptors that were kept spare for that. Connections that exist notice
nothing. All this is Linux's; elsewhere a gate stays open.

Gates that share descriptors close and open together: else the spare ones would go to whoever knocks next door.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import Final

GATES: Final = sys.platform.startswith("linux")  # elsewhere nothing can be closed
SPARE: Final = 8  # descriptors that are kept while all gates are open
SPELL_S: Final = 0.003  # of sending away those who had knocked; then the loop has its turn …
AGAIN_S: Final = 0.005  # … for so long at least, and libzmq time to close what was hung up on …
MOST_AGAIN_S: Final = 0.1  # … and longer each time that a spell was of no use: something else took the descriptors
WANTS: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}  # else a failed accept is that peer's matter

_ANYWHERE: Final = ("0.0.0.0", "::")  # what a socket says that listens at all addresses
_SO_ATTACH_FILTER: Final = 26  # Linux; not in Python's socket module
_SO_DETACH_FILTER: Final = 27
_DROP_ALL: Final = struct.pack("HBBI", 0x06, 0, 0, 0)  # a program of one instruction: keep 0 bytes of each packet


class Gates:
    """Of all listening sockets that one asyncio loop serves."""

    def __init__(self) -> None:
        self._listeners: set[int] = set()
        self._spare: list[int] = []
        self._given: list[int] = []  # the numbers of those that were spare: what has them now may be a knocker
        self._is_open = True
        self._timer: asyncio.TimerHandle | None = None
        self._again_s = AGAIN_S

    def add(self, listener: int) -> None:
        """Something listens with this descriptor, which stays libzmq's. It must not wait in ``accept``, as libzmq
        leaves it: whom it was told of may have been sent away from here meanwhile, and its thread would wait on."""
        os.set_blocking(listener, False)
        self._listeners.add(listener)
        self._keep_spare()
        if not self._is_open:
            _filter(listener)

    def remove(self, listener: int) -> None:
        """It is about to be closed by its owner. With the last one, nothing is kept any more."""
        self._listeners.discard(listener)
        if not self._listeners:
            self._rest()
            self._give_spare()

    def shut(self) -> bool:
        """Accepting failed. False: this system can't close a gate. Takes ``SPELL_S`` at most; what is left to do is
        done later, in the loop's time."""
        if self._is_open:
            if not all([_filter(listener) for listener in self._listeners]):  # noqa: C419 - each of them
                return False
            self._is_open = False
            self._given = self._spare[:]
            self._give_spare()
            self._again_s = AGAIN_S
            self._send_away()
        elif self._timer is None:  # told late, or some who had knocked are still there
            self._later()
        return True

    def open(self) -> None:
        """Let people in again. If there is no room after all, the gates close again, and that is told again."""
        if not self._is_open:
            self._rest()
            self._keep_spare()
            self._is_open = True
            for listener in self._listeners:
                _unfilter(listener)

    def _send_away(self) -> None:
        """Those who had knocked before are let in and hung up on, one after the other. libzmq lets some in, too: those
        have the numbers that were spare. (Its monitor tells of them too late: it has so many failures to tell.)"""
        self._timer = None
        give_up_at = time.monotonic() + SPELL_S
        was_of_use = False
        while (crowded := [each for each in self._listeners if _waiting(each)]) and time.monotonic() < give_up_at:
            if not any([_turn_away(listener) for listener in crowded]):  # noqa: C419 - each of them
                break
            was_of_use = True
        hung_up = any([_hang_up(number, listener) for number in self._given for listener in self._listeners])  # noqa: C419
        if crowded or hung_up:
            self._again_s = AGAIN_S if was_of_use or hung_up else min(MOST_AGAIN_S, 2 * self._again_s)
            self._later()

    def _later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._again_s, self._send_away)

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _keep_spare(self) -> None:
        with contextlib.suppress(OSError):  # as many as can be had
            while len(self._spare) < SPARE:
                self._spare.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def _give_spare(self) -> None:
        while self._spare:
            os.close(self._spare.pop())


class Gate:
    """Beside one bound socket. Told by its monitor where it listens, and what failed."""

    def __init__(self, gates: Gates) -> None:
        self._gates = gates
        self._listener = -1
        self._told = False

    def listens(self, listener: int) -> None:
        self._listener = listener
        self._gates.add(listener)

    def refused(self, code: int) -> bool:
        """Accepting failed with this error number. True: the gate is closed by that, which had not been told."""
        if code not in WANTS or not self._gates.shut():
            return False
        is_news, self._told = not self._told, True
        return is_news

    def open(self) -> None:
        """This one and those beside it."""
        self._told = False
        self._gates.open()

    def close(self) -> None:
        """Give back what is kept. The listening socket is closed by its owner."""
        self._gates.remove(self._listener)


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """A socket that belongs to libzmq: it is not closed here. Raises OSError when it is none any more."""
    borrowed = socket.socket(fileno=descriptor)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _waiting(listener: int) -> int:
    """How many have knocked and were not let in yet: of a listening socket, that is what the kernel tells here."""
    with contextlib.suppress(OSError), _borrowed(listener) as door:
        return int.from_bytes(door.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 28)[24:28], sys.byteorder)
    return 0


def _turn_away(listener: int) -> bool:
    """One of those who wait there is let in and hung up on. False: there was none, or no descriptor for it."""
    with contextlib.suppress(OSError), _borrowed(listener) as door:  # which does not block: see ``add``
        peer, _ = door.accept()
        peer.close()
        return True
    return False


def _hang_up(descriptor: int, listener: int) -> bool:
    """If this is a connection that came in here, and not something else by now. libzmq closes it."""
    with contextlib.suppress(OSError), _borrowed(descriptor) as peer, _borrowed(listener) as door:
        if _came_in(peer, door):
            peer.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _came_in(peer: socket.socket, door: socket.socket) -> bool:
    """Is its own end the door's address? Other families' addresses may be no pairs at all."""
    if peer.family != door.family or peer.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    own, listens = peer.getsockname(), door.getsockname()
    return own[1] == listens[1] and (own[0] == listens[0] or listens[0] in _ANYWHERE)


def _filter(listener: int) -> bool:
    """Whoever knocks from now on gets no answer, and tries again later. False: this system can't."""
    if not GATES:
        return False
    program = ctypes.create_string_buffer(_DROP_ALL)
    try:
        with _borrowed(listener) as door:
            door.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(program)))
    except OSError:
        return False
    return True


def _unfilter(listener: int) -> None:
    with contextlib.suppress(OSError), _borrowed(listener) as door:  # there is none: just as well
        door.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)
