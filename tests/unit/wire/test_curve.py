"""CURVE's listening half: who has shown its key is heard; what was changed, repeated or cut does not get through."""

from __future__ import annotations

import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st
from nacl.bindings import (
    crypto_box,
    crypto_box_beforenm,
    crypto_box_easy_afternm,
    crypto_box_keypair,
    crypto_box_open,
    crypto_box_open_easy_afternm,
)

from swarm.errors import WireError
from swarm.wire.transport.curve import CurveServer, is_proven_refusal
from swarm.wire.transport.curve_session import CurveSession
from swarm.wire.transport.keys import AuthPolicy, KeyPair, new_pair, public_of
from swarm.wire.transport.server_handshake import PULL, ROUTER, NullServer, encode_command, encode_metadata
from swarm.wire.transport.zmtp import ZmtpDecoder, command_frame, encode_greeting, frame_header

LIMIT = 100_000
DOOR = new_pair()
ME = new_pair()


class Knocker:
    """The knocking half, as RFC 26 has it, command by command."""

    def __init__(self, own: KeyPair = ME, door: str = DOOR.public, says: bytes = b"") -> None:
        self.own, self.door = own, bytes.fromhex(door)
        self.says = says  # of itself, beside what it must
        self.public, self.secret = crypto_box_keypair()
        self.number = 0
        self.precomputed = b""

    def _next(self) -> bytes:
        self.number += 1
        return self.number.to_bytes(8, "big")

    def hello(self) -> bytes:
        number = self._next()
        box = crypto_box(bytes(64), b"CurveZMQHELLO---" + number, self.door, self.secret)
        return encode_command(b"HELLO", b"\x01\x00" + bytes(72) + self.public + number + box)

    def initiate(self, welcome: bytes, *, vouches_for: bytes = b"", vouched_by: KeyPair | None = None) -> bytes:
        plain = crypto_box_open(welcome[24:], b"WELCOME-" + welcome[8:24], self.door, self.secret)
        theirs, cookie = plain[:32], plain[32:]
        nonce, number = secrets.token_bytes(16), self._next()
        secret = bytes.fromhex((vouched_by or self.own).secret)
        vouch = crypto_box((vouches_for or self.public) + self.door, b"VOUCH---" + nonce, theirs, secret)
        said = (
            bytes.fromhex(self.own.public)
            + nonce
            + vouch
            + encode_metadata(Socket_Type=b"PUSH", Identity=b"me")
            + self.says
        )
        box = crypto_box(said, b"CurveZMQINITIATE" + number, theirs, self.secret)
        self.precomputed = crypto_box_beforenm(theirs, self.secret)
        return encode_command(b"INITIATE", cookie + number + box)

    def message(self, frame: bytes, *, more: bool = False, number: int | None = None) -> bytes:
        nonce = self._next() if number is None else number.to_bytes(8, "big")
        box = crypto_box_easy_afternm(bytes([more]) + frame, b"CurveZMQMESSAGEC" + nonce, self.precomputed)
        return encode_command(b"MESSAGE", nonce + box)

    def opened(self, sealed: bytes) -> bytes:
        return crypto_box_open_easy_afternm(sealed[16:], b"CurveZMQMESSAGES" + sealed[8:16], self.precomputed)


def mechanism(opens: bool = True, *, says_no: bool = True) -> CurveServer:
    return CurveServer(PULL, AuthPolicy(DOOR, lambda key: opens and key == ME.public, says_no))


def session(curve: CurveServer) -> CurveSession:
    assert curve.session is not None
    return curve.session


def through(knocker: Knocker) -> CurveServer:
    """A conversation whose handshake is over."""
    curve = mechanism()
    welcome = curve.handle(knocker.hello())
    assert not curve.handle(knocker.initiate(welcome.command)).refused
    return curve


def through_as(knocker: Knocker) -> bytes:
    """What another conversation's ends have in common."""
    through(knocker)
    return knocker.precomputed


def test_who_shows_its_key_is_heard() -> None:
    """And the door knows whose it is."""
    knocker = Knocker()
    curve = through(knocker)
    assert curve.metadata is not None
    assert (curve.key, curve.metadata[b"identity"]) == (ME.public, b"me")
    frame, more = session(curve).decrypt(knocker.message(b"hello", more=True))
    assert (bytes(frame), more) == (b"hello", True)
    frame[0] = 0  # it is memory of its own: arrays are made of it
    assert knocker.opened(bytes(session(curve).encrypt(b"answer", more=False))) == b"\0answer"
    assert knocker.opened(bytes(session(curve).encrypt(memoryview(b""), more=True))) == b"\1"


def test_another_key_is_told_so_or_not() -> None:
    for says_no, expected in ((True, encode_command(b"ERROR", b"\x03400")), (False, b"")):
        curve, knocker = mechanism(opens=False, says_no=says_no), Knocker()
        reply = curve.handle(knocker.initiate(curve.handle(knocker.hello()).command))
        said, proof = reply.command[: len(expected)], reply.command[len(expected) :]
        assert (said, bool(reply.refused)) == (expected, True)
        assert is_proven_refusal(b"\x03400" + proof, knocker.precomputed) is says_no
        assert not is_proven_refusal(b"\x03400" + proof, through_as(Knocker()))
        assert curve.metadata is None


def test_nobody_speaks_for_another() -> None:
    """Whoever names a key must have its secret half, for this very connection."""
    thief = Knocker(own=KeyPair(ME.public, new_pair().secret))
    curve = mechanism()
    with pytest.raises(WireError, match="does not open"):
        curve.handle(thief.initiate(curve.handle(thief.hello()).command))
    knocker, curve = Knocker(), mechanism()
    with pytest.raises(WireError, match="another connection"):
        curve.handle(knocker.initiate(curve.handle(knocker.hello()).command, vouches_for=secrets.token_bytes(32)))


def test_who_knocks_for_another_door_is_refused() -> None:
    with pytest.raises(WireError, match="be decrypted"):
        mechanism().handle(Knocker(door=new_pair().public).hello())


def test_what_was_heard_before_is_not_heard_again() -> None:
    """Nor what is older than what was heard."""
    knocker = Knocker()
    curve = through(knocker)
    first, second = knocker.message(b"1"), knocker.message(b"2")
    for number, message in enumerate((bytes(first), bytes(second)), 1):
        assert bytes(session(curve).decrypt(message)[0]) == b"%d" % number
    for old in (first, second):
        with pytest.raises(WireError, match="again"):
            session(curve).decrypt(old)


def test_what_was_taken_out_on_the_way_is_missed() -> None:
    """Nothing that comes behind it is heard."""
    knocker = Knocker()
    curve = through(knocker)
    knocker.message(b"taken out")
    for _ in range(2):
        with pytest.raises(WireError, match="missing"):
            session(curve).decrypt(knocker.message(b"later"))


def test_a_cookie_of_another_time_opens_nothing() -> None:
    knocker, curve = Knocker(), mechanism()
    initiate = bytearray(knocker.initiate(curve.handle(knocker.hello()).command))
    initiate[9 + 20] ^= 1
    with pytest.raises(WireError, match="cookie"):
        curve.handle(bytes(initiate))


def test_a_conversation_that_was_recorded_opens_nothing() -> None:
    """Played again to the same door, from the first word on: the cookie is of that connection. Else all that was said
    there would be done once more, and we would answer with numbers that were used already under the same key."""
    knocker, curve = Knocker(), mechanism()
    hello = knocker.hello()
    initiate = knocker.initiate(curve.handle(hello).command)
    assert not curve.handle(initiate).refused
    assert bytes(session(curve).decrypt(knocker.message(b"once"))[0]) == b"once"
    for again in (mechanism(), mechanism()):
        again.handle(hello)
        with pytest.raises(WireError, match="cookie"):
            again.handle(initiate)
        assert (again.metadata, again.key) == (None, "")


def test_who_is_refused_has_shown_no_key() -> None:
    curve, knocker = mechanism(opens=False), Knocker()
    assert curve.handle(knocker.initiate(curve.handle(knocker.hello()).command)).refused
    assert (curve.metadata, curve.key) == (None, "")


@given(st.data())
def test_whatever_is_changed_is_a_wire_error(data: st.DataObject) -> None:
    """Any command, one byte changed or the end cut off: no other exception, and nobody is let in by it."""
    knocker, curve = Knocker(), mechanism()
    stage = data.draw(st.sampled_from(["hello", "initiate", "message"]))
    command = knocker.hello()
    if stage != "hello":
        command = knocker.initiate(curve.handle(command).command)
    if stage == "message":
        curve.handle(command)
        command = knocker.message(b"some text")
    damaged = bytearray(command)
    at = data.draw(st.integers(0, len(command) - 1))
    if data.draw(st.booleans()):
        damaged[at] ^= data.draw(st.integers(1, 255))
    else:
        del damaged[at:]
    if stage == "hello" and 8 <= at < 80 and len(damaged) == len(command):
        return  # padding
    take = session(curve).decrypt if stage == "message" else curve.handle
    with pytest.raises(WireError):
        take(bytes(damaged))


def test_public_halves_belong_to_secrets() -> None:
    assert public_of(ME.secret) == ME.public


def inlet(knocker: Knocker) -> ZmtpDecoder:
    """What a door has of a connection whose handshake is through."""
    made = ZmtpDecoder(LIMIT, mechanism())
    made.feed(encode_greeting(b"CURVE", is_server=False) + command_frame(knocker.hello()))
    assert not made.advance_handshake()
    welcome = made.answer[2:]
    made.answer = b""
    initiate = knocker.initiate(welcome)
    long = bytes([6]) + len(initiate).to_bytes(8, "big") if len(initiate) > 255 else bytes([4, len(initiate)])
    made.feed(long + initiate)
    assert made.advance_handshake()
    return made


@pytest.mark.parametrize("claimed", [ME.public.encode(), b"\xff", b""], ids=["a key", "no text", "nothing"])
def test_a_key_is_shown_by_a_handshake_and_not_by_words(claimed: bytes) -> None:
    """At a door without a lock nobody has one, whatever it says of itself; at one with a lock, its own."""
    ready = encode_command(b"READY", encode_metadata(Socket_Type=b"DEALER", Identity=b"me", key=claimed))
    door = ZmtpDecoder(LIMIT, NullServer(ROUTER))
    door.feed(encode_greeting(b"NULL", is_server=False) + command_frame(ready))
    assert door.advance_handshake()
    assert door.key == ""
    knocker = Knocker(says=encode_metadata(key=claimed))
    assert inlet(knocker).key == ME.public


def sent(*sealed: bytes) -> bytes:
    return b"".join(frame_header(len(each), more=False) + each for each in sealed)


@pytest.mark.parametrize("size", [0, 1, 254, 255, 256, 70_000, LIMIT])
def test_messages_of_all_sizes_pass(size: int) -> None:
    knocker = Knocker()
    door = inlet(knocker)
    body = secrets.token_bytes(size)
    data = sent(knocker.message(b"header", more=True), knocker.message(body))
    for cut in (1, len(data) // 2, len(data) - 1):
        piece = data[:cut]
        assert cut < len(data)
        fresh = Knocker()
        door = inlet(fresh)
        data = sent(fresh.message(b"header", more=True), fresh.message(body))
        piece, rest = data[:cut], data[cut:]
        door.feed(piece)
        got = door.next()
        while got is None and rest:
            if (room := door.recv_buffer()) is not None:
                some, rest = rest[: len(room)], rest[len(room) :]
                room[: len(some)] = some
                door.commit(len(some))
            else:
                door.feed(rest)
                rest = b""
            got = door.next()
        assert got is not None
        assert [bytes(frame) for frame in got] == [b"header", body]
    assert door.key == ME.public


def test_bounds_hold_for_what_is_inside() -> None:
    """Frames of a message, and bytes of a frame."""
    knocker = Knocker()
    door = inlet(knocker)
    door.feed(sent(*(knocker.message(b"x", more=True) for _ in range(2))))
    with pytest.raises(WireError, match="at most 2 frames"):
        door.next()
    door = inlet(Knocker())
    door.feed(frame_header(LIMIT + 34, more=False))
    with pytest.raises(WireError, match="the limit is"):
        door.next()
    door = inlet(Knocker())
    door.feed(bytes([1, 40]) + bytes(40))
    with pytest.raises(WireError, match="no frame's flags"):
        door.next()


def test_a_door_that_has_two_keys_answers_to_both() -> None:
    """And says by which one it was known; when the old one is put away, it answers to the new one alone, also where a
    conversation began before."""
    new, came = new_pair(), list[tuple[str, str]]()
    pairs = [new, DOOR]
    lock = AuthPolicy(
        DOOR,
        lambda key: key == ME.public,
        key_pairs=lambda: tuple(pairs),
        on_authenticated=lambda *who: came.append(who),
    )
    for door in (DOOR, new):
        knocker, curve = Knocker(door=door.public), CurveServer(PULL, lock)
        curve.handle(knocker.initiate(curve.handle(knocker.hello()).command))
        assert curve.key == ME.public
    assert came == [(ME.public, DOOR.public), (ME.public, new.public)]
    stranger, curve = Knocker(own=new_pair()), CurveServer(PULL, lock)
    assert curve.handle(stranger.initiate(curve.handle(stranger.hello()).command)).refused
    assert len(came) == 2
    began, curve = Knocker(), CurveServer(PULL, lock)
    welcome = curve.handle(began.hello()).command
    pairs.remove(DOOR)
    curve.handle(began.initiate(welcome))
    with pytest.raises(WireError, match="another server key"):
        CurveServer(PULL, lock).handle(Knocker().hello())
    CurveServer(PULL, lock).handle(Knocker(door=new.public).hello())
