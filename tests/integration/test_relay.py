"""A relay between doors that can only reach outwards and those that send to them, with real sockets."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from time import monotonic, sleep

import psutil
import pytest

from swarm.errors import ConfigError
from swarm.wire.pull import PullChannel
from swarm.wire.push import PushChannel
from swarm.wire.sockets import bind
from swarm.wire.transport.accept import RESERVE
from swarm.wire.transport.keys import AuthPolicy, address_and_key, new_pair, via_relay
from swarm.wire.transport.relay import Relay
from swarm.wire.transport.relay.rendezvous import JOINED, MAX_SENDERS, Side, encode_preamble

HOST = "127.0.0.1"
LIMIT = 8 << 20
SOON_S = 20.0
DOOR, ME, OTHER = new_pair(), new_pair(), new_pair()
TICKET, ANOTHER = "ab" * 16, "cd" * 16


def until(holds: Callable[[], object]) -> None:
    give_up_at = monotonic() + SOON_S
    while not holds():
        assert monotonic() < give_up_at


class House:
    """A relay at a port of its own, doors that wait there, and who sends to them."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []
        bound = bind(HOST, 0)
        self.port = bound.getsockname()[1]
        self.place = f"tcp://{HOST}:{self.port}"
        self.relay = Relay([bound], self.failures.append)
        self.relay.admit(frozenset([TICKET]))
        self._made: list[PullChannel | PushChannel] = []

    def pull(self, ticket: str = TICKET, lock: AuthPolicy | None = None, place: str = "") -> PullChannel:
        made = PullChannel(HOST, LIMIT, auth=lock)
        made.use_relay(f"{place or self.place}/{ticket}")
        self._made.append(made)
        return made

    def push(self, pull: PullChannel, ticket: str = TICKET, place: str = "") -> PushChannel:
        made = PushChannel(via_relay(pull.endpoint, place or self.place, ticket), pair=ME)
        self._made.append(made)
        return made

    def drop(self, channel: PullChannel | PushChannel) -> None:
        self._made.remove(channel)
        channel.close()

    def restart(self) -> None:
        self.relay.close()
        self.relay = Relay([bind(HOST, self.port)], self.failures.append)
        self.relay.admit(frozenset([TICKET]))

    def knock(self, side: Side, ticket: str = TICKET) -> socket.socket:
        made = socket.create_connection((HOST, self.port), SOON_S)
        made.sendall(encode_preamble(side, ticket))
        return made

    def close(self) -> None:
        for each in self._made:
            each.close()
        self.relay.close()


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    made.close()
    assert not made.failures


def locked(known: str = ME.public) -> AuthPolicy:
    return AuthPolicy(DOOR, known.__eq__, reject_explicitly=False)


def received(pull: PullChannel) -> bytes:
    until(lambda: pull.wait(0.02))
    return b"".join(pull.receive() or [])


def sent(push: PushChannel, pull: PullChannel, message: bytes) -> None:
    """The door has to look while they shake hands."""
    until(lambda: push.send([message]) or pull.wait(0.01))


def goes_through(push: PushChannel, pull: PullChannel, message: bytes) -> None:
    sent(push, pull, message)
    assert received(pull) == message


def is_hung_up_on(end: socket.socket) -> bool:
    with contextlib.suppress(ConnectionResetError):
        return end.recv(1) == b""
    return True


@pytest.mark.parametrize("lock", [locked(), None], ids=["keys", "a word"])
def test_messages_of_every_size_pass_whole_and_in_order(house: House, lock: AuthPolicy | None) -> None:
    pull = house.pull(lock=lock)
    push = house.push(pull)
    bodies = [secrets.token_bytes(size) for size in (8 << 10, 4 << 20, 1, 300 << 10, 4 << 20)] * 3
    for body in bodies[:5]:
        goes_through(push, pull, body)
    got: list[bytes] = []
    for body in bodies:
        while not push.send([body]):
            got.append(received(pull))
    while len(got) < len(bodies):
        got.append(received(pull))
    assert got == bodies
    assert house.relay.statistics()["joined"] == 1


def test_who_sends_may_come_first(house: House) -> None:
    early = PullChannel(HOST, LIMIT, auth=locked())
    push = house.push(early)
    sleep(0.5)
    early.use_relay(f"{house.place}/{TICKET}")
    goes_through(push, early, b"later")
    early.close()


def test_two_senders_are_heard_side_by_side(house: House) -> None:
    """A new epoch's connection stands beside the last one's."""
    pull = house.pull(lock=locked())
    one, two = house.push(pull), house.push(pull)
    for number in range(5):
        goes_through(one, pull, b"one %d" % number)
        goes_through(two, pull, b"two %d" % number)


class Recorder:
    """Somebody between the sender and the relay, who keeps all that passes."""

    def __init__(self, port: int) -> None:
        self.heard = bytearray()
        self._port = port
        self._listening = socket.create_server((HOST, 0))
        self.place = f"tcp://{HOST}:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection((HOST, self._port))
                for source, target in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.heard += data
                target.sendall(data)
        for each in (source, target):
            each.close()

    def close(self) -> None:
        self._listening.close()


def test_nothing_can_be_read_on_the_way(house: House) -> None:
    recorder = Recorder(house.port)
    pull = house.pull(lock=locked())
    push = house.push(pull, place=recorder.place)
    body = b"nobody else's business" * 1000
    goes_through(push, pull, body)
    assert len(recorder.heard) > len(body)
    assert b"nobody else's business" not in recorder.heard
    recorder.close()


def test_a_key_that_the_door_does_not_know_is_not_heard_by_relay_either(house: House) -> None:
    known = {OTHER.public}
    pull = house.pull(lock=AuthPolicy(DOOR, known.__contains__, reject_explicitly=False))
    push = house.push(pull)
    give_up_at = monotonic() + 1.0
    while monotonic() < give_up_at:
        assert not push.send([b"let me in"])
        assert not pull.wait(0.02)
    assert pull.num_refused
    known.add(ME.public)
    goes_through(push, pull, b"now")
    known.clear()
    pull.drop_unauthorized()
    until(lambda: not push.send([b"too late"]))
    assert not pull.wait(0.3)


def test_who_takes_the_doors_place_without_its_key_hears_nothing_and_ends_nothing(house: House) -> None:
    """Whoever has read the ticket may wait there and say what it likes, also that our key opens nothing."""
    thief = house.knock(Side.RECEIVER)
    pull = PullChannel(HOST, LIMIT, auth=locked())
    push = house.push(pull)
    assert thief.recv(1) == JOINED
    thief.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(47) + b"\x04\x08\x05ERROR\x02no")
    while data := thief.recv(1 << 16):
        assert b"secret" not in data
        push.send([b"secret"])
    pull.use_relay(f"{house.place}/{TICKET}")
    goes_through(push, pull, b"secret")
    thief.close()
    pull.close()


def test_a_receiver_that_is_gone_is_noticed_and_a_new_one_found(house: House) -> None:
    pull = house.pull(lock=locked())
    push = house.push(pull)
    goes_through(push, pull, b"1")
    house.drop(pull)
    until(lambda: not push.send([b"lost"]))
    again = house.pull(lock=locked())
    goes_through(push, again, b"2")


def test_a_sender_that_is_gone_leaves_nothing_behind(house: House) -> None:
    pull = house.pull(lock=locked())
    for _ in range(5):
        push = house.push(pull)
        goes_through(push, pull, b"hello")
        house.drop(push)
        until(lambda: not house.relay.statistics()["joined"])
    until(lambda: house.relay.statistics()["waiting"] == 1)


def test_a_relay_that_starts_again_is_found_again(house: House) -> None:
    pull = house.pull(lock=locked())
    push = house.push(pull)
    goes_through(push, pull, b"1")
    house.restart()
    until(lambda: not push.send([b"lost"]) or pull.wait(0.01))
    goes_through(push, pull, b"2")


def test_without_admission_nothing_passes(house: House) -> None:
    pull = house.pull(ANOTHER, lock=locked())
    push = house.push(pull, ANOTHER)
    give_up_at = monotonic() + 0.5
    while monotonic() < give_up_at:
        assert not push.send([b"early"])
        assert not pull.wait(0.02)
    assert house.relay.statistics()["waiting"] == 0
    house.relay.admit(frozenset([ANOTHER]))
    goes_through(push, pull, b"now")


def test_who_is_admitted_no_more_is_cut_at_once(house: House) -> None:
    pull = house.pull(lock=locked())
    push = house.push(pull)
    goes_through(push, pull, b"1")
    house.relay.admit(frozenset([ANOTHER]))
    until(lambda: not push.send([b"too late"]))
    until(lambda: house.relay.statistics()["joined"] == 0)
    assert house.relay.statistics()["waiting"] == 0


def test_calling_off_ends_the_waiting_and_not_what_is_joined(house: House) -> None:
    pull = house.pull(lock=locked())
    push = house.push(pull)
    goes_through(push, pull, b"1")
    until(lambda: house.relay.statistics()["waiting"] == 1)
    pull.use_relay(f"{house.place}/{TICKET}")  # the same: nothing happens
    pull.use_relay("")
    until(lambda: house.relay.statistics()["waiting"] == 0)
    goes_through(push, pull, b"2")
    pull.use_relay(f"{house.place}/{TICKET}")
    until(lambda: house.relay.statistics()["waiting"] == 1)


def test_a_receiver_that_does_not_read_stops_the_sender_and_fills_nothing(house: House) -> None:
    pull = house.pull(lock=locked())
    push = house.push(pull)
    body = secrets.token_bytes(4 << 20)
    goes_through(push, pull, body)
    before, passed = psutil.Process().memory_info().rss, house.relay.statistics()["bytes"]
    num_sent, give_up_at = 0, monotonic() + 1.5
    while monotonic() < give_up_at:
        num_sent += push.send([body])
        sleep(0.001)
    assert num_sent < 16  # the kernel's buffers, and the sender's own queue
    assert house.relay.statistics()["bytes"] - passed < num_sent * len(body)
    num_received, give_up_at = 0, monotonic() + SOON_S
    while num_received < 50:  # 200 MB
        push.send([body])
        num_received += pull.wait(0.01) and b"".join(pull.receive() or []) == body
        assert monotonic() < give_up_at
    assert psutil.Process().memory_info().rss - before < 64 << 20  # all three are in this process


def test_a_thousand_strangers_cost_nothing(house: House) -> None:
    """Silent ones, those that say something else, and those with a ticket that nobody has."""
    pull = house.pull(lock=locked())
    push = house.push(pull)
    goes_through(push, pull, b"0")
    said = (
        b"",
        b"GET / HTTP/1.1\r\n",
        b"\xff" + bytes(63),
        b"SWRL1 T",
        encode_preamble(Side.SENDER, ANOTHER),
        os.urandom(400),
    )
    strangers = []
    for number in range(1000):
        stranger = socket.create_connection((HOST, house.port), SOON_S)
        with contextlib.suppress(ConnectionError):
            stranger.sendall(said[number % len(said)])
        strangers.append(stranger)
        if len(strangers) > 300:
            strangers.pop(0).close()
        if number % 20 == 0:
            goes_through(push, pull, b"%d" % number)
    assert house.relay.statistics()["refused"] >= 600
    assert len(house.relay._ends) <= 256 + 3
    newcomer = house.push(pull)
    goes_through(newcomer, pull, b"a newcomer")
    until(lambda: len(house.relay._ends) == 5)  # two pairs, and who waits: the rest was hung up on in time
    for stranger in strangers:
        stranger.close()


def test_the_last_descriptors_are_left_for_others(house: House) -> None:
    """Newcomers are hung up on where few are left; a pair that is joined goes on without a pipe of its own."""
    pull = house.pull()
    push = house.push(pull)
    goes_through(push, pull, b"before")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as newest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (newest.fileno() + RESERVE, hard))
        try:
            stranger = house.knock(Side.SENDER)
            assert is_hung_up_on(stranger)
            stranger.close()
            goes_through(push, pull, os.urandom(1 << 20))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    late = house.push(pull)
    goes_through(late, pull, b"after")


def test_the_newest_of_those_that_wait_are_kept(house: House) -> None:
    oldest, *others = [house.knock(Side.RECEIVER) for _ in range(3)]
    assert is_hung_up_on(oldest)
    senders = [house.knock(Side.SENDER) for _ in range(2)]
    for each in (*others, *senders):
        assert each.recv(1) == JOINED
    crowd = [house.knock(Side.SENDER) for _ in range(MAX_SENDERS + 1)]
    assert is_hung_up_on(crowd[0])
    assert is_hung_up_on(crowd[-1])  # nobody came for it, in three seconds
    for each in (oldest, *others, *senders, *crowd):
        each.close()


def test_who_waits_and_speaks_is_hung_up_on(house: House) -> None:
    for side in Side:
        end = house.knock(side)
        until(lambda: len(house.relay._ends) == 1)
        sleep(0.1)
        end.sendall(b"more")
        assert is_hung_up_on(end)
        end.close()


@pytest.mark.parametrize("relay", ["tcp://127.0.0.1:5704", "tcp://127.0.0.1:5704/short", f"tcp://127.0.0.1/{TICKET}"])
def test_an_address_without_a_ticket_is_no_relays(relay: str) -> None:
    pull = PullChannel(HOST, LIMIT)
    with pytest.raises(ConfigError):
        pull.use_relay(relay)
    if address_and_key(relay)[0].count("/") > 2:
        with pytest.raises(ConfigError):
            PushChannel(relay)
    pull.close()
