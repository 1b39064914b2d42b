#!/usr/bin/env python3
"""Time what a grammar costs per token on the last stage: each token drawn by it and, in turns, without it, from the
same logits, in one process. The tokenizer is trained on Python's own library; answers are walks at random through what
the grammar allows, which lead to odder places than a model's answers do. Times are the thread's own: other
work on the machine is not in them. Compiling, which has a thread of its own, is timed by the clock."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import numpy as np
import torch
from bench_lib import note, processor, wait_passively
from llguidance import LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from swarm.grammar import compile_grammar, grammar_vocabulary
from swarm.params import Grammar, SamplingParams
from swarm.stage import native
from swarm.stage.engine.grammars import GrammarMasks
from swarm.stage.engine.native_sampling import sample_rows_native
from swarm.stage.executor import SampleJob

EOS = 1
WORD = {"type": "string", "maxLength": 40}
PERSON = {
    "type": "object",
    "properties": {
        "name": WORD,
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}},
        "address": {
            "type": "object",
            "properties": {"street": WORD, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "email", "tags", "address"],
    "additionalProperties": False,
}
ORDER = {
    "type": "object",
    "properties": {
        **{f"field_{n}": {"anyOf": [WORD, {"type": "number"}, {"type": "null"}]} for n in range(40)},
        "people": {"type": "array", "items": {"$ref": "#/$defs/person"}, "minItems": 2},
    },
    "required": [*(f"field_{n}" for n in range(0, 40, 4)), "people"],
    "additionalProperties": False,
    "$defs": {"person": PERSON},
}
ARITHMETIC = r"""
start: term (("+" | "-") term)*
term: factor (("*" | "/") factor)*
factor: NUMBER | NAME | "(" start ")"
NUMBER: /[0-9]+(\.[0-9]+)?/
NAME: /[a-z_][a-z0-9_]*/
%ignore / /
"""
GBNF = r"""
root ::= statement+
statement ::= "SELECT " columns " FROM " name (" WHERE " condition)? ";\n"
columns ::= name ("," " "? name)* | "*"
condition ::= name " "? ("=" | "<" | ">") " "? value (" AND " condition)?
value ::= [0-9]+ | "'" [^'\n]* "'"
name ::= [a-zA-Z_] [a-zA-Z0-9_]*
"""
CASES = {
    "schema, 7 fields": Grammar("json_schema", json.dumps(PERSON)),
    "schema, 48 fields": Grammar("json_schema", json.dumps(ORDER)),
    "any JSON object": Grammar("json_object"),
    "regex, words": Grammar("regex", r"[A-Z][a-z]+( [a-z]+){3,60}\."),
    "regex, date": Grammar("regex", r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z"),
    "choice of 200": Grammar("choice", json.dumps([f"{n * 7919 % 10007} of {n}" for n in range(200)])),
    "Lark, arithmetic": Grammar("ebnf", ARITHMETIC),
    "GBNF, SQL": Grammar("ebnf", GBNF),
}


@dataclass
class Costs:
    """Milliseconds: of each token by the grammar and without, of compiling, of reading a token after a recovery."""

    bound: list[float]
    free: list[float]
    compiling: float
    reading: float

    def row(self) -> str:
        more = [ours - theirs for ours, theirs in zip(self.bound, self.free, strict=True)]
        parts = (mean(more), median(more), float(np.percentile(more, 99)), max(more))
        ratio = mean(self.bound) / mean(self.free)
        told = " ".join(f"{part:8.3f}" for part in parts)
        return f"{len(more):6} {told} {ratio:6.2f} {self.compiling:10.1f} {self.reading:8.4f}"


def tokenizer_of(words: int, folder: Path) -> Path:
    """The folder with a byte-level tokenizer of so many words, trained if it is not there."""
    place = folder / f"tokenizer-{words}"
    if not (place / "tokenizer.json").is_file():
        note(f"training a tokenizer of {words} words …")
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=words, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
        )
        library = Path(sysconfig.get_paths()["stdlib"])
        sources = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
        made.train_from_iterator((path.read_text("utf-8", "replace") for path in sources), trainer)
        place.mkdir(parents=True, exist_ok=True)
        made.save(str(place / "tokenizer.json"))
    return place


def a_walk(folder: Path, grammar: Grammar, words: int, length: int, seed: int) -> list[int]:
    """An answer at random; one that is whole early ends early."""
    chance, grammars, answer = np.random.default_rng(seed), GrammarMasks(folder, (EOS,)), list[int]()
    while len(answer) < length:
        mask = grammars.mask(0, SampleJob(0, SamplingParams(grammar=grammar), 0, answer, 0), words)
        if mask is None:
            continue  # it is not compiled yet
        if isinstance(mask, str):
            raise SystemExit(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        goes_on = allowed[allowed != EOS]
        if not len(goes_on):
            break
        answer.append(int(chance.choice(goes_on)))
    return answer


def cost_of(
    folder: Path, known: LLTokenizer, grammar: Grammar, logits: torch.Tensor, arguments: argparse.Namespace
) -> Costs:
    """Draw every token of several answers both ways, whichever is first by turns."""
    words, bound, free, reading = logits.shape[-1], list[float](), list[float](), list[float]()
    grammars = GrammarMasks(folder, (EOS,))
    options = {"temperature": 0.8, "top_p": 0.95}
    ways = (SamplingParams(grammar=grammar, **options), SamplingParams(**options))  # type: ignore[arg-type]
    began = time.perf_counter()
    compile_grammar(grammar, known)
    compiling = time.perf_counter() - began
    for seed in range(arguments.answers):
        answer = a_walk(folder, grammar, words, arguments.tokens, seed)
        while grammars.mask(seed, SampleJob(0, ways[0], 0, [], 0), words) is None:
            pass  # it is compiled by now, as with any answer's first token, or soon will be
        for place in range(len(answer)):
            jobs = [SampleJob(0, params, seed, answer[:place], 0) for params in ways]
            for way in (0, 1) if place % 2 else (1, 0):
                began = time.thread_time()
                mask = grammars.mask(seed, jobs[way], words) if way == 0 else None
                assert not isinstance(mask, str)
                sample_rows_native(logits, [jobs[way]], (EOS,), 1, [mask])
                (bound, free)[way].append((time.thread_time() - began) * 1e3)
        grammars.drop(seed)
        began = time.thread_time()
        grammars.mask(seed, SampleJob(0, ways[0], 0, answer, 0), words)
        reading.append((time.thread_time() - began) * 1e3 / max(1, len(answer)))
    return Costs(bound, free, compiling * 1e3, median(reading))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--words", type=int, default=32_000)
    parser.add_argument("--answers", type=int, default=5, help="of each grammar")
    parser.add_argument("--tokens", type=int, default=200, help="of an answer at most")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--model-dir", type=Path, default=Path("/tmp/swarm-bench"), help="where the tokenizer lies")
    arguments = parser.parse_args()
    wait_passively()
    if native.library() is None:
        parser.error(native.unavailable_reason())
    torch.set_num_threads(1)
    folder = tokenizer_of(arguments.words, arguments.model_dir)
    scores = np.random.default_rng(1).gumbel(size=(1, arguments.words)) * 1.5
    logits = torch.from_numpy(scores.astype(np.float32)).to(getattr(torch, arguments.dtype))
    print(f"{processor()}, variant {native.variant()}, {arguments.words} words: {shlex.join(sys.argv)}")
    began = time.thread_time()
    known = grammar_vocabulary((folder / "tokenizer.json").read_text("utf-8"), (EOS,))
    print(f"the tokenizer is made ready in {time.thread_time() - began:.2f} s, once per worker")
    print(
        f"{'':18} {'tokens':>6} {'mean':>8} {'p50':>8} {'p99':>8} {'worst':>8} {'ratio':>6} {'compiling':>10} reading"
    )
    for name, grammar in CASES.items():
        print(f"{name:18} {cost_of(folder, known, grammar, logits, arguments).row()}", flush=True)
    print("milliseconds more per token than without a grammar; ratio: of a draw's mean time; reading: a token that is")
    print("written already, after a recovery")


if __name__ == "__main__":
    main()
