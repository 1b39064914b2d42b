"""The model's files on their way from workers to the broker, and on to clients."""

from __future__ import annotations

import msgspec
import pytest
import xxhash

from swarm.broker.actions import Action, SendToClient
from swarm.broker.events import AssetPartArrived
from swarm.broker.members.assets import REASSIGN_S
from swarm.testing import fake_manifest
from swarm.wire.messages import ASSET_PART_BYTES, MAX_ASSET_BYTES, Asset, AssetPart, GetAsset, Manifest, Welcome
from tests.unit.broker.bench import Bench, orders


def file(name: str, data: bytes) -> Asset:
    return Asset(name, len(data), xxhash.xxh3_128_hexdigest(data))


TOKENIZER, CHAT = b"tokens", b"template"


def with_files(*assets: Asset) -> Manifest:
    return msgspec.structs.replace(fake_manifest(), assets=assets)


WITH_FILES = with_files(file("tokenizer.json", TOKENIZER), file("chat.jinja", CHAT))


def part(peer: str, name: str, data: bytes, offset: int = 0, total: int | None = None) -> AssetPartArrived:
    return AssetPartArrived(peer.encode(), name, offset, len(data) if total is None else total, data)


def asked(actions: list[Action]) -> list[tuple[str, tuple[str, ...]]]:
    """Who was asked for what."""
    return [(peer, o.wants) for peer, o in orders(actions, Welcome) if isinstance(o, Welcome) and o.wants]


@pytest.fixture
def two(bench: Bench) -> Bench:
    """Two workers; the first was asked for both files."""
    bench.join("w0", "w1", manifest=WITH_FILES)
    bench.tick()
    assert asked(bench.log) == [("w0.1", ("tokenizer.json", "chat.jinja"))]
    bench.take()
    return bench


def test_a_file_comes_in_parts_and_is_served_in_parts(bench: Bench) -> None:
    """No part is larger than the wire allows, in either direction."""
    data = bytes(range(256)) * (ASSET_PART_BYTES // 256) + b"more"
    bench.join("w0", manifest=with_files(file("tokenizer.json", data)))
    first, rest = data[:ASSET_PART_BYTES], data[ASSET_PART_BYTES:]
    bench.feed(part("w0.1", "tokenizer.json", first, 0, len(data)))
    assert not bench.state.assets
    bench.feed(part("w0.1", "tokenizer.json", rest, len(first), len(data)))
    answers = [bench.say(GetAsset(name="tokenizer.json", offset=offset)) for offset in (0, ASSET_PART_BYTES)]
    for (action,), expected in zip(answers, (first, rest), strict=True):
        assert isinstance(action, SendToClient)
        assert isinstance(action.message, AssetPart)
        assert (action.message.total, action.payload) == (len(data), expected)


def test_only_what_was_asked_for_and_only_from_who_was_asked(two: Bench) -> None:
    """A stranger's file, one that nobody named, and one from a member that was not asked: counted, and nothing of them
    is kept, however much comes."""
    for one in (
        part("who", "tokenizer.json", TOKENIZER),
        part("w0.1", "passwords", b"abc"),
        part("w1.1", "tokenizer.json", TOKENIZER),
        part("w1.1", "tokenizer.json", bytes(ASSET_PART_BYTES), 0, MAX_ASSET_BYTES),
    ):
        assert two.feed(one) == []
    assert two.state.counters["unasked_asset_parts"] == 4
    assert not two.state.assets
    assert sum(len(u.data) for u in two.core.state.uploads.values()) == 0


def test_parts_count_in_order(two: Bench) -> None:
    """A part that is missing before it, or that makes the file another size, spoils the upload; it may begin again."""
    size = len(TOKENIZER)
    two.feed(part("w0.1", "tokenizer.json", TOKENIZER[:2], 0, size))
    two.feed(part("w0.1", "tokenizer.json", TOKENIZER[3:], 3, size))
    two.feed(part("w0.1", "tokenizer.json", TOKENIZER, 0, size + 1))
    two.feed(part("w0.1", "tokenizer.json", TOKENIZER + b"x", 0, size))
    assert two.state.counters["wrong_asset_parts"] == 3
    two.feed(part("w0.1", "tokenizer.json", TOKENIZER[:2], 0, size))
    two.feed(part("w0.1", "tokenizer.json", TOKENIZER[:4], 0, size))  # begun again, with a part of another size
    two.feed(part("w0.1", "tokenizer.json", TOKENIZER[4:], 4, size))
    assert two.state.assets == {"tokenizer.json": TOKENIZER}


def test_if_the_one_that_was_asked_is_lost_another_one_is(two: Bench) -> None:
    """What has come of the file so far is dropped, and what is there already is not asked for again."""
    two.feed(part("w0.1", "chat.jinja", CHAT))
    two.feed(part("w0.1", "tokenizer.json", TOKENIZER[:2], 0, len(TOKENIZER)))
    two.lose("w0")
    two.take()
    two.tick()
    assert asked(two.take()) == [("w1.1", ("tokenizer.json",))]
    two.feed(part("w1.1", "tokenizer.json", TOKENIZER))
    assert two.state.assets == {"tokenizer.json": TOKENIZER, "chat.jinja": CHAT}
    two.tick(2 * REASSIGN_S)
    assert asked(two.take()) == []


def test_if_nobody_is_left_the_next_that_joins_is_asked(two: Bench) -> None:
    """Until then there is nobody to ask."""
    two.lose("w0")
    two.lose("w1")
    two.tick(1.0)
    two.take()
    two.join("w2", manifest=WITH_FILES)
    two.tick()
    assert asked(two.take()) == [("w2.1", ("tokenizer.json", "chat.jinja"))]


def test_a_wrong_file_is_not_kept_and_another_worker_is_asked(two: Bench) -> None:
    """Its bytes are not those that the manifest names; after a while the next one is asked, then the first again."""
    two.feed(part("w0.1", "tokenizer.json", b"wrong!"))
    two.feed(part("w0.1", "chat.jinja", CHAT))
    assert two.state.counters["wrong_assets"] == 1
    two.tick(REASSIGN_S - 0.5)
    assert asked(two.take()) == []
    two.tick(1.0)
    assert asked(two.take()) == [("w1.1", ("tokenizer.json",))]
    two.tick(REASSIGN_S + 0.5)
    assert asked(two.take()) == [("w0.1", ("tokenizer.json",))]


def test_a_file_that_is_too_large_is_not_asked_for(bench: Bench) -> None:
    """The broker keeps these files in memory: there is a limit."""
    bench.join("w0", manifest=with_files(Asset("huge", MAX_ASSET_BYTES + 1, "x")))
    bench.tick()
    assert asked(bench.log) == []


def test_an_empty_file_is_a_file(bench: Bench) -> None:
    """It comes as one empty part."""
    bench.join("w0", manifest=with_files(file("empty", b"")))
    bench.feed(part("w0.1", "empty", b""))
    assert bench.state.assets == {"empty": b""}
