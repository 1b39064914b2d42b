"""What is fuzzed: every parser that a peer's bytes reach, with what must hold whatever they are.

A target gets bytes. It raises nothing if all is well: what its parser documents (WireError, ConfigError) is caught by
name, anything else is a finding, and so is a broken promise (``assert``).
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from nacl.bindings import crypto_box, crypto_box_easy_afternm, crypto_box_open

from swarm.auth import invitation, memberships
from swarm.auth.permissions import deny_reason
from swarm.auth.registry_file import RegistryFile
from swarm.errors import ConfigError, WireError
from swarm.wire import addresses, codec, tensors
from swarm.wire.codec import MessageCodec
from swarm.wire.greeting import incompatibility, read_greeting
from swarm.wire.messages import TensorSpec
from swarm.wire.transport import keys
from swarm.wire.transport.curve import CurveServer
from swarm.wire.transport.relay.rendezvous import PREAMBLE_BYTES, decode_preamble, encode_preamble
from swarm.wire.transport.server_handshake import (
    PULL,
    ROUTER,
    Mechanism,
    NullServer,
    PlainServer,
    encode_command,
    parse_metadata,
)
from swarm.wire.transport.zmtp import ZmtpDecoder, command_frame, encode_greeting, frame_header
from tests.unit.wire.test_curve import DOOR, ME, Knocker, mechanism

LIMIT: Final = 1 << 18  # above the first room that a stranger gets
WORD: Final = b"0123456789abcdef0123456789abcdef"
_FIRST_ROOM: Final = 64 << 10
_PIECES: Final = 16


# Told where a parser in C got to: what it complains about, and where. Without that, coverage would guide nowhere there.
got_to: list[Callable[[str], object]] = []


class Target(NamedTuple):
    """``has_header``: the input has a msgpack header in it, at which a mutator may aim (``split``). ``weight``: its
    share of the time."""

    name: str
    run: Callable[[bytes], object]
    has_header: bool = False
    has_parser_in_c: bool = False
    weight: int = 1


class Heard(NamedTuple):
    """What became of a connection's bytes."""

    messages: list[list[bytes]]
    refused: str
    identity: bytes | None
    answer: bytes


# --- frames -----------------------------------------------------------------------------------------------------------


def hear(inlet: ZmtpDecoder, pieces: Sequence[bytes]) -> Heard:
    """Feed an inlet as a connection does, and take what it hands out."""
    messages: list[list[bytes]] = []
    fed, refused = 0, ""
    try:
        for piece in pieces:
            _feed(inlet, piece, messages)
            fed += len(piece)
            held = inlet.num_held
            assert held <= fed + (LIMIT + 64 if inlet.is_authenticated else 2 * _FIRST_ROOM), f"{held} bytes held"
    except WireError as error:
        refused = str(error)
        assert 0 < len(refused) < 5000
    return Heard(messages, refused, inlet.identity, inlet.answer)


def _feed(inlet: ZmtpDecoder, piece: bytes, messages: list[list[bytes]]) -> None:
    while piece:
        room = inlet.recv_buffer()
        if room is None:
            inlet.feed(bytearray(piece))
            piece = b""
        else:
            count = min(len(room), len(piece))
            room[:count] = piece[:count]
            inlet.commit(count)
            piece = piece[count:]
        while (message := inlet.next()) is not None:
            assert 1 <= len(message) <= 2
            assert all(len(frame) <= LIMIT for frame in message)
            messages.append([bytes(frame) for frame in message])
        inlet.copy_unread()


def cut(data: bytes, how: int) -> list[bytes]:
    """In pieces, as a network might bring them."""
    size = max(1, len(data) // _PIECES, how % 97)
    return [data[at : at + size] for at in range(0, len(data), size)]


def frames(make: Callable[[], Mechanism], data: bytes) -> None:
    """However the bytes are cut, the same is heard."""
    how, data = data[:1], data[1:]
    whole = hear(ZmtpDecoder(LIMIT, make()), [data])
    assert hear(ZmtpDecoder(LIMIT, make()), cut(data, how[0] if how else 1)) == whole


def curve_handshake(data: bytes) -> None:
    """Nobody gets in by what was changed on its way, or by what is not vouched for."""
    op, data = data[:1], data[1:]
    curve, knocker = mechanism(), Knocker()
    with contextlib.suppress(WireError):
        match op[0] % 4 if op else 0:
            case 0:
                inlet = ZmtpDecoder(LIMIT, curve)
                hear(inlet, [encode_greeting(b"CURVE", is_server=False) + data])
            case 1:
                hello = knocker.hello()
                curve.handle(changed := _changed(hello, data))
                assert changed[80:] == hello[80:] or not data
                return
            case 2:
                initiate = knocker.initiate(curve.handle(knocker.hello()).command)
                curve.handle(changed := _changed(initiate, data))
                assert changed[113:] == initiate[113:]
                return
            case _:
                curve.handle(_initiate(knocker, curve.handle(knocker.hello()).command, data))
    assert curve.metadata is None
    assert not curve.key


def _changed(command: bytes, how: bytes) -> bytes:
    """With some bytes changed: place, difference, place, difference …; an odd one at the end cuts it there."""
    out = bytearray(command)
    for place, difference in zip(how[::2], how[1::2], strict=False):
        out[place * len(out) // 256] ^= difference
    return bytes(out[: how[-1]] if len(how) % 2 else out)


def _initiate(knocker: Knocker, welcome: bytes, said: bytes) -> bytes:
    """With a box that opens, and anything in it."""
    plain = crypto_box_open(welcome[24:], b"WELCOME-" + welcome[8:24], knocker.door, knocker.secret)
    number = (2).to_bytes(8, "big")
    box = crypto_box(said, b"CurveZMQINITIATE" + number, plain[:32], knocker.secret)
    return encode_command(b"INITIATE", plain[32:] + number + box)


def curve(data: bytes) -> None:
    """After the handshake: what was sealed is heard once, in order; with what else came, the conversation ends."""
    says, data = data[1 : 1 + data[0]] if data else b"", data[1 + data[0] :] if data else b""
    mechanism = CurveServer(PULL, keys.AuthPolicy(DOOR, lambda key: key == ME.public))
    inlet, knocker = ZmtpDecoder(LIMIT, mechanism), Knocker(says=says)
    hello = encode_greeting(b"CURVE", is_server=False) + command_frame(knocker.hello())
    assert not hear(inlet, [hello]).refused
    _, _, answer = inlet.answer.partition(b"\x07WELCOME")
    initiate = knocker.initiate(b"\x07WELCOME" + answer)
    if hear(inlet, [bytes([6]) + len(initiate).to_bytes(8, "big") + initiate]).refused:
        assert inlet.identity is None
        return
    out, sealed = _spoken(knocker, data)
    heard = [frame for message in hear(inlet, cut(out, len(says))).messages for frame in message]
    assert heard == sealed[: len(heard)]


def _spoken(knocker: Knocker, data: bytes) -> tuple[bytes, list[bytes]]:
    """Bytes on the wire by a recipe: kind, length, content, and again. And what was sealed among them."""
    out, sealed, last = b"", [], b""
    while len(data) > 2:
        kind, size = data[0], int.from_bytes(data[1:3], "big") % 4096
        content, data = data[3 : 3 + size], data[3 + size :]
        match kind % 8:
            case 0:
                out += content
                continue
            case 1:
                body = last
            case 2:
                body = encode_command(b"MESSAGE", content)
            case _:
                number = knocker._next()
                box = crypto_box_easy_afternm(content, b"CurveZMQMESSAGEC" + number, knocker.precomputed)
                body = last = encode_command(b"MESSAGE", number + box)
                sealed.append(content[1:])
        out += frame_header(len(body), more=False) + body
    return out, sealed


def metadata(data: bytes) -> None:
    with contextlib.suppress(WireError):
        for kind in (PULL, ROUTER):
            found = parse_metadata(data, kind)
            assert found[b"socket-type"] in kind.peers
            assert sum(map(len, found.values())) <= len(data)


# --- messages ---------------------------------------------------------------------------------------------------------

RAW, PAYLOAD = 1, 2


def split(data: bytes) -> tuple[int, bytes, bytes]:
    """Flags, header and payload in an input."""
    size = int.from_bytes(data[1:3], "big")
    return (data[0] if data else 0), data[3 : 3 + size], data[3 + size :]


def joined(flags: int, header: bytes, payload: bytes = b"") -> bytes:
    return bytes([flags]) + len(header).to_bytes(2, "big") + header + payload


def messages(door: MessageCodec[Any], data: bytes) -> None:
    """A message that is understood is one that the same door would say in the same way, and describes what came."""
    flags, header, payload = split(data)
    first = header if flags & RAW else door.add_checksum(header)
    came = [first, payload] if flags & PAYLOAD else [first]
    try:
        message, described = door.decode(came)
    except WireError as error:
        _got_to(str(error))
        return
    _got_to(type(message).__name__)
    again, _ = door.decode(door.encode(message, described))
    assert msgspec.msgpack.encode(again) == msgspec.msgpack.encode(message)
    spec = getattr(message, "tensor", None)
    if isinstance(spec, TensorSpec) and described is not None:
        assert tensors.unpack(spec, described).shape == spec.shape
    if door is codec.CLIENT:
        assert all(
            isinstance(deny_reason(role, message), str) for role in (None, "invited", "client", "worker", "admin")
        )
    read_greeting(came)


def _got_to(place: str) -> None:
    assert 0 < len(place) < 5000, "an error has words, and not all that came in them"
    for tell in got_to:
        tell(re.sub(r"\d+|'[^']*'|\"[^\"]*\"|`[^`]*`", "", place)[:80])


def greets(data: bytes) -> None:
    found = read_greeting([data])
    if found is not None:
        assert str(found)
        incompatibility(found, "0" * 16)


# --- texts and files --------------------------------------------------------------------------------------------------


def invitations(data: bytes) -> None:
    """In characters, and with a checksum that fits."""
    for line in (data.decode(errors="replace"), _line(data)):
        try:
            found = invitation.decode(line)
        except ConfigError as error:
            _got_to(str(error))
            continue
        assert invitation.decode(invitation.encode(found)) == found
        assert all(addresses.host_of(address) for address in found.addresses)


def _line(packed: bytes) -> str:
    encoded = invitation.base64.urlsafe_b64encode(packed + invitation._checksum(packed))
    return invitation.PREFIX + encoded.decode().rstrip("=")


class _Files:
    """A place for the files that are read."""

    def __init__(self) -> None:
        self.folder = Path(
            tempfile.mkdtemp(prefix="swarm-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
        )
        (self.folder / "joined").mkdir(mode=0o700)

    def write(self, name: str, data: bytes) -> Path:
        path = self.folder / name
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        return path


_files: list[_Files] = []


def _place() -> _Files:
    if not _files:
        _files.append(_Files())
    return _files[0]


def roll(data: bytes) -> None:
    """What is in the broker's file decides who comes in: it is a roll, or an error."""
    path = _place().write("roll.json", data)
    try:
        found = RegistryFile(path).registry
    except ConfigError as error:
        _got_to(str(error).replace(str(path), ""))
        return
    for member in found.members:
        assert found.role_of(member.key, 0.0) is not None
    assert msgspec.json.encode(found.report(0.0))


def joined_swarms(data: bytes) -> None:
    path = _place().write("joined/a.json", data)
    try:
        (found,) = memberships.read_all(_place().folder)
    except ConfigError as error:
        _got_to(str(error).replace(str(path), ""))
        return
    assert found.endpoint


def endpoints(data: bytes) -> None:
    """What a peer calls its address."""
    text = data.decode(errors="ignore")
    address, key = keys.address_and_key(text)
    keys.public_key_in(key)
    assert isinstance(keys.with_host(text, "::1"), str)
    if invitation.is_address(text) or keys.is_address(text):
        assert 0 < addresses.port_of(text) < 1 << 16
        assert addresses.host_of(text) in address
        assert not set(key) - set(b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
    with contextlib.suppress(ConfigError):
        addresses.host_of(text)


def tickets(data: bytes) -> None:
    """What is read is what is written so, and nothing longer is waited for."""
    for length in range(1, len(data) + 1):
        assert length <= PREAMBLE_BYTES + 1
        try:
            asked = decode_preamble(data[:length])
        except WireError:
            return
        assert asked is None or encode_preamble(*asked) == data[:length]


TARGETS: Final = {
    target.name: target
    for target in (
        Target("null", partial(frames, lambda: NullServer(ROUTER)), weight=4),
        Target("plain", partial(frames, lambda: PlainServer(PULL, WORD)), weight=3),
        Target("curve-handshake", curve_handshake, weight=3),
        Target("curve", curve, weight=4),
        Target("metadata", metadata),
        *(
            Target(door.name, partial(messages, door), has_header=True, has_parser_in_c=True, weight=4)
            for door in (codec.CLIENT, codec.SERVER, codec.WORKER, codec.ORDER, codec.HEARTBEAT, codec.DATA)
        ),
        Target("greeting", greets),
        Target("invitation", invitations, has_parser_in_c=True),
        Target("roll", roll, has_parser_in_c=True, weight=2),
        Target("joined", joined_swarms, has_parser_in_c=True),
        Target("address", endpoints),
        Target("ticket", tickets),
    )
}
