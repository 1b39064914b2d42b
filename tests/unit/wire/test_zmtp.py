"""The listening half of ZMTP: whole messages come out however the bytes are cut; what oversteps is refused at once."""

from __future__ import annotations

import random

import pytest

from swarm.errors import WireError
from swarm.wire.transport.server_handshake import (
    PULL,
    ROUTER,
    USERNAME,
    SocketType,
    encode_command,
    encode_metadata,
    server_mechanism,
)
from swarm.wire.transport.zmtp import HANDSHAKE_BYTES, ZmtpDecoder, command_frame, encode_greeting, frame_header

LIMIT = 300_000
KEY = b"0123456789abcdef"
NULL = encode_greeting(b"NULL", is_server=False)
PLAIN = encode_greeting(b"PLAIN", is_server=False)


def ready(kind: bytes = b"DEALER", identity: bytes = b"me") -> bytes:
    """What a knocking end says first, as libzmq does."""
    return NULL + command_frame(encode_command(b"READY", encode_metadata(Socket_Type=kind, Identity=identity)))


def hello(key: bytes = KEY) -> bytes:
    """The same where a key is asked for."""
    return PLAIN + command_frame(encode_command(b"HELLO", bytes([len(USERNAME)]) + USERNAME + bytes([len(key)]) + key))


def initiate(kind: bytes = b"PUSH") -> bytes:
    """And then."""
    return command_frame(encode_command(b"INITIATE", encode_metadata(Socket_Type=kind)))


def message(*frames: bytes) -> bytes:
    return b"".join(
        frame_header(len(frame), more=index + 1 < len(frames)) + frame for index, frame in enumerate(frames)
    )


def listening(key: bytes = b"", kind: SocketType = ROUTER) -> ZmtpDecoder:
    return ZmtpDecoder(LIMIT, server_mechanism(kind, key)())


def inlet() -> ZmtpDecoder:
    """Whose handshake is through."""
    made = listening()
    made.feed(ready())
    assert made.next() is None
    return made


def fed(receiver: ZmtpDecoder, data: bytes, cuts: random.Random | None = None) -> list[list[bytes]]:
    """What comes out of these bytes, in pieces of any size, as a socket would hand them over."""
    out = []
    while data:
        room = receiver.recv_buffer()
        size = len(data) if cuts is None else cuts.choice((1, 2, 9, 64, 1000, 70_000))
        piece, data = data[:size], data[size:]
        if room is not None:
            data = piece[len(room) :] + data
            piece = piece[: len(room)]
            room[: len(piece)] = piece
            receiver.commit(len(piece))
        else:
            lent = bytearray(piece)
            receiver.feed(lent)
            if cuts is not None and cuts.random() < 0.5:
                receiver.copy_unread()
                lent[:] = bytes(len(lent))
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
    receiver = listening(key, PULL if key else ROUTER)
    data = hello() + initiate() if key else ready()
    data += b"".join(message(*frames) for frames in sent)
    assert fed(receiver, data, chance) == sent
    assert receiver.identity == (b"" if key else b"me")
    assert receiver.num_held == 0


@pytest.mark.parametrize("identity", [b"", b"\0", bytes(16), b"\xff" * 255])
def test_any_name_will_do(identity: bytes) -> None:
    """Those of clients are sixteen random bytes."""
    body = encode_command(b"READY", encode_metadata(Socket_Type=b"DEALER", Identity=identity))
    receiver = listening()
    receiver.feed(NULL + b"\x06" + len(body).to_bytes(8, "big") + body + message(b"hello"))
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
    "too long a frame": (frame_header(LIMIT + 1, more=False), f"a frame of {LIMIT + 1} bytes was announced"),
    "too long a second frame": (b"\x01\x01a" + frame_header(2**63, more=False), "bytes was announced"),
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
    receiver.feed(frame_header(LIMIT, more=False) + b"x")
    assert receiver.next() is None
    assert receiver.num_held <= 65_536
    room = receiver.recv_buffer()
    assert room is not None
    assert len(room) < 65_536


STRANGERS = {
    "http": (b"GET / HTTP/1.1\r\n\r\n", "not use ZMTP"),
    "an old version": (b"\xff" + bytes(8) + b"\x7f\x01", "at least 3 is needed"),
    "another mechanism": (NULL[:12] + b"CURVE".ljust(52, b"\0"), "only NULL"),
    "a message first": (NULL + message(b"a"), "before the handshake"),
    "an endless greeting": (NULL + b"\x06" + (HANDSHAKE_BYTES + 1).to_bytes(8, "big"), "the handshake has"),
    "another command": (NULL + b"\x04\x06\x05HELLO", "b'HELLO' came in the handshake"),
    "a kind that only listens": (ready(b"PULL"), "can't connect here"),
    "one that only sends": (ready(b"PUSH"), "can't connect here"),
    "too long a name": (
        NULL + b"\x06\0\0\0\0\0\0\x01\x37\x05READY\x0bSocket-Type\0\0\0\x06DEALER\x08Identity\0\0\x01\x0e" + bytes(270),
        "too long",
    ),
    "nothing at all": (NULL + b"\x04\x00", "an empty command"),
    "cut short": (NULL + b"\x04\x0b\x05READY\x04name", "cut short"),
}


@pytest.mark.parametrize("who", STRANGERS)
def test_who_speaks_otherwise_is_refused(who: str) -> None:
    """Each with its reason, and nothing of it is heard."""
    data, reason = STRANGERS[who]
    receiver = listening()
    receiver.feed(data)
    with pytest.raises(WireError, match=reason):
        receiver.next()
    assert receiver.identity is None
    assert receiver.answer == b"", "libzmq would knock no more if it heard an error"


@pytest.mark.parametrize("key", [b"", b"me", KEY[:-1], KEY[:-1] + b"x", b"x" + KEY, KEY + b"x"])
def test_where_a_key_is_asked_for_nobody_else_is_heard(key: bytes) -> None:
    """No message passes before the key was named. Who names another one is told so, and would be told nothing else."""
    receiver = listening(KEY, PULL)
    receiver.feed(hello(key) + initiate() + message(b"hello"))
    with pytest.raises(WireError, match="wrong token"):
        receiver.next()
    assert receiver.identity is None
    assert receiver.answer[2:8] == b"\x05ERROR"


UNPROVED = {
    "without proof": (ready(b"PUSH"), "only PLAIN"),
    "the end first": (PLAIN + initiate(), "b'INITIATE' came"),
    "a message first": (PLAIN + message(b"a"), "before the handshake"),
    "the key twice": (hello() + hello()[64:], "b'HELLO' came"),
    "no user": (PLAIN + b"\x04\x06\x05HELLO", "cut short"),
    "no key": (PLAIN + b"\x04\x08\x05HELLO\x01a", "cut short"),
    "a cut key": (PLAIN + b"\x04\x0a\x05HELLO\x01a\x09b", "cut short"),
    "more behind it": (PLAIN + b"\x04\x0b\x05HELLO\x01a\x01bc", "cut short"),
    "a kind that only listens": (hello() + initiate(b"PULL"), "can't connect here"),
    "one that is answered": (hello() + initiate(b"DEALER"), "can't connect here"),
}


@pytest.mark.parametrize("who", UNPROVED)
def test_the_key_is_named_first_and_once(who: str) -> None:
    """What else may be said in the handshake of a door with a key is refused with its reason."""
    data, reason = UNPROVED[who]
    receiver = listening(KEY, PULL)
    receiver.feed(data)
    with pytest.raises(WireError, match=reason):
        receiver.next()
    assert receiver.identity is None


def test_what_a_handshake_is_answered() -> None:
    """Each step has its answer: who we are is told only to those who know the key."""
    receiver = listening(KEY, PULL)
    receiver.feed(hello())
    assert receiver.next() is None
    assert receiver.answer == command_frame(encode_command(b"WELCOME"))
    receiver.answer = b""
    receiver.feed(initiate())
    assert receiver.next() is None
    assert receiver.answer == command_frame(
        encode_command(b"READY", encode_metadata(Socket_Type=b"PULL", Identity=b""))
    )
    assert inlet().answer == command_frame(
        encode_command(b"READY", encode_metadata(Socket_Type=b"ROUTER", Identity=b""))
    )


def test_who_knows_the_key_is_believed_in_what_it_announces() -> None:
    """There is room for all of a large frame at once; for one of the handshake there is not."""
    receiver = listening(KEY, PULL)
    receiver.feed(hello() + initiate() + frame_header(LIMIT, more=False) + b"x")
    assert receiver.next() is None
    room = receiver.recv_buffer()
    assert room is not None
    assert len(room) == LIMIT - 1
