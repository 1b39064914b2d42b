#!/usr/bin/env python3
"""Compare what the contestants of bench_decode.py compute: the share of greedy tokens that are transformers' own.

Rounding differs, and after one different token all later ones do: float32 weights show mistakes best. Without --model,
a tiny model of such weights is written for the occasion, so widely spread that it matters who attends to what.
llama.cpp keeps keys and values in float32 here, instead of its default of 16 bit.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

from bench_contestants import TRANSFORMERS, Peers, add_peer_options, peers_of
from bench_lib import TOOLS, Row, random_prompt, run, tell, vocabulary_of
from bench_swarm import Swarm

TIMEOUT_S = 600.0
LENGTHS = (8, 11, 13, 16)
SPREAD = "0.25"


async def agree(peers: Peers, stages: int, new: int) -> tuple[list[Row], dict[str, object]]:
    facts = peers.versions()
    prompts = [random_prompt(length, vocabulary_of(peers.model)) for length in LENGTHS]
    said: dict[str, list[list[int]]] = {}
    async with AsyncExitStack() as stack:
        swarm = await stack.enter_async_context(Swarm(peers.model, stages))
        for name in dict.fromkeys((TRANSFORMERS, *peers.names)):
            peer = await stack.enter_async_context(peers.start(name, wide=True))
            said[name] = await peer.tokens(prompts, new)
        done = await swarm.client.generate_batch(prompts, max_tokens=new, ignore_eos=True, timeout=TIMEOUT_S)
    said["swarm"] = [list(result.tokens) for result in done]
    theirs = said.pop(TRANSFORMERS)
    facts["tokens"] = f"{len(prompts)} × {new}, {len({token for row in theirs for token in row})} different ones"
    return [
        Row("tokens that are transformers' too", "%", {name: [share(mine, theirs)] for name, mine in said.items()}),
        Row("before the first that is not", "%", {name: [share_before(mine, theirs)] for name, mine in said.items()}),
    ], facts


def matches(mine: list[list[int]], theirs: list[list[int]]) -> list[list[bool]]:
    pairs = zip(mine, theirs, strict=True)
    return [[one == other for one, other in zip(ours, others, strict=True)] for ours, others in pairs]


def share(mine: list[list[int]], theirs: list[list[int]]) -> float:
    found = matches(mine, theirs)
    return 100 * sum(map(sum, found)) / sum(map(len, found))


def share_before(mine: list[list[int]], theirs: list[list[int]]) -> float:
    found = matches(mine, theirs)
    return 100 * sum([*row, False].index(False) for row in found) / sum(map(len, found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model's folder")
    add_peer_options(parser)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=64, help="per sequence")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="swarm-bench-") as scratch:
        model = arguments.model or small_model(Path(scratch) / "small")
        rows, facts = run(agree(peers_of(arguments, model), arguments.stages, arguments.new_tokens))
    tell(rows, "agree", {"model": arguments.model or "tiny, float32", **facts}, as_json=arguments.json)


def small_model(folder: Path) -> Path:
    command = [
        sys.executable,
        str(TOOLS / "bench_model.py"),
        str(folder),
        "--shape",
        "tiny",
        "--float32",
        "--spread",
        SPREAD,
    ]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    return folder


if __name__ == "__main__":
    main()
