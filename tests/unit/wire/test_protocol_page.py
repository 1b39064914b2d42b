"""docs/reference/protocol.md says what the code does: a client in another language has nothing else to go by."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple, get_args, get_type_hints

import msgpack
import pytest

import swarm.broker
from swarm.auth.invitation import Invitation, decode
from swarm.auth.permissions import _ALLOWED, _CLIENT_REPORTS
from swarm.broker.message_server import MAX_STRIKES
from swarm.broker.requests.completion import RequestSettings
from swarm.broker.requests.tokens import MAX_TOKENS_PER_MESSAGE, WINDOW
from swarm.params import MAX_BIASES, MAX_STOPS
from swarm.wire.codec import CLIENT, SERVER
from swarm.wire.greeting import Greeting, read_greeting
from swarm.wire.messages import (
    ASSET_PART_BYTES,
    MAX_HEADER_BYTES,
    TOO_LATE,
    TOO_SHORT,
    FinishReason,
    Message,
    Query,
)
from swarm.wire.transport import connection, listener, zmtp
from swarm.wire.transport.server_handshake import ROUTER, NullServer, SocketType
from swarm.wire.transport.zmtp import ZmtpDecoder
from tests.unit.wire.protocol_tables import NAMED_TYPES, is_array, kinds, records, table

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "reference" / "protocol.md").read_text()
EXCHANGE = (DOCS.parent / "examples" / "exchange.md").read_text()
PROSE = " ".join(PAGE.split())
DEALER = SocketType(b"DEALER", (b"ROUTER",))


def section(heading: str) -> str:
    """What stands below a heading, up to the next one of its rank or above."""
    rank = len(heading) - len(heading.lstrip("#"))
    _, found, rest = PAGE.partition(f"\n{heading}\n")
    assert found, f"no {heading!r} in docs/reference/protocol.md"
    return re.split(rf"^#{{1,{rank}}} ", rest, maxsplit=1, flags=re.MULTILINE)[0]


def rows(text: str) -> list[list[str]]:
    """The cells of a table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines[2:]]


def named(cell: str) -> str:
    """The name in a cell that begins with it: `name`, [`name`](#name)."""
    found = re.match(r"\[?`([^`]+)`", cell)
    assert found is not None, cell
    return found[1]


# --- messages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "struct"), [*kinds().items(), *records().items()])
def test_every_message_has_its_table(name: str, struct: type[Message]) -> None:
    """Each field with its type, its bounds and its default, in the order of arrays; and nothing else."""
    told = {named(row[0]): (row[1], row[2]) for row in rows(section(f"### {name}"))}
    right = "\n".join(f"|`{field}`|{kind}|{default}||" for field, (kind, default) in table(struct).items())
    assert list(told.items()) == list(table(struct).items()), f"the table of {name} must say:\n{right}"
    assert ("A record." in section(f"### {name}")) == is_array(struct)


def test_the_page_defines_the_named_types() -> None:
    assert all(f"*{name}*: {text}" in PROSE for text, name in NAMED_TYPES.items())


def test_no_message_is_told_that_is_none() -> None:
    """Each stands on its side of the door."""
    sides = {
        "## From clients": {str(struct.__struct_config__.tag) for struct in CLIENT.structs},
        "## From the broker": {str(struct.__struct_config__.tag) for struct in SERVER.structs},
        "## Inside messages": set(records()),
    }
    for heading, names in sides.items():
        assert set(re.findall(r"^### (.+)$", section(heading), re.MULTILINE)) == names


def test_who_may_say_what() -> None:
    """The table of answers names all that clients may say, and goes by roles as the lock does."""
    told = {named(row[0]): row for row in rows(section("## Requests and replies"))}
    assert set(told) == {str(struct.__struct_config__.tag) for struct in CLIENT.structs}
    for column, role in enumerate(("client", "gateway", "worker"), start=2):
        may = {name for name, row in told.items() if row[column] == "yes"}
        assert may == {str(struct.__struct_config__.tag) for struct in _ALLOWED[role]}, role
    answers = set(re.findall(r"`(\w+)`", " ".join(row[1] for row in told.values())))
    assert {str(struct.__struct_config__.tag) for struct in SERVER.structs} - answers == {"broker_key", "rotate_yours"}
    kept = set(get_args(get_type_hints(Query)["what"])) - _CLIENT_REPORTS
    assert re.search(rf"may not ask for {' and '.join(f'`{what}`' for what in sorted(kept, reverse=True))}", PROSE)


def test_the_greeting() -> None:
    """Its fields, and how long it may be."""
    told = {named(row[0]) for row in rows(section("## Greeting"))}
    assert told == {"kind", *Greeting.__struct_fields__}


# --- refusals, ends, numbers ------------------------------------------------------------------------------------------


@cache
def calls() -> tuple[ast.Call, ...]:
    """All calls by a plain name in the broker's code."""
    folder = Path(swarm.broker.__file__).parent
    trees = (ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py")))
    return tuple(
        node
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    )


def constants(function: str, keyword: str, place: int | None = None) -> Iterator[str]:
    for call in calls():
        if isinstance(call.func, ast.Name) and call.func.id == function:
            given = [each.value for each in call.keywords if each.arg == keyword]
            given += call.args[place : place + 1] if place is not None and len(call.args) > place + 1 else []
            yield from (str(each.value) for each in given if isinstance(each, ast.Constant))


@pytest.mark.slow
def test_every_code() -> None:
    """The codes of all refusals in the broker's code, and no others; all reasons of ends; the two that have words."""
    text = section("## Errors and finish reasons")
    codes = {*constants("RequestRefusal", "code", 0), *constants("Rejected", "code")}
    told = {named(row[0]) for row in rows(text.partition("`finished` has")[0])}
    assert told == codes
    assert {"overloaded", "superseded", "forbidden"} <= codes
    reasons = {named(row[0]) for row in rows(text.partition("`finished` has")[2].partition("`malformed`")[0])}
    assert reasons == set(get_args(FinishReason))
    assert TOO_LATE in text
    assert TOO_SHORT in text


@pytest.mark.slow
def test_every_report() -> None:
    """By which name each question's report goes."""
    told = set(re.findall(r"`report` `(\w+)`", section("## Requests and replies")))
    assert set(constants("Report", "what")) - {"keys"} <= told


def test_numbers() -> None:
    """As the code has them."""
    told = {named(row[0]): int(row[1].replace(",", "")) for row in rows(section("## Limits"))}
    usual = RequestSettings()
    assert told == {
        "header_bytes": MAX_HEADER_BYTES,
        "asset_bytes": ASSET_PART_BYTES,
        "frames": zmtp.MAX_FRAMES,
        "window": WINDOW,
        "tokens_per_message": MAX_TOKENS_PER_MESSAGE,
        "handshake_s": listener.HANDSHAKE_S,
        "message_s": connection.MESSAGE_S,
        "queued_messages": connection._MAX_QUEUED,
        "queued_bytes": connection._MAX_QUEUED_BYTES,
        "strikes": MAX_STRIKES,
        "client_grace_s": usual.client_grace_s,
        "retain_s": usual.retain_s,
        "stops": MAX_STOPS,
        "biases": MAX_BIASES,
    }
    assert f"sends {WINDOW} unacknowledged" in PROSE
    assert f"for {usual.client_grace_s:g} seconds without a reader" in PROSE
    assert f"for {usual.retain_s:g} seconds (`broker.retain_s`)" in PROSE
    assert f"After {MAX_STRIKES} such messages" in PROSE


# --- the exchange -----------------------------------------------------------------------------------------------------


class Part(NamedTuple):
    """What one end sent, and what the page says that it says (None of the handshake)."""

    sender: str
    data: bytes
    says: object | None


def parts() -> list[Part]:
    found = re.finditer(r"```hexdump (client|broker)\n(.*?)```(?:\n\n```json\n(.*?)```)?", EXCHANGE, re.DOTALL)
    return [Part(each[1], dumped(each[2]), json.loads(each[3]) if each[3] else None) for each in found]


def dumped(text: str) -> bytes:
    """The bytes of a dump, whose columns must agree."""
    data = b""
    for line in text.splitlines():
        place, content, shown = line[:4], bytes.fromhex(line[6:53]), line[55:]
        assert int(place, 16) == len(data)
        assert shown == "".join(chr(byte) if 32 <= byte < 127 else "." for byte in content)
        data += content
    return data


@pytest.mark.parametrize(("sender", "kind"), [("client", ROUTER), ("broker", DEALER)])
def test_the_dump_is_what_goes_over_the_wire(sender: str, kind: SocketType) -> None:
    """Our end of the wire gets through the handshake with these bytes, and finds in them the messages that stand beside
    them: read by the reference msgpack, and taken by the door."""
    inlet, frames = ZmtpDecoder(MAX_HEADER_BYTES, NullServer(kind)), []
    for part in parts():
        if part.sender == sender:
            inlet.feed(part.data)
            frames += [message] if (message := inlet.next()) is not None else []
    said = [part.says for part in parts() if part.sender == sender and part.says is not None]
    assert [msgpack.unpackb(header) for (header,) in frames] == said
    assert inlet.is_empty
    greeting, *messages = frames
    assert read_greeting(greeting) is not None
    for message in messages:
        (CLIENT if sender == "client" else SERVER).decode(message)


def test_the_exchange_is_a_whole_one() -> None:
    """Both greet before anything else; the request is taken, its tokens come in order, and its end is acknowledged."""
    said = [(part.sender, part.says) for part in parts() if isinstance(part.says, dict)]
    assert [(sender, each["kind"]) for sender, each in said] == [
        ("client", "greet"),
        ("broker", "greet"),
        ("client", "submit"),
        ("broker", "accepted"),
        ("broker", "tokens"),
        ("broker", "tokens"),
        ("broker", "finished"),
        ("client", "ack"),
    ]
    assert [part.sender for part in parts() if part.says is None] == ["client", "broker"] * 2
    assert len({each.get("request_id") for _, each in said[2:]}) == 1
    assert [each["start"] for _, each in said if each["kind"] == "tokens"] == [0, 1]
    assert said[-1][1]["next_index"] == said[-2][1]["num_tokens"] == 2


def test_links_lead_somewhere() -> None:
    """To a heading of the page, or to a file."""
    headings = re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
    places = {re.sub(r"[^a-z0-9_ -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for link in re.findall(r"\]\(([^)]+)\)", PAGE):
        file, _, place = link.partition("#")
        assert not file or (DOCS / "reference" / file).exists(), link
        assert file or place in places, link


def test_an_invitation_is_made_as_told() -> None:
    """With what every language has: msgpack, base64 and BLAKE2b."""
    addresses, broker, secret = ["tcp://192.0.2.1:5700"], bytes(range(32)), bytes(range(32, 64))
    packed = msgpack.packb([addresses, broker, secret, "client"])
    checked = packed + hashlib.blake2b(b"swarm1:" + packed, digest_size=4).digest()
    line = "swarm1:" + base64.urlsafe_b64encode(checked).decode().rstrip("=")
    assert decode(line) == Invitation(tuple(addresses), broker.hex(), secret.hex(), "client")
