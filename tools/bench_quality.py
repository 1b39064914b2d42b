#!/usr/bin/env python3
"""Compare the logits of weights of few bits: what the files stand for, Swarm's, llama.cpp's of the same file.

    exact       the dequantized weights in transformers, float32
    8-bit rows  the same with the inputs of all products rounded as llama.cpp rounds them: what explains its distance
    float32, bfloat16, int8 rows   Swarm, by worker.dtype and worker.activations
    llama.cpp   with keys and values in float32

Distances are the root mean square of differences, in percent of the exact logits' deviation. KL: Kullback-Leibler
divergence of next tokens, in thousandths of a nat; top-1: the likeliest next token is the same. Both against the
bfloat16 weights computed in float32. Models: demo, the shipped one; wide, trained in the same way, for types that need
rows of 256; random. The trained ones read texts of their kind, in pieces of 1 to 512 tokens: an error that shows in
some lengths only stands out as the worst length.

GGUF files are written by llama.cpp's own quantizer. Matrices that a type does not fit have another type there. Ends
with 1 if something that must hold does not.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import bench_gptq
import bench_village
import numpy as np
import torch
from bench_contestants import GGUF, gguf_of, llama_version, quantized_gguf, run_writer
from bench_exact import Exact, Logits
from bench_lib import TOOLS, BenchError, note, report, wait_passively
from bench_stage import MARGIN, loaded
from rich.table import Table
from transformers import AutoModelForCausalLM

from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.executor import Batch
from swarm.stage.quantization.at_load import AS_STORED, Quantization
from swarm.wire.messages import Row

LENGTHS = (1, 2, 3, 4, 5, 8, 16, 23, 31, 32, 33, 127, 128, 512)
SEED = 7
MODELS = ("demo", "wide", "random")
BF16 = "BF16"
TYPES = ("Q8_0", "Q6_K", "Q5_K_M", "Q5_1", "Q5_0", "Q4_K_M", "Q4_1", "Q4_0")
OWN = ("int8", "int4")
GPTQ = "GPTQ"
GPTQ_GROUP = 32
KINDS = (BF16, *TYPES, *OWN, GPTQ)
EXACT, ROUNDED, WIDE, NARROW, INT8_ROWS, LLAMA = "exact", "8-bit rows", "float32", "bfloat16", "int8 rows", "llama.cpp"
NO_WORSE = {"int8": "Q8_0", "int4": "Q4_0"}
SLACK = 1.25
STANDARD_ERRORS = 2.0  # of a mean of differences, within which it means nothing
SAME = 0.1  # percent of the deviation: two ways to add float32
WORST = 3.0  # how much further than usual the logits of one length may be


@dataclass
class Line:
    """What one contestant's logits show."""

    model: str
    kind: str
    by: str
    distance: float | None  # from the exact ones
    farthest: float | None  # the largest difference, in percent of the deviation, too
    worst: str  # length of the prompts whose logits are the furthest, and how much further than usual
    divergence: float
    top_1: float


@dataclass
class Outcome:
    lines: list[Line] = field(default_factory=list)
    verdicts: list[tuple[str, bool]] = field(default_factory=list)

    def judge(self, what: str, holds: bool) -> None:
        self.verdicts.append((what, holds))


class Comparison:
    """One model: its prompts, the logits of its bfloat16 weights, and everybody else's against them."""

    def __init__(self, name: str, folder: Path, prompts: list[list[int]], llama_python: str) -> None:
        self.name, self.folder, self.prompts = name, folder, prompts
        self._llama_python = llama_python
        self._exact = Exact(folder)
        self._reference = self._exact.logits(prompts)
        self._scores = scores_of(self._reference)
        self._divergences: dict[tuple[str, str], torch.Tensor] = {}  # by kind and contestant, of every position
        self._rounding = 0.0  # distance of our own bfloat16 arithmetic with plain weights

    def compare(self, kind: str) -> dict[str, Logits]:
        """Return the logits of one kind of weights by contestant."""
        if kind in OWN:
            quantization = Quantization(weights=kind)
            self._exact.take_own(self.folder, quantization)
            return {EXACT: self._exact.logits(self.prompts)} | self._all_ours(self.folder, quantization)
        if kind == GPTQ:
            folder = self.folder.with_name(f"{self.folder.name}-gptq")
            bench_gptq.write(self.folder, folder, GPTQ_GROUP)
            self._exact.take_gptq(GPTQ_GROUP)
            return {EXACT: self._exact.logits(self.prompts)} | self._all_ours(folder, AS_STORED)
        source = gguf_of(self.folder)
        file = source if kind == BF16 else quantized_gguf(self.folder, kind, self._llama_python)
        self._exact.take_file(file)
        found = {EXACT: self._exact.logits(self.prompts)}
        with self._exact.rounded(file):
            found[ROUNDED] = self._exact.logits(self.prompts)
        return found | self._all_ours(file, AS_STORED) | {LLAMA: self._llama(file)}

    def _all_ours(self, path: Path, quantization: Quantization) -> dict[str, Logits]:
        int8_rows = Quantization(weights=quantization.weights, activations="int8")
        found = {dtype: self._ours(path, dtype, quantization) for dtype in (WIDE, NARROW)}
        if path.suffix != GGUF or path != gguf_of(self.folder):  # plain weights are not multiplied with int8 rows
            found[INT8_ROWS] = self._ours(path, NARROW, int8_rows)
        return found

    def _ours(self, path: Path, dtype: str, quantization: Quantization) -> Logits:
        executor = TorchExecutor(str(path), dtype=dtype, quantization=quantization)
        loaded(executor)
        rows = []
        for prompt in self.prompts:
            executor.reset()
            executor.open(0, len(prompt) + MARGIN)
            batch = Batch((Row(0, 0, len(prompt), False),), np.asarray(prompt, dtype=np.int64), None, ())
            rows.append(executor.logits(batch).float())
        return torch.cat(rows).numpy()

    def _llama(self, file: Path) -> Logits:
        with tempfile.TemporaryDirectory(prefix="swarm-bench-") as scratch:
            prompts, out = Path(scratch) / "prompts.json", Path(scratch) / "logits.npy"
            prompts.write_text(json.dumps(self.prompts))
            command = [self._llama_python, str(TOOLS / "bench_llama_logits.py"), str(file), str(prompts), str(out)]
            if subprocess.run(command, check=False).returncode:
                raise BenchError(f"llama.cpp has no logits of {file}; why stands above")
            logits: Logits = np.load(out)
        return logits

    def describe(self, kind: str, by: str, found: dict[str, Logits]) -> Line:
        logits, exact = found[by], found[EXACT]
        scores = scores_of(logits)
        divergence = 1000 * (self._scores.exp() * (self._scores - scores)).sum(-1)
        self._divergences[kind, by] = divergence
        same = (self._scores.argmax(-1) == scores.argmax(-1)).double().mean()
        line = Line(self.name, kind, by, None, None, "", float(divergence.mean()), 100 * float(same))
        if by != EXACT:
            line.distance = distance(logits, exact)
            line.farthest = 100 * float(np.abs(logits - exact).max() / exact.std())
            length, farther = self._worst_length(logits, exact)
            line.worst = f"{length}: {farther:.1f}×"
        return line

    def _worst_length(self, logits: Logits, exact: Logits) -> tuple[int, float]:
        """Return the length of the prompts whose tokens' logits are the furthest: their median, over that of all."""
        rows = np.sqrt(((logits - exact).astype(np.float64) ** 2).mean(-1))
        lengths = np.repeat([len(prompt) for prompt in self.prompts], [len(prompt) for prompt in self.prompts])
        usual = max(float(np.median(rows)), 1e-12)
        farther = {int(length): float(np.median(rows[lengths == length])) / usual for length in np.unique(lengths)}
        return max(farther.items(), key=lambda item: item[1])

    def run(self, kinds: Sequence[str], outcome: Outcome) -> None:
        for kind in kinds:
            note(f"{self.name}, {kind} …")
            found = self.compare(kind)
            lines = {by: self.describe(kind, by, found) for by in found}
            outcome.lines += lines.values()
            if kind == BF16:
                self._rounding = distance(found[NARROW], found[EXACT])
            self._judge(kind, found, outcome)
        self._judge_own(outcome)

    def _judge(self, kind: str, found: dict[str, Logits], outcome: Outcome) -> None:
        what = f"{self.name}, {kind}"
        exact = found[EXACT]
        far = distance(found[WIDE], exact)
        outcome.judge(f"{what}: Swarm's float32 logits are the exact ones ({far:.4f} %)", far <= SAME)
        if self._rounding:
            far = distance(found[NARROW], exact)
            outcome.judge(
                f"{what}: Swarm's bfloat16 logits are no further from the exact ones than with plain weights "
                f"({far:.3f} % against {self._rounding:.3f} %)",
                far <= SLACK * self._rounding,
            )
        if LLAMA in found:
            explained = distance(found[ROUNDED], exact)
            far = distance(found[WIDE], found[LLAMA])
            outcome.judge(
                f"{what}: llama.cpp's rounding explains its distance from Swarm "
                f"({far:.3f} % against {explained:.3f} %)",
                far <= SLACK * explained,
            )
        if ROUNDED in found and INT8_ROWS in found and self._rounding:
            explained = math.hypot(distance(found[ROUNDED], exact), self._rounding)
            far = distance(found[INT8_ROWS], exact)
            outcome.judge(
                f"{what}: rows of int8 cost no more than their rounding ({far:.3f} % against {explained:.3f} %)",
                far <= SLACK * explained,
            )
        for by in (WIDE, NARROW, INT8_ROWS):
            if by in found and distance(found[by], exact) > SAME:
                length, farther = self._worst_length(found[by], exact)
                told = f"{what}, {by}: no length is worse than others ({length}: {farther:.1f}×)"
                outcome.judge(told, farther <= WORST)

    def _judge_own(self, outcome: Outcome) -> None:
        """A divergence counts as larger if its mean difference, position by position, is no accident."""
        for own, theirs in NO_WORSE.items():
            for by in (EXACT, NARROW):
                if (own, by) in self._divergences and (theirs, by) in self._divergences:
                    mine, other = self._divergences[own, by], self._divergences[theirs, by]
                    error = float((mine - other).std() / len(mine) ** 0.5)
                    pair = f"KL {mine.mean():.3f} against {other.mean():.3f}, ± {error:.3f}"
                    holds = float((mine - other).mean()) <= STANDARD_ERRORS * error
                    outcome.judge(f"{self.name}, {by}: {own} is no worse than {theirs} ({pair})", holds)


def scores_of(logits: Logits) -> torch.Tensor:
    return torch.from_numpy(logits).double().log_softmax(-1)


def distance(some: Logits, others: Logits) -> float:
    """Return the root mean square of the differences, in percent of the others' deviation."""
    return 100 * float(np.sqrt(((some - others).astype(np.float64) ** 2).mean()) / others.std())


# --- models and prompts -----------------------------------------------------------------------------------------------


def plain_model(name: str, models: Path, scratch: Path) -> Path:
    """Return the folder of a model in bfloat16."""
    if name == "demo":
        model = AutoModelForCausalLM.from_pretrained(bench_village.SHIPPED, dtype=torch.bfloat16)
        model.save_pretrained(scratch / name)
        return scratch / name
    folder = models / ("village-wide" if name == "wide" else "llama-quality")
    if not (folder / "model.safetensors").is_file():
        script, *options = ("bench_village.py",) if name == "wide" else ("bench_model.py", "--shape", "quality")
        run_writer(folder, [sys.executable, str(TOOLS / script), str(folder), *options])
    return folder


def prompts_for(name: str, folder: Path, sets: int) -> list[list[int]]:
    """Return ``sets`` prompts of every length: pieces of text for the trained models, else of random tokens."""
    count = sets * sum(LENGTHS)
    if name == "random":
        words = int(json.loads((folder / "config.json").read_text())["vocab_size"])
        tokens = [int(token) for token in np.random.default_rng(SEED).integers(3, words, count)]
    else:
        tokens = bench_village.text(count, SEED)
    return list(cut(tokens, LENGTHS * sets))


def cut(tokens: Sequence[int], lengths: Sequence[int]) -> Iterator[list[int]]:
    at = 0
    for length in lengths:
        yield list(tokens[at : at + length])
        at += length


# --- what is told -----------------------------------------------------------------------------------------------------


def tell(outcome: Outcome, facts: dict[str, object], *, as_json: bool) -> None:
    table = Table(title="quality", title_justify="left")
    for name in ("model", "weights", "by"):
        table.add_column(name)
    for name in ("distance %", "largest %", "worst length", "KL 1/1000", "top-1 %"):
        table.add_column(name, justify="right")
    for line in outcome.lines:
        far = ["" if figure is None else f"{figure:.3g}" for figure in (line.distance, line.farthest)]
        figures = [*far, line.worst, f"{line.divergence:.3f}", f"{line.top_1:.2f}"]
        table.add_row(line.model, line.kind, line.by, *figures)
    verdicts = [f"{'holds' if holds else 'DOES NOT HOLD'}: {what}" for what, holds in outcome.verdicts]
    results = {"results": [asdict(line) for line in outcome.lines], "verdicts": outcome.verdicts}
    report("quality", results, [table, *verdicts], facts, as_json=as_json)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), metavar="A,B", help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--kinds", default=",".join(KINDS), metavar="A,B", help=f"some of {', '.join(KINDS)}")
    parser.add_argument("--sets", type=int, default=4, help=f"of prompts, {sum(LENGTHS)} tokens each")
    parser.add_argument("--model-dir", type=Path, default=Path("/tmp/swarm-bench"), help="where its models lie")
    parser.add_argument("--llama-python", default=sys.executable, help="an interpreter that has llama_cpp")
    parser.add_argument("--quick", action="store_true", help="one set, one model, few types: to see whether it works")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    models, kinds, sets = arguments.models.split(","), arguments.kinds.split(","), arguments.sets
    if arguments.quick:
        models, kinds, sets = models[:1], [BF16, "Q8_0", "Q4_0", *OWN], 1
    wait_passively()
    outcome = Outcome()
    try:
        facts: dict[str, object] = {"llama.cpp": llama_version(arguments.llama_python, rpc=False)}
        with tempfile.TemporaryDirectory(prefix="swarm-bench-") as scratch:
            for name in models:
                folder = plain_model(name, arguments.model_dir, Path(scratch))
                prompts = prompts_for(name, folder, sets)
                Comparison(name, folder, prompts, arguments.llama_python).run(kinds, outcome)
    except BenchError as error:
        raise SystemExit(f"bench_quality.py: {error}") from None
    facts["positions"] = f"{sets} × {sum(LENGTHS)} of each model, in pieces of {', '.join(map(str, LENGTHS))}"
    tell(outcome, facts, as_json=arguments.json)
    if not all(holds for _, holds in outcome.verdicts):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
