#!/usr/bin/env python3
"""Measure what speculation brings: the same requests without and with it, in turns, in one swarm.

    edits        a model quotes code of its prompt with small changes (``bench_copier.py``), as in edits or extraction
    stories      ordinary text of the embedded demo model: the ends of different stories, drawn at temperature 0.8,
                 after 150 earlier ones of the same tenant
    unguessable  tokens drawn at temperature 1 from a model of random weights
    json         an object under a schema, from the demo model
    draft        a draft model a tenth the size of the model (``draft_pair.py``), which agrees about most tokens
    hosts        edits on two hosts with 20 ms between them, each way, against the whole model on one; needs root

Every turn has prompts of its own, and both ways get the same ones, so that no answer can be guessed from an earlier
turn's. Their tokens are compared: a difference ends the program. Ratios are medians over neighbouring turns (A B,
B A, …). Acceptance is the share of proposed tokens that the stages drew, too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any, Literal, cast

from bench_lib import (
    ROOT,
    TOOLS,
    BenchError,
    Row,
    note,
    numbers,
    report,
    run,
    table,
    turns,
    wait_passively,
)
from bench_swarm import Processes, Swarm
from transformers import PreTrainedTokenizerFast

from swarm.params import Grammar

OFF, ON = "off", "on"
TIMEOUT_S = 600.0
SHIPPED = ROOT / "swarm" / "demo" / "village"
GOALS = {  # the least ratio, by case and number of sequences
    ("edits", 1): 2.5,
    ("edits", 4): 1.8,
    ("stories", 1): 1.2,
    ("unguessable", 1): 0.97,
    ("unguessable", 16): 0.97,
    ("json", 1): 1.5,
    ("draft", 1): 1.6,
    ("hosts", 1): 3.0,
}
HOSTS_LAYERS = 16
GOAL_ONE_HOST = 1.2  # two hosts with speculation against the best single one without
DELAY_S = 0.02  # of a frame between the two hosts
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "colour": {"enum": ["red", "green", "blue", "white"]},
        "animal": {"enum": ["cat", "dog", "sheep", "fox"]},
        "friends": {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 2, "maxItems": 2},
        "happy": {"type": "boolean"},
    },
    "required": ["name", "colour", "animal", "friends", "happy"],
    "additionalProperties": False,
}
Prompts = Callable[[Random, int], list[list[int]]]


@dataclass
class Case:
    """Requests of one kind. ``prompts`` writes those of a turn; ``options`` go with each request."""

    name: str
    sequences: int
    model: Path
    prompts: Prompts
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    draft: Path | None = None
    num_earlier: int = 0  # answers that the swarm has given before, with speculation

    @property
    def title(self) -> str:
        return f"{self.name}, {self.sequences} sequence{'s' if self.sequences > 1 else ''}"

    @property
    def goal(self) -> float | None:
        return GOALS.get((self.name, self.sequences))


@dataclass
class Measured:
    """Outcome of a case. ``figures``: the broker's counters of the turns with speculation."""

    row: Row
    figures: dict[str, float] = field(default_factory=dict)
    skipped: str = ""

    @property
    def acceptance(self) -> str:
        proposed, accepted = self.figures.get("proposed_tokens", 0), self.figures.get("accepted_tokens", 0)
        return f"{accepted / proposed:.0%} of {proposed:,.0f}" if proposed else "nothing was proposed"


class Served(Swarm):
    """``swarm up`` without a prefix cache, so that the second of two equal prompts costs what the first does."""

    def __init__(self, case: Case, stages: int, threads: int) -> None:
        settings = {"SWARM_BROKER__PREFIX_CACHE": "false", **case.settings}
        super().__init__(case.model, stages, threads, settings)
        if case.draft is not None:
            self._arguments += ["--draft", str(case.draft)]


# --- the work ---------------------------------------------------------------------------------------------------------


def quote_prompts(
    tokenizer: PreTrainedTokenizerFast, texts: list[str], length: int, rng: Random, count: int
) -> list[list[int]]:
    """Return prompts whose answers quote from them."""
    from bench_copier import quote_prompt  # noqa: PLC0415 (torch is slow to load)

    return [quote_prompt(rng, texts, tokenizer, length) for _ in range(count)]


def story_prompts(tokenizer: PreTrainedTokenizerFast, written: set[str], rng: Random, count: int) -> list[list[int]]:
    """Return beginnings of stories, each of them once."""
    import demo_world  # noqa: PLC0415

    prompts: list[list[int]] = []
    while len(prompts) < count:
        text = demo_world.document(rng)
        if not isinstance(text, str) or len(text) < 200 or text[:60] in written:
            continue
        written.add(text[:60])
        prompts.append([int(token) for token in tokenizer.encode(text[:60])])
    return prompts


def random_prompts(vocabulary: int, rng: Random, count: int) -> list[list[int]]:
    return [[rng.randrange(3, vocabulary) for _ in range(24)] for _ in range(count)]


async def answers(swarm: Processes, case: Case, prompts: list[list[int]], way: str) -> tuple[list[list[int]], float]:
    """Return the answers to prompts of one turn, and how many tokens per second they came with."""
    speculation: Literal["off", "auto"] = "off" if way == OFF else "auto"
    began = perf_counter()
    completions = await swarm.client.generate_batch(
        prompts, timeout=TIMEOUT_S, speculation=speculation, seed=sum(prompts[0]), **case.options
    )
    seconds = perf_counter() - began
    tokens = [list(completion.tokens) for completion in completions]
    return tokens, sum(map(len, tokens)) / seconds


async def counters(swarm: Processes) -> dict[str, float]:
    stats = cast(dict[str, Any], await swarm.client.query("stats"))
    return {name: float(stats["pipeline"].get(name, 0)) for name in ("proposed_tokens", "accepted_tokens", "steps")}


async def compared(case: Case, swarms: Mapping[str, tuple[Processes, str]], rounds: int, repeats: int) -> Measured:
    """Give every contestant (a swarm, and whether it speculates) the same prompts in turn."""
    note(f"{case.title} …")
    rng = Random(35)
    samples: dict[str, list[float]] = {name: [] for name in swarms}
    totals: dict[str, float] = {}
    expected: list[list[int]] = []
    pending: set[str] = set()
    prompts: list[list[int]] = []
    if case.num_earlier:
        swarm, _ = swarms[ON]
        await answers(swarm, case, case.prompts(rng, case.num_earlier), ON)
    for name, counts in turns(swarms, rounds):
        if not pending:
            pending, expected = set(swarms), []
            prompts = case.prompts(rng, case.sequences * repeats)
        swarm, way = swarms[name]
        before = await counters(swarm)
        rates, tokens = [], []
        for start in range(0, len(prompts), case.sequences):
            part, rate = await answers(swarm, case, prompts[start : start + case.sequences], way)
            tokens += part
            rates.append(rate)
        after = await counters(swarm)
        if expected and tokens != expected:
            raise BenchError(f"{case.title}: tokens differ with speculation {way}")
        expected = tokens
        pending.discard(name)
        rate = len(rates) / sum(1 / rate for rate in rates)
        note(f"{name}: {rate:.1f} tok/s")
        if counts:
            samples[name].append(rate)
            if way == ON:
                for key, value in after.items():
                    totals[key] = totals.get(key, 0) + value - before[key]
    return Measured(Row(case.title, "tok/s", samples, OFF, case.goal), totals)


async def one_host(case: Case, stages: int, threads: int, rounds: int, repeats: int) -> Measured:
    async with Served(case, stages, threads) as swarm:
        return await compared(case, {OFF: (swarm, OFF), ON: (swarm, ON)}, rounds, repeats)


async def on_hosts(case: Case, rounds: int, repeats: int) -> Measured:
    """Compare two hosts that are far apart, without and with speculation, with the whole model on one host."""
    from bench_hosts import OnHosts  # noqa: PLC0415 (needs root)

    from tests.faults.machines import at  # noqa: PLC0415
    from tests.faults.router import far_away  # noqa: PLC0415
    from tests.integration.hosts import network  # noqa: PLC0415

    home = Path(tempfile.mkdtemp(prefix="swarm-hosts-"))
    try:
        with ExitStack() as stack:
            hosts = stack.enter_context(network(home, "laptop", "near", "far", "single"))
            stack.enter_context(at(hosts["laptop"]))
            stack.enter_context(far_away(hosts["far"], DELAY_S))
            async with AsyncExitStack() as swarms:
                two = OnHosts([hosts["near"], hosts["near"], hosts["far"]], hosts["laptop"], case.model, 2, "batch")
                # as if no host had memory for the whole model, which the planner would leave on one of them
                two.settings["SWARM_PLAN__CAPS"] = json.dumps({f"w{n}": HOSTS_LAYERS // 2 for n in range(2)})
                one = OnHosts([hosts["single"], hosts["single"]], hosts["laptop"], case.model, 1, "batch")
                for swarm in (two, one):
                    swarm.settings["SWARM_BROKER__PREFIX_CACHE"] = "false"
                    await swarms.enter_async_context(swarm)
                ways = {OFF: (two, OFF), ON: (two, ON), "one host, off": (one, OFF), "one host, on": (one, ON)}
                return await compared(case, ways, rounds, repeats)
    finally:
        shutil.rmtree(home, ignore_errors=True)


# --- models -----------------------------------------------------------------------------------------------------------


def copier(folder: Path, hidden: int, layers: int) -> Path:
    """Return the folder of the model that copies, in matrices of this size."""
    path = folder / f"copier-{hidden}-{layers}"
    if not (path / "model.safetensors").is_file():
        size = ["--hidden", str(hidden), "--layers", str(layers)]
        subprocess.run([sys.executable, str(TOOLS / "bench_copier.py"), str(path), *size], check=True)
    return path


def random_model(folder: Path, shape: str) -> Path:
    path = folder / f"llama-{shape}"
    if not (path / "model.safetensors").is_file():
        subprocess.run([sys.executable, str(TOOLS / "bench_model.py"), str(path), "--shape", shape], check=True)
    return path


def draft_pair(folder: Path) -> tuple[Path, Path]:
    path = folder / "draft-pair"
    if not (path / "target" / "model.safetensors").is_file():
        subprocess.run([sys.executable, str(TOOLS / "draft_pair.py"), str(path)], check=True)
    return path / "target", path / "draft"


def make_cases(arguments: argparse.Namespace) -> list[Case]:
    """Return the chosen cases; models are written only for these."""
    folder, new = arguments.model_dir, arguments.new_tokens
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(SHIPPED)
    chosen: list[Case] = []
    if {"edits", "hosts"} & set(arguments.cases):
        from bench_copier import sources  # noqa: PLC0415 (torch is slow to load)

        edits = partial(quote_prompts, tokenizer, sources("tools", "tests"), new)
        drawn = {"max_tokens": new, "temperature": 1.0, "ignore_eos": True}
    if "edits" in arguments.cases:
        model = copier(folder, 1024, 12)
        chosen += [Case("edits", count, model, edits, drawn) for count in (1, 4)]
    if "stories" in arguments.cases:
        options = {"max_tokens": new, "temperature": 0.8}
        chosen.append(Case("stories", 1, SHIPPED, partial(story_prompts, tokenizer, set()), options, num_earlier=150))
    if "unguessable" in arguments.cases:
        options = {"max_tokens": new, "temperature": 1.0, "ignore_eos": True}
        model = random_model(folder, "200m")
        chosen += [Case("unguessable", n, model, partial(random_prompts, 32000), options) for n in (1, 16)]
    if "json" in arguments.cases:
        options = {"max_tokens": new, "grammar": Grammar("json_schema", json.dumps(SCHEMA))}
        chosen.append(Case("json", 1, SHIPPED, partial(story_prompts, tokenizer, set()), options))
    if "draft" in arguments.cases:
        model, draft = draft_pair(folder)
        options = {"max_tokens": new, "ignore_eos": True}
        chosen.append(Case("draft", 1, model, partial(random_prompts, 4096), options, draft=draft))
    if "hosts" in arguments.cases:
        chosen.append(Case("hosts", 1, copier(folder, 2048, HOSTS_LAYERS), edits, drawn))
    return [case for case in chosen if not arguments.sequences or case.sequences in arguments.sequences]


async def measure(arguments: argparse.Namespace, cases: list[Case]) -> tuple[list[Row], dict[str, object]]:
    rows: list[Row] = []
    facts: dict[str, object] = {}
    for case in cases:
        repeats = arguments.repeats if case.sequences == 1 else 1
        if case.name == "hosts":
            measured = await on_hosts(case, arguments.rounds, 1)
        else:
            measured = await one_host(case, arguments.stages, arguments.threads, arguments.rounds, repeats)
        rows.append(measured.row)
        facts[f"{case.title}: accepted"] = measured.acceptance
        facts[f"{case.title}: goal"] = verdict(case, measured.row)
    return rows, facts


def verdict(case: Case, row: Row) -> str:
    """Return whether the goals are met, as text."""
    if case.goal is None:
        return "none"
    ratio = row.ratios[f"{ON} ÷ {OFF}"]
    text = f"{ratio:.2f} of ≥ {case.goal:g}: {'yes' if ratio >= case.goal else 'no'}"
    if case.name == "hosts":
        best = row.medians[ON] / row.medians["one host, off"]
        text += f"; against the best single host {best:.2f} of ≥ {GOAL_ONE_HOST}: "
        text += "yes" if best >= GOAL_ONE_HOST else "no"
    return text


ALL = ("edits", "stories", "unguessable", "json", "draft", "hosts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=lambda text: tuple(text.split(",")), default=ALL, metavar="NAME,NAME")
    parser.add_argument("--model-dir", type=Path, default=Path("/tmp/swarm-bench"), help="where its models are")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--threads", type=int, default=0, help="0: as swarm up chooses")
    parser.add_argument("--rounds", type=int, default=5, help="that count; one more warms up")
    parser.add_argument("--repeats", type=int, default=4, help="requests of a turn, one after the other, of 1 sequence")
    parser.add_argument("--new-tokens", type=int, default=200, help="at most, per answer")
    parser.add_argument("--sequences", type=numbers, metavar="N,N", help="only the cases of these numbers of sequences")
    parser.add_argument("--json", action="store_true", help="print JSON, with every sample")
    arguments = parser.parse_args()
    if unknown := set(arguments.cases) - set(ALL):
        parser.error(f"there is no case {min(unknown)}; there are {', '.join(ALL)}")
    if "hosts" in arguments.cases:
        from tests.faults.linux import why_no_namespaces  # noqa: PLC0415

        if why := why_no_namespaces():
            note(f"hosts is skipped: {why}")
            arguments.cases = tuple(name for name in arguments.cases if name != "hosts")
    wait_passively()
    rows, facts = run(measure(arguments, make_cases(arguments)))
    shown = [table([row], "speculation") for row in rows]
    results = {"results": [{"case": row.case, "samples": row.samples, "ratios": row.ratios} for row in rows]}
    report("speculation", results, shown, facts, as_json=arguments.json)


if __name__ == "__main__":
    main()
