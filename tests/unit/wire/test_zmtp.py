"""The listening half of ZMTP: whole messages come out however the bytes are cut; what oversteps is refused at once."""

from __future__ import annotations

import random

import pytest

from swarm.errors import WireError
from swarm.wire.zmtp import HANDSHAKE_BYTES, WELCOME, Inlet, framed

LIMIT = 300_000
KEY = b"0123456789abcdef"


def ready(kind: bytes = b"DEALER", identity: bytes = b"me") -> bytes:
    """What a knocking end says first, as libzmq does."""
    body = b"\x05READY"
    for name, value in ((b"Socket-Type", kind), (b"Identity", identity)):
        body += bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value
    return WELCOME[:64] + bytes([4, len(body)]) + body


def message(*frames: bytes) -> bytes:
    return b"".join(framed(len(frame), more=index + 1 < len(frames)) + frame for index, frame in enumerate(frames))


def inlet(key: bytes = b"") -> Inlet:
    made = Inlet(LIMIT, key)
    made.feed(ready(identity=key + b"me"))
    assert made.next() is None
    return made


def fed(receiver: Inlet, data: bytes, cuts: random.Random | None = None) -> list[list[bytes]]:
    """What comes out of these bytes, in pieces of any size, as a socket would hand them over."""
    out = []
    while data:
        room = receiver.room()
        size = len(data) if cuts is None else cuts.choice((1, 2, 9, 64, 1000, 70_000))
        piece, data = data[:size], data[size:]
        if room is not None:
            data = piece[len(room) :] + data
            piece = piece[: len(room)]
            room[: len(piece)] = piece
            receiver.filled(len(piece))
        else:
            receiver.feed(piece)
        while (found := receiver.next()) is not None:
            out.append([bytes(frame) for frame in found])
    return out


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("key", [b"", KEY])
def test_messages_come_out_as_they_went_in(seed: int, key: bytes) -> None:
    """Of one frame or two, empty ones and large ones, cut anywhere, the handshake too."""
    chance = random.Random(seed)
    sizes = (0, 1, 255, 256, 65_535, 65_536, 65_537, LIMIT)
    sent = [
        [chance.randbytes(chance.choice(sizes)) for _ in range(chance.randint(1, 2))]
        for _ in range(chance.randint(1, 9))
    ]
    receiver = Inlet(LIMIT, key)
    data = ready(identity=key + b"me") + b"".join(message(*frames) for frames in sent)
    assert fed(receiver, data, chance) == sent
    assert receiver.identity == key + b"me"
    assert receiver.num_held == 0


@pytest.mark.parametrize("identity", [b"", b"\0", bytes(16), b"\xff" * 255])
def test_any_name_will_do(identity: bytes) -> None:
    """Those of clients are sixteen random bytes."""
    body = ready(identity=b"")[66:-12] + b"Identity" + len(identity).to_bytes(4, "big") + identity
    receiver = Inlet(LIMIT)
    receiver.feed(WELCOME[:64] + b"\x06" + len(body).to_bytes(8, "big") + body + message(b"hello"))
    assert receiver.next() == [b"hello"]
    assert receiver.identity == identity


def test_one_message_at_a_time() -> None:
    """What came in one piece is handed out when it is asked for: others have their turns between."""
    receiver = inlet()
    receiver.feed(message(b"a") * 1000)
    for _ in range(1000):
        assert receiver.next() == [b"a"]
    assert receiver.next() is None


OVERSTEPS = {
    "three frames": (b"\x01\x01a\x01\x01b", "at most 2 frames"),
    "too long a frame": (framed(LIMIT + 1, more=False), f"a frame of {LIMIT + 1} bytes was announced"),
    "too long a second frame": (b"\x01\x01a" + framed(2**63, more=False), "bytes was announced"),
    "strange flags": (b"\x08\x01a", "no frame's flags"),
    "a command": (b"\x04\x05\x04PING", "a command came"),
}


@pytest.mark.parametrize("what", OVERSTEPS)
def test_what_oversteps_is_refused_before_it_is_kept(what: str) -> None:
    """By what stands before the frame: none of its bytes need to have come."""
    data, reason = OVERSTEPS[what]
    receiver = inlet()
    receiver.feed(message(b"good") + data)
    assert receiver.next() == [b"good"]
    with pytest.raises(WireError, match=reason):
        receiver.next()
    assert receiver.num_held < 32


def test_what_is_announced_takes_no_room_before_it_comes() -> None:
    """A stranger's large frame: room for a little, then for twice of what came."""
    receiver = inlet()
    receiver.feed(framed(LIMIT, more=False) + b"x")
    assert receiver.next() is None
    assert receiver.num_held <= 65_536
    room = receiver.room()
    assert room is not None
    assert len(room) < 65_536


STRANGERS = {
    "http": (b"GET / HTTP/1.1\r\n\r\n", "no ZMTP"),
    "an old version": (b"\xff" + bytes(8) + b"\x7f\x01", "at least 3 is needed"),
    "another mechanism": (WELCOME[:12] + b"CURVE".ljust(52, b"\0"), "only NULL"),
    "a message first": (WELCOME[:64] + message(b"a"), "before the handshake"),
    "an endless greeting": (WELCOME[:64] + b"\x06" + (HANDSHAKE_BYTES + 1).to_bytes(8, "big"), "the handshake has"),
    "another command": (WELCOME[:64] + b"\x04\x06\x05HELLO", "no READY"),
    "a kind that only listens": (ready(b"PULL"), "has nothing to say"),
    "one that only sends": (ready(b"PUSH"), "has nothing to say"),
    "too long a name": (
        WELCOME[:64]
        + b"\x06\0\0\0\0\0\0\x01\x37\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\x01\x0e"
        + bytes(270),
        "too long",
    ),
    "cut short": (WELCOME[:64] + b"\x04\x0b\x05READY\x04name", "cut short"),
}


@pytest.mark.parametrize("who", STRANGERS)
def test_who_speaks_otherwise_is_refused(who: str) -> None:
    """Each with its reason, and nothing of it is heard."""
    data, reason = STRANGERS[who]
    receiver = Inlet(LIMIT)
    receiver.feed(data)
    with pytest.raises(WireError, match=reason):
        receiver.next()
    assert receiver.identity is None


@pytest.mark.parametrize("identity", [b"", b"me", KEY[:-1], KEY[:-1] + b"x", b"x" + KEY])
def test_where_a_key_is_asked_for_nobody_else_is_heard(identity: bytes) -> None:
    """No message passes before the key was named."""
    receiver = Inlet(LIMIT, KEY)
    receiver.feed(ready(identity=identity) + message(b"hello"))
    with pytest.raises(WireError, match="must know the key"):
        receiver.next()
