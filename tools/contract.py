#!/usr/bin/env python3
"""Compare a hundred thousand answers in a crowd with the same requests alone, to the last bit of their logprobs.

A broker and workers (real processes) with a small model of random weights and little room for keys and values. First
every distinct request is asked alone, one after the other. Then they are asked at random, many concurrently, while the
crowd around them changes all the time: prompts begin alike (prefix hits), come in chunks, sequences give way for want
of room, and every now and then a worker is killed and another one started, so that layers move and are replayed.

    tools/contract.py                                                # 100,000 pairs in bfloat16
    tools/contract.py --requests 2000 --architecture qwen3_moe --dtype float32
    tools/contract.py --weights int4 --activations int8              # of four bits, and rows of eight
    tools/contract.py --speculation suffix                           # the crowd with proposals, alone without
    tools/contract.py --speculation draft                            # the proposals of a draft model

With ``--speculation``, the crowd's steps carry proposed tokens and those of the reference do not. The model then has a
tokenizer, and requests repeat themselves, so that tokens can be guessed: greedy, drawn, with several continuations,
penalties, biases, stop strings, stop tokens and grammars. The draft model is the first layers of the model, whose later
layers then add little, so that both agree about a part of the tokens.

Prints the pairs that were compared and how many differed; exit code 1 if any did.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from bench_lib import processor
from draft_pair import first_layers, later_outputs
from transformers import AutoConfig

import swarm.demo
from swarm import AsyncClient, ClientError, Grammar
from tests.faults.bench import Answer, Swarm, answer_of
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes
from tests.model.models import ARCHITECTURES, random_model

VOCABULARY = 500
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 336,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MORE_MIB = 66  # than a worker needs to start: room for fewer sequences than are asked for at once
DEMO = Path(swarm.demo.__file__).parent / "village"
DEMO_VOCABULARY = 768
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
SCHEMA = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "favourite_colour": {"enum": ["red", "green", "blue"]},
    },
    "required": ["first_name", "age", "favourite_colour"],
    "additionalProperties": False,
}
GRAMMARS = (
    Grammar("json_schema", json.dumps(SCHEMA)),
    Grammar("regex", r"(yes|no)( and (yes|no)){3,9}\."),
    Grammar("ebnf", 'root ::= pair{4}\npair ::= "<entry>" [0-9]{2} "</entry>"\n'),
)
DRAFT_LAYERS = 2
DRAFT_SCALE = 0.2  # of what the layers behind the draft model's add
TEXTS = ("Once upon a time there was a little dog. ", "The dog saw the cat. The cat saw the dog. ", "1 2 3 4 5 6 7 8 ")
PATIENCE_S = 300.0
SAY_EVERY_S = 20.0


@dataclass(frozen=True)
class Request:
    prompt: list[int] | str
    options: dict[str, Any]


def requests_of(count: int, seed: int) -> list[Request]:
    """Make greedy and drawn requests of all lengths; some begin alike, for two to five blocks."""
    chance = random.Random(seed)
    beginnings = [[chance.randrange(3, VOCABULARY) for _ in range(32 * blocks)] for blocks in (2, 3, 5)]
    found = []
    for number in range(count):
        prompt = [chance.randrange(3, VOCABULARY) for _ in range(chance.choice((1, 3, 9, 17, 33, 64, 70, 130, 201)))]
        if chance.random() < 0.4:
            prompt = chance.choice(beginnings) + prompt[:50]
        options: dict[str, Any] = {"max_tokens": chance.choice((1, 2, 4, 8)), "logprobs": 2}
        if chance.random() < 0.7:
            options |= {"temperature": 0.9, "seed": number, "top_p": chance.choice((1.0, 0.9))}
        else:
            options |= {"temperature": 0.0}
        found.append(Request(prompt, options))
    return found


def repeating_requests(count: int, seed: int) -> list[Request]:
    """Make requests of all kinds whose answers can partly be guessed: from their prompts, from earlier answers to the
    same or a similar request, or by their grammars."""
    chance = random.Random(seed)
    found = []
    for number in range(count):
        options: dict[str, Any] = {"max_tokens": chance.choice((1, 2, 8, 24, 48)), "logprobs": chance.choice((0, 2))}
        options |= {"temperature": 0.0} if chance.random() < 0.4 else _drawn(chance, number)
        options |= chance.choice((_nothing, _penalized, _biased, _several, _stopped, _by_grammar))(chance)
        prompt: list[int] | str = chance.choice(TEXTS) * chance.choice((1, 2, 8))
        if chance.random() < 0.5:
            part = [chance.randrange(3, DEMO_VOCABULARY) for _ in range(chance.choice((2, 7, 19, 40)))]
            prompt = part * chance.choice((1, 2, 4))
        found.append(Request(prompt, {"ignore_eos": "grammar" not in options} | options))
    return found


def _drawn(chance: random.Random, number: int) -> dict[str, Any]:
    return {"temperature": chance.choice((0.3, 0.9)), "seed": number, "top_p": chance.choice((1.0, 0.9))}


def _nothing(chance: random.Random) -> dict[str, Any]:
    return {}


def _penalized(chance: random.Random) -> dict[str, Any]:
    return {"repetition_penalty": chance.choice((1.05, 1.3)), "frequency_penalty": chance.choice((0.0, 0.2))}


def _biased(chance: random.Random) -> dict[str, Any]:
    return {"logit_bias": {chance.randrange(3, DEMO_VOCABULARY): 3.0}, "presence_penalty": 0.1}


def _several(chance: random.Random) -> dict[str, Any]:
    return {"n": chance.choice((2, 3))}


def _stopped(chance: random.Random) -> dict[str, Any]:
    tokens = tuple(chance.randrange(3, DEMO_VOCABULARY) for _ in range(8))
    return {"stop": ["dog", "e t"], "stop_token_ids": tokens}


def _by_grammar(chance: random.Random) -> dict[str, Any]:
    return {"grammar": chance.choice(GRAMMARS), "max_tokens": 60}


async def ask(client: AsyncClient, request: Request, **more: Any) -> Answer:
    options = {"ignore_eos": True} | request.options | more
    return answer_of(await client.generate(request.prompt, timeout=PATIENCE_S, **options))


@dataclass
class Contract:
    """A crowd of requests, their reference answers, and the deaths of workers meanwhile."""

    swarm: Swarm
    client: AsyncClient
    requests: list[Request]
    alone: list[Answer]
    limit: str
    seed: int
    until: float = math.inf  # time after which nothing more is asked
    compared: int = 0  # complete answers
    quarantined: int = 0  # requests without an answer: three workers died while they ran, as documented
    deaths: int = 0
    different: list[str] = field(default_factory=list)

    async def run(self, count: int, at_once: int, kill_every_s: float) -> None:
        killer = asyncio.create_task(self._kill(kill_every_s)) if kill_every_s else None
        teller = asyncio.create_task(self._tell(count))
        left = iter(range(count))
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(at_once):
                    group.create_task(self._ask(random.Random(self.seed * 1000 + number), left))
        finally:
            for task in filter(None, (killer, teller)):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _ask(self, chance: random.Random, left: Any) -> None:
        for _ in left:
            if time.monotonic() >= self.until:
                return
            index = chance.randrange(len(self.requests))
            try:
                found = await ask(self.client, self.requests[index])
            except ClientError as error:
                if "quarantined" in str(error):
                    self.quarantined += 1
                else:
                    self.different.append(f"request {index} failed: {error}")
                continue
            self.compared += 1
            if found != self.alone[index]:
                self.different.append(f"request {index}: {found} instead of {self.alone[index]}")

    async def _kill(self, every_s: float) -> None:
        chance, number = random.Random(self.seed), 0
        while True:
            await asyncio.sleep(every_s * chance.uniform(0.5, 1.5))
            self.swarm.kill(chance.choice(sorted(self.swarm.workers)))
            number += 1
            self.deaths += 1
            self.swarm.start_worker(f"new{number}", "--memory-limit", self.limit)

    async def _tell(self, count: int) -> None:
        while True:
            await asyncio.sleep(SAY_EVERY_S)
            print(f"{self.compared} of {count}, {self.deaths} deaths, {len(self.different)} differ", flush=True)


async def least_mib(swarm: Processes) -> int:
    """Return the least memory with which a worker starts, from its own error."""
    swarm.start_worker("absurd", "--memory-limit", "100MiB")
    await asyncio.to_thread(swarm.workers.pop("absurd").wait, 60)
    found = re.search(r"the minimum is (\d+) MiB", swarm.log("absurd"))
    if found is None:
        raise SystemExit(f"a worker did not say how much memory it needs: {swarm.log('absurd')[-500:]}")
    return int(found[1])


def write_model(
    folder: Path, architecture: str, dtype: str, *, has_tokenizer: bool = False, draft: Path | None = None
) -> None:
    """Write a model of random weights, perhaps with the demo model's tokenizer, and perhaps its draft model."""
    shape = SHAPE | ARCHITECTURES[architecture] | {"head_dim": 64}
    if has_tokenizer:
        shape |= {"vocab_size": DEMO_VOCABULARY, "bos_token_id": 0, "eos_token_id": 1}
    model = random_model(AutoConfig.for_model(architecture, **shape), getattr(torch, dtype))
    if draft is not None:
        for weight in later_outputs(model, DRAFT_LAYERS):
            weight.mul_(DRAFT_SCALE)
        first_layers(model, DRAFT_LAYERS).save_pretrained(draft)
    model.save_pretrained(folder)
    for path in (folder, draft) if draft is not None else (folder,):
        for name in TOKENIZER_FILES if has_tokenizer else ():
            shutil.copyfile(DEMO / name, path / name)


@asynccontextmanager
async def serving(model: Path, folder: Path, options: argparse.Namespace) -> AsyncIterator[tuple[Swarm, str]]:
    environment = {
        "SWARM_BROKER__KV_HEADROOM": "1",
        "SWARM_BROKER__SETTLE_S": "0.1",
        "SWARM_WORKER__WEIGHTS": options.weights,
        "SWARM_WORKER__ACTIVATIONS": options.activations,
        "SWARM_BROKER__SPECULATION": options.speculation,
    }
    if options.speculation == "draft":
        environment["SWARM_BROKER__DRAFT"] = str(folder / "draft")
    with Zygote(model) as zygote, Swarm(model, folder, zygote, environment) as swarm:
        swarm.start_broker(options.workers)
        limit = f"{await least_mib(swarm) + MORE_MIB}MiB"
        for number in range(options.workers):
            swarm.start_worker(f"w{number}", "--memory-limit", limit)
        yield swarm, limit


def connected(swarm: Swarm) -> AsyncClient:
    return AsyncClient(swarm.url, connect_timeout_s=60, reconnect_timeout_s=120)


async def contract(model: Path, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    speculates = options.speculation != "off"
    requests = (repeating_requests if speculates else requests_of)(options.distinct, options.seed)
    async with serving(model, folder, options) as (swarm, limit), connected(swarm) as client:
        await swarm.until_serving(client, options.workers)
        began = time.monotonic()
        alone = [await ask(client, request, speculation="off") for request in requests]
        before = figures(await client.query("stats"))
        alone_s, began = time.monotonic() - began, time.monotonic()
        kernels = {row["kernels"] for row in (await client.query("plan"))["stages"]}  # type: ignore[union-attr]
        crowd = Contract(swarm, client, requests, alone, limit, options.seed, began + (options.seconds or math.inf))
        await crowd.run(options.requests, options.at_once, options.kill_every)
        stats = await client.query("stats")
        after = figures(stats)
        return {
            "architecture": options.architecture,
            "dtype": options.dtype,
            "weights": options.weights,
            "activations": options.activations,
            "kernels": sorted(kernels),
            "compared": crowd.compared,
            "quarantined": crowd.quarantined,
            "differ": len(crowd.different),
            "first": crowd.different[:3],
            "at_once": options.at_once,
            "distinct": len(requests),
            "kv_capacity": (await client.query("status"))["kv_capacity"],
            "speculation": options.speculation,
            "proposed_alone": before["proposed_tokens"],
            "proposed": after["proposed_tokens"] - before["proposed_tokens"],
            "accepted": after["accepted_tokens"] - before["accepted_tokens"],
            "deaths": crowd.deaths,
            "preemptions": stats["scheduler"]["preemptions"],  # type: ignore[index,call-overload]
            "prefix_hits": stats["pipeline"].get("prefix_hits"),  # type: ignore[union-attr]
            "alone_s": round(alone_s),
            "crowd_s": round(time.monotonic() - began),
            "processor": processor(),
        }


def figures(stats: Any) -> dict[str, int]:
    """Return the counters of proposed and accepted tokens."""
    return {name: int(stats["pipeline"].get(name, 0)) for name in ("proposed_tokens", "accepted_tokens")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000, help="pairs (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.0, help="of the crowd; then fewer pairs (default: no limit)")
    parser.add_argument("--distinct", type=int, default=1500, help="requests asked alone (default: %(default)s)")
    parser.add_argument("--at-once", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--workers", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--kill-every", type=float, default=15.0, metavar="S", help="on average; 0: nobody dies")
    parser.add_argument("--architecture", choices=sorted(ARCHITECTURES), default="llama")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--weights", choices=("auto", "int8", "int4"), default="auto")
    parser.add_argument("--activations", choices=("auto", "int8"), default="auto", help="with quantized weights")
    parser.add_argument(
        "--speculation", choices=("off", "auto", "suffix", "draft"), default="off", help="of the crowd's steps"
    )
    parser.add_argument("--demo", action="store_true", help="the demo model instead of one with random weights")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.speculation == "draft" and (options.demo or options.architecture != "llama"):
        parser.error("a draft model is written for the architecture llama only, and none for --demo")
    folder = Path(tempfile.mkdtemp(prefix="swarm-contract-"))
    model = DEMO if options.demo else folder / "model"
    if not options.demo:
        draft = folder / "draft" if options.speculation == "draft" else None
        write_model(model, options.architecture, options.dtype, has_tokenizer=options.speculation != "off", draft=draft)
    result = asyncio.run(contract(model, folder, options))
    print(json.dumps(result, indent=1))
    if options.speculation != "off" and (result["proposed_alone"] or not result["accepted"]):
        print("the reference had proposals, or no proposal was accepted: nothing was compared", file=sys.stderr)
        return 1
    if result["differ"]:
        print(f"the logs are in {folder}", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
