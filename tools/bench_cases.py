"""Cases that bench_decode.py and its relatives measure, and the turns of a swarm and of its peers at each."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from bench_contestants import Peer, Peers
from bench_lib import BenchError, Row, Turn, in_turns, note, random_prompt
from bench_swarm import Swarm

from swarm import AsyncClient

TIMEOUT_S = 3600.0
OURS = "swarm"
SHORT = (8, 16)  # tokens of the prompts where decoding is measured
TAIL = 8  # tokens after the shared beginning, at a long context


@dataclass(frozen=True)
class Case:
    """``kind``: decode (short prompts), context (long ones; only what follows them counts), prompt (first token).

    ``target``: the least ratio to transformers that we want.
    """

    name: str
    kind: str
    sequences: int
    prompt: int = 0
    target: float | None = None


@dataclass
class Bench:
    """Hold what every mode needs to know."""

    model: Path
    vocabulary: int
    stages: int
    threads: int
    rounds: int
    new: int
    cases: tuple[str, ...]
    quick: bool
    peers: Peers
    kinds: tuple[str, ...] = ()  # of quantized weights; empty: a mode's own choice
    settings: dict[str, str] = field(default_factory=dict)  # environment of every swarm, beside a mode's own

    def quickly(self, *options: str) -> list[str]:
        """Return options of another program that belong to --quick."""
        return list(options) if self.quick else []

    def swarm(self, stages: int | None = None, settings: dict[str, str] | None = None) -> Swarm:
        return Swarm(self.model, stages or self.stages, self.threads, self.settings | (settings or {}))

    def chosen(self, cases: Sequence[Case]) -> list[Case]:
        unknown = set(self.cases) - {case.name for case in cases}
        if unknown:
            raise BenchError(f"there is no case {min(unknown)}; there are {', '.join(case.name for case in cases)}")
        return [case for case in cases if case.name in self.cases or not self.cases]

    def prompts(self, case: Case) -> list[list[int]]:
        short, long = SHORT
        lengths = [case.prompt or short + number % (long - short + 1) for number in range(case.sequences)]
        return [random_prompt(length, self.vocabulary) for length in lengths]


# --- turns of a swarm: each gives tokens per second, or seconds -------------------------------------------------------


async def generate(client: AsyncClient, prompts: list[list[int]], new: int, **sampling: float) -> float:
    """Generate; seconds from the prompts to the last token of the last of them."""
    began = perf_counter()
    await client.generate_batch(prompts, max_tokens=new, ignore_eos=True, timeout=TIMEOUT_S, **sampling)  # type: ignore[arg-type]
    return perf_counter() - began


async def steady_rate(client: AsyncClient, prompts: list[list[int]], new: int) -> float:
    """Tokens per second while all sequences are generating: from the last first token to the first last one."""
    times: dict[int, list[float]] = {place: [] for place in range(len(prompts))}
    stream = client.stream_batch(prompts, max_tokens=new, ignore_eos=True, timeout=TIMEOUT_S)
    async for place, token, _, _ in stream:
        if token is not None:
            times[place].append(perf_counter())
    begin, end = max(seen[0] for seen in times.values()), min(seen[-1] for seen in times.values())
    if end <= begin:
        raise BenchError("sequences did not run side by side; measure with more --new-tokens")
    return sum(begin < moment <= end for seen in times.values() for moment in seen) / (end - begin)


def swarm_turn(bench: Bench, client: AsyncClient, case: Case, **sampling: float) -> Turn:
    async def turn() -> float:
        prompts = bench.prompts(case)
        if case.kind == "prompt":
            return case.prompt / await generate(client, prompts, 1)
        return case.sequences * bench.new / await generate(client, prompts, bench.new, **sampling)

    return turn


def peer_turn(bench: Bench, peer: Peer, case: Case) -> Turn:
    async def turn() -> float:
        prompts = bench.prompts(case)
        if case.kind == "prompt":
            return case.prompt / await peer.ask("generate", prompts=prompts, new=1)
        return case.sequences * bench.new / await peer.ask("generate", prompts=prompts, new=bench.new)

    return turn


async def context_turns(bench: Bench, client: AsyncClient, peers: dict[str, Peer], case: Case) -> dict[str, Turn]:
    """Give everybody the long prompts' keys and values before measuring; the shared beginning is computed once."""
    shared = random_prompt(case.prompt - TAIL, bench.vocabulary)
    tails = [random_prompt(TAIL, bench.vocabulary) for _ in range(case.sequences)]
    for peer in peers.values():
        await peer.ask("prepare", shared=shared, tails=tails)
    await generate(client, [[*shared, *tails[0]]], 1)

    async def ours() -> float:
        return await steady_rate(client, [[*shared, *tail] for tail in tails], bench.new)

    def of(peer: Peer) -> Turn:
        async def theirs() -> float:
            return case.sequences * bench.new / await peer.ask("go on", new=bench.new)

        return theirs

    return {name: of(peer) for name, peer in peers.items()} | {OURS: ours}


async def compared(bench: Bench, swarms: dict[str, Swarm], cases: Sequence[Case]) -> list[Row]:
    """Give several swarms the same work; the first is the baseline."""
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        for swarm in swarms.values():
            await stack.enter_async_context(swarm)
        for case in bench.chosen(cases):
            note(f"{case.name} …")
            turns = {name: swarm_turn(bench, swarm.client, case) for name, swarm in swarms.items()}
            rows.append(Row(case.name, "tok/s", await in_turns(turns, bench.rounds), next(iter(swarms))))
    return rows
