"""What fuzzing begins with: for each target, inputs as real peers send them; and how a header in one is changed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from hypothesis import HealthCheck, Phase, given, settings

from swarm.auth import invitation
from swarm.auth.memberships import JoinedSwarm
from swarm.auth.registry import Member, OpenInvitation
from swarm.auth.registry_file import _StoredRegistry
from swarm.wire.codec import MessageCodec
from swarm.wire.greeting import encode_greeting as greeting_of
from swarm.wire.transport.keys import new_pair, with_key
from swarm.wire.transport.relay.rendezvous import Side, encode_preamble
from swarm.wire.transport.server_handshake import USERNAME, encode_command, encode_metadata
from swarm.wire.transport.zmtp import command_frame, encode_greeting, frame_header
from tests.unit.fuzz.targets import PAYLOAD, TARGETS, WORD, joined, split
from tests.unit.wire.any_message import DOORS, messages_of
from tests.unit.wire.test_curve import DOOR, ME

OTHER: Final = new_pair()
_OF_EACH_KIND: Final = 4
_DEPTH: Final = 6
_ODD: Final = (0, 1, -1, 255, 256, 1 << 31, (1 << 63) - 1, 1 << 63, -(1 << 63), 0.0, -1.0, 1e300, float("nan"))
_ODDER: Final = (None, True, "", "x" * 300, b"", b"\0" * 40, [], {}, [0] * 40, float("inf"), "\0", "é")


def seeds(name: str) -> list[bytes]:
    """Inputs to begin with, the same in each life."""
    door = next((door for door in DOORS if door.name == name), None)
    return list(_of_door(door)) if door is not None else list(_SEEDS[name]())


def _of_door(door: MessageCodec[Any]) -> Iterator[bytes]:
    for struct in door.structs:
        for message, payload in _examples(struct):
            header = msgspec.msgpack.encode(message)
            yield joined(0 if payload is None else PAYLOAD, header, payload or b"")


def _examples(struct: Any) -> list[Any]:
    found: list[Any] = []

    @settings(
        max_examples=_OF_EACH_KIND,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(messages_of(struct))
    def collect(made: Any) -> None:
        found.append(made)

    collect()
    return found


def _conversation(mechanism: bytes, *commands: bytes) -> Iterator[bytes]:
    said = b"\x07" + encode_greeting(mechanism, is_server=False) + b"".join(map(command_frame, commands))
    yield said
    yield said + frame_header(5, more=False) + b"hello"
    yield said + frame_header(5, more=True) + b"hello" + frame_header(300, more=False) + bytes(300)
    yield said + frame_header(1 << 17, more=False) + bytes(40)
    yield said + (frame_header(1, more=True) + b"x") * 4


def _null() -> Iterator[bytes]:
    return _conversation(b"NULL", encode_command(b"READY", encode_metadata(Socket_Type=b"DEALER", Identity=b"me")))


def _plain() -> Iterator[bytes]:
    hello = bytes([len(USERNAME)]) + USERNAME + bytes([len(WORD)]) + WORD
    return _conversation(
        b"PLAIN", encode_command(b"HELLO", hello), encode_command(b"INITIATE", encode_metadata(Socket_Type=b"PUSH"))
    )


def _curve_handshake() -> Iterator[bytes]:
    yield from (b"\x00", b"\x01", b"\x01\x10\x01", b"\x02", b"\x02\x20\x01\x30", b"\x03" + bytes(64))
    yield b"\x00" + command_frame(encode_command(b"HELLO", b"\x01\x00" + bytes(192)))
    yield b"\x03" + bytes.fromhex(ME.public) + bytes(96) + encode_metadata(Socket_Type=b"PUSH", Identity=b"me")


def _curve() -> Iterator[bytes]:
    says = encode_metadata(Resource=b"x")
    first = bytes([len(says)]) + says
    for recipe in (
        ((4, b"\x00hello"),),
        ((4, b"\x01hello"), (4, b"\x00" + bytes(300))),
        ((4, b"\x00a"), (1, b""), (4, b"\x00b")),
        ((2, bytes(24)),),
        ((0, b"\x02" + (1 << 17).to_bytes(8, "big")), (4, b"\x02")),
    ):
        yield first + b"".join(bytes([kind]) + len(content).to_bytes(2, "big") + content for kind, content in recipe)


def _metadata() -> Iterator[bytes]:
    yield encode_metadata(Socket_Type=b"PUSH", Identity=b"me")
    yield encode_metadata(Socket_Type=b"DEALER", Identity=b"x" * 255, Resource=b"")


def _greeting() -> Iterator[bytes]:
    (frame,) = greeting_of("0123456789abcdef")
    yield bytes(frame)


def _invitation() -> Iterator[bytes]:
    for address in ("tcp://192.0.2.1:5700", "tcp://[2001:db8::1]:5700", "tcp://host.example:1"):
        line = invitation.encode(invitation.Invitation((address,), DOOR.public, ME.secret, "worker"))
        yield line.encode()
        yield invitation._unpack(line.removeprefix(invitation.PREFIX))


def _roll() -> Iterator[bytes]:
    yield b'{"version": 2}'
    members = (Member("far", "worker", ME.public, 1.0, "", OTHER.public), Member("me", "admin", DOOR.public, 2.0))
    yield msgspec.json.encode(
        _StoredRegistry(1, members[1:], (OpenInvitation(OTHER.public, "client", 2, 9e9, 1.0, "you"),))
    )
    yield msgspec.json.encode(_StoredRegistry(1, members, ()))


def _joined() -> Iterator[bytes]:
    known = JoinedSwarm("far", "worker", DOOR.public, ("tcp://192.0.2.1:5700",), ME.secret, OTHER.public, 1.0)
    yield msgspec.json.encode(known)
    yield msgspec.json.encode(msgspec.structs.replace(known, version=2))


def _address() -> Iterator[bytes]:
    for host in ("192.0.2.1", "[2001:db8::1]", "*", "host.example"):
        for key in (b"", WORD, DOOR.public.encode()):
            yield with_key(f"tcp://{host}:5700", key).encode()


def _ticket() -> Iterator[bytes]:
    for side in Side:
        yield encode_preamble(side, WORD.decode())


_SEEDS: Final = {
    "null": _null,
    "plain": _plain,
    "curve-handshake": _curve_handshake,
    "curve": _curve,
    "metadata": _metadata,
    "greeting": _greeting,
    "invitation": _invitation,
    "roll": _roll,
    "joined": _joined,
    "address": _address,
    "ticket": _ticket,
    "planted": lambda: iter((bytes(6),)),
}
assert set(_SEEDS) - {"planted"} | {door.name for door in DOORS} == set(TARGETS)


# --- changing a header where it has its fields ------------------------------------------------------------------------


def with_other_fields(data: bytes, chance: random.Random) -> bytes:
    """The input with some values of its header replaced, moved, doubled or left out; as it was if it has none."""
    flags, header, payload = split(data)
    try:
        fields = msgspec.msgpack.decode(header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return data
    for _ in range(chance.choice((1, 1, 2, 4))):
        fields = _changed(fields, chance, _DEPTH)
    try:
        return joined(flags, msgspec.msgpack.encode(fields)[:65535], payload)
    except (OverflowError, TypeError, ValueError):
        return data


def _changed(value: Any, chance: random.Random, depth: int) -> Any:
    if isinstance(value, dict) and value and depth and chance.random() < 0.9:
        return _other_fields(value, chance, depth)
    if isinstance(value, list) and value and depth and chance.random() < 0.8:
        return _other_items(value, chance, depth)
    if isinstance(value, int) and chance.random() < 0.6:
        return max(-(1 << 63), min(value + chance.choice((-1, 1, 7, 256, -256, value)), (1 << 64) - 1))
    if isinstance(value, str) and value and chance.random() < 0.6:
        place = chance.randrange(len(value))
        return value[:place] + chance.choice(("", "\0", "é", "9", value)) + value[place + 1 :]
    return chance.choice((*_ODD, *_ODDER))


def _other_fields(fields: dict[Any, Any], chance: random.Random, depth: int) -> dict[Any, Any]:
    name = chance.choice(list(fields))
    match chance.randrange(12):
        case 0:
            return {each: value for each, value in fields.items() if each != name}
        case 1:
            return fields | {chance.choice(("new", *map(str, fields))): fields[name]}
    return fields | {name: _changed(fields[name], chance, depth - 1)}


def _other_items(items: list[Any], chance: random.Random, depth: int) -> list[Any]:
    place = chance.randrange(len(items))
    match chance.randrange(8):
        case 0:
            return items[:place] + items[place + 1 :]
        case 1:
            return [*items, items[place]]
    return [*items[:place], _changed(items[place], chance, depth - 1), *items[place + 1 :]]
