#!/usr/bin/env python3
"""Time attention alone, ours against transformers': decoding behind contexts, and prompts, in turns in one process.

Theirs is what transformers calls for a model with plain attention: ``scaled_dot_product_attention`` over keys and
values that are there already (what its cache costs is not counted). Ours writes new keys and values as well.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from statistics import median

import torch
from bench_lib import timed_in_turns, wait_passively
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from swarm.stage import native
from swarm.stage.attention import function as attention
from swarm.stage.attention.arena import KvArena
from swarm.stage.attention.grid import layout_spans
from swarm.stage.attention.options import AttentionOptions
from swarm.stage.attention.passes import ForwardPass, use_pass
from swarm.wire.messages import LayerRange, Row

CPU = torch.device("cpu")
CACHES_BYTES = 96 << 20  # as many layers as make more keys and values than caches hold
MOST_LAYERS = 22

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Module(torch.nn.Module):
    """Answer what transformers' function asks its module."""

    is_causal = True

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = groups


class Case:
    """``sequences`` of ``context`` positions each, and ``count`` new tokens for each."""

    def __init__(self, heads: tuple[int, int, int], dtype: torch.dtype, sequences: int, context: int, count: int):
        self.queries, self.keys, self.size = heads
        self.dtype, self.sequences, self.context, self.count = dtype, sequences, context, count
        per_layer = 2 * sequences * self.keys * (context + count) * self.size * dtype.itemsize
        self.layers = max(1, min(MOST_LAYERS, CACHES_BYTES // per_layer)) if context else 1
        self.how = AttentionOptions(self.size**-0.5, None, None, None)

    def parts(self, count: int) -> Tensors:
        return tuple(torch.randn(count, n, self.size).to(self.dtype) for n in (self.queries, self.keys, self.keys))

    def ours(self, chunk: int) -> Callable[[], None]:
        arena, limit = KvArena(CPU), self.context + self.count
        batch = self.parts(self.sequences * self.count)
        for sequence in range(self.sequences):
            arena.open(sequence, limit)
            for start in range(0, self.context, 1024):
                some = min(1024, self.context - start)
                rows = self.parts(some)
                for layer in range(self.layers):
                    self._write(arena, layer, sequence, start, rows)

        def run() -> None:
            for start in range(0, self.count, chunk):
                some = min(chunk, self.count - start)
                rows = [Row(sequence, self.context + start, some, False) for sequence in range(self.sequences)]
                part = batch if some == self.count else tuple(each[start : start + some] for each in batch)
                this = ForwardPass(arena, LayerRange(0, 1), tuple(layout_spans(rows)))
                with use_pass(this), torch.inference_mode():
                    for layer in range(self.layers):
                        attention.attend_rows(layer, *part, self.how)

        return run

    def _write(self, arena: KvArena, layer: int, sequence: int, start: int, parts: Tensors) -> None:
        keys, values = (part.transpose(0, 1) for part in parts[1:])
        with torch.inference_mode():
            arena.ensure_region(sequence, layer, keys, values).write(start, keys, values)

    def theirs(self) -> Callable[[], None]:
        length, module = self.context + self.count, _Module(self.queries // self.keys)
        query = torch.randn(self.sequences, self.queries, self.count, self.size).to(self.dtype)
        stored = [
            [torch.randn(self.sequences, self.keys, length, self.size).to(self.dtype) for _ in range(2)]
            for _ in range(self.layers)
        ]

        def run() -> None:
            with torch.inference_mode():
                for keys, values in stored:
                    sdpa_attention_forward(module, query, keys, values, None, scaling=self.how.scale)

        return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--heads", nargs="+", default=["32,4,64", "8,2,64"], help="query heads, key heads, size")
    parser.add_argument("--contexts", nargs="*", type=int, default=[1000, 4000, 24000], help="to decode behind")
    parser.add_argument("--prompts", nargs="*", type=int, default=[512, 4000, 12000, 24000])
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a prompt that we compute at a time")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variants", nargs="*", default=[native.variant()])
    parser.add_argument("--alone", action="store_true", help="without theirs")
    options = parser.parse_args()
    wait_passively()
    torch.set_num_threads(options.threads)
    for name in options.dtypes:
        for heads in (tuple(int(each) for each in text.split(",")) for text in options.heads):
            cases = [(many, context, 1) for context in options.contexts for many in options.sequences]
            for many, context, count in [*cases, *((1, 0, prompt) for prompt in options.prompts)]:
                if many * context > 100_000:
                    continue
                case = Case(heads, getattr(torch, name), many, context, count)
                runs = {} if options.alone else {"theirs": case.theirs()}
                for variant in options.variants:
                    runs[variant] = under(variant, case.ours(options.chunk))
                rounds = options.rounds if count < 4000 else min(3, options.rounds)
                found = {who: median(times) * 1e3 for who, times in timed_in_turns(runs, rounds).items()}
                line = {"dtype": name, "heads": heads, "sequences": many, "context": context, "prompt": count}
                ms = {who: round(spent / case.layers, 3) for who, spent in found.items()}
                theirs = ms.get("theirs")
                over = {f"theirs_over_{who}": round(theirs / ms[who], 2) for who in ms if theirs and who != "theirs"}
                print(json.dumps(line | ms | over), flush=True)


def under(variant: str, run: Callable[[], None]) -> Callable[[], None]:
    def chosen() -> None:
        with native.using_variant(variant):
            run()

    return chosen


if __name__ == "__main__":
    main()
