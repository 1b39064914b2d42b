#!/usr/bin/env python3
"""Measure our server and llama.cpp's side by side, over HTTP, with the same load generator and the same weights.

    bench_servers.py --llama-server PATH [--model FOLDER | --shape 1.1b] [--streams 1 4 16]

Both run at the same time on this machine, and one of them is asked: ours, llama.cpp's, ours, llama.cpp's … For each
number of streams, ``swarm bench`` sends prompts of 32 random tokens and asks for 64 tokens each (--answer), greedy,
streamed. The model is the embedded one, or a Llama of bench_model.py's (--shape), for which words are made up;
bench_gguf.py writes it for llama.cpp. llama-server is llama.cpp's own, built from its sources; the sdist of
llama-cpp-python has them too:

    pip download --no-deps --no-binary :all: llama-cpp-python && tar xf llama_cpp_python-*.tar.gz
    cmake -S llama_cpp_python-*/vendor/llama.cpp -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DLLAMA_OPENSSL=OFF \\
        -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF && ninja -C build llama-server
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench_lib import ROOT, free_port, wait_for

from swarm.demo import model_path

START_S = 300.0
PROMPT = 32
MOST_FAILED = 0.02  # of requests: llama.cpp's server closes connections that clients keep
FIGURES = ("tokens_s", "ttft_p50", "between_p50")
Samples = dict[tuple[str, int], list[dict[str, float]]]


def words_of(folder: Path) -> None:
    """Write a tokenizer beside random weights: bytes, and made-up words for the other tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: PLC0415

    size = json.loads((folder / "config.json").read_text())["vocab_size"]
    words = ["<unk>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he"]
    words += [f"\u0120w{number}" for number in range(len(words), size)]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, [("h", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(words[:3])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


def run_tool(*arguments: object) -> None:
    subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, check=True)


def prepare(options: argparse.Namespace, scratch: Path) -> tuple[Path, Path]:
    """The model's folder, and its file for llama.cpp."""
    folder: Path = options.model or model_path()
    if options.shape:
        folder = scratch / f"llama-{options.shape}"
        run_tool(ROOT / "tools" / "bench_model.py", folder, "--shape", options.shape)
        words_of(folder)
    file = scratch / "model.gguf"
    run_tool(ROOT / "tools" / "bench_gguf.py", folder, file)
    return folder, file


def ours(options: argparse.Namespace, folder: Path, port: int) -> list[str]:
    command = [sys.executable, "-m", "swarm", "up", "--workers", "1", "--json", "--model", str(folder)]
    return [*command, "--port", str(free_port()), "--http", str(port), *options.swarm]


def theirs(options: argparse.Namespace, file: Path, port: int) -> list[str]:
    most = max(options.streams)
    command = [str(options.llama_server), "-m", str(file), "--port", str(port), "-np", str(most)]
    return [*command, "-c", str(most * 256), *options.llama]


def measure(options: argparse.Namespace, port: int, streams: int, highest_id: int) -> dict[str, float]:
    """One turn of one server."""
    command = [sys.executable, "-m", "swarm", "bench", f"http://127.0.0.1:{port}", "--api", "completions", "--json"]
    command += [
        "-c",
        str(streams),
        "-d",
        f"{options.seconds:g}s",
        "--prompt",
        str(PROMPT),
        "--output",
        str(options.answer),
    ]
    command += ["--token-ids", f"10:{highest_id}", "--extra", "ignore_eos=true", "--extra", "temperature=0"]
    done = subprocess.run([*command, "--no-ceiling"], cwd=ROOT, check=True, capture_output=True)
    return figures_of(json.loads(done.stdout))


def figures_of(told: dict[str, Any]) -> dict[str, float]:
    point = told["points"][0]["figures"]
    if point["failed"] > MOST_FAILED * point["requests"]:
        raise SystemExit(f"{point['failed']} requests failed: {point['errors']}")
    return {
        "tokens_s": point["tokens_per_s"],
        "ttft_p50": point["ttft_ms"]["p50"],
        "between_p50": point["inter_token_ms"]["p50"],
    }


def take_turns(options: argparse.Namespace, ports: dict[str, int], highest_id: int) -> Samples:
    found: Samples = defaultdict(list)
    for turn in range(options.rounds):
        for streams in options.streams:
            for name, port in ports.items():
                row = measure(options, port, streams, highest_id)
                found[name, streams].append(row)
                said = "  ".join(f"{key} {row[key]:8.2f}" for key in FIGURES)
                print(f"round {turn + 1}  {streams:>3} streams  {name:>9}  {said}", file=sys.stderr, flush=True)
    return found


def show(found: Samples, streams: list[int]) -> None:
    """Medians over the rounds."""
    for number in streams:
        for name in ("swarm", "llama.cpp"):
            rows = found[name, number]
            tokens, first, between = (statistics.median(row[key] for row in rows) for key in FIGURES)
            print(
                f"{number:>3} streams  {name:>9}  {tokens:>8,.0f} tokens/s  first token {first:8.2f} ms"
                f"  between tokens {between:7.2f} ms"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama-server", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="a Llama with a byte-level tokenizer; the embedded one")
    parser.add_argument("--shape", help="instead: of bench_model.py")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each turn")
    parser.add_argument("--answer", type=int, default=64, help="tokens")
    parser.add_argument("--swarm", type=str.split, default=[], help="more options of swarm up")
    parser.add_argument("--llama", type=str.split, default=[], help="more options of llama-server")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.model and options.model.parent) as scratch:
        folder, file = prepare(options, Path(scratch))
        ports = {"swarm": free_port(), "llama.cpp": free_port()}
        commands = (ours(options, folder, ports["swarm"]), theirs(options, file, ports["llama.cpp"]))
        logs = [(Path(scratch) / name).open("wb") for name in ("swarm.log", "llama.log")]
        made = [
            subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
            for command, log in zip(commands, logs, strict=True)
        ]
        try:
            wait_for(f"http://127.0.0.1:{ports['swarm']}/ready", made[0], START_S)
            wait_for(f"http://127.0.0.1:{ports['llama.cpp']}/health", made[1], START_S)
            size = json.loads((folder / "config.json").read_text())["vocab_size"]
            found = take_turns(options, ports, size - 1)
        finally:
            for process in made:
                process.terminate()
            for process in made:
                process.wait(30)
            for log in logs:
                log.close()
    show(found, options.streams)


if __name__ == "__main__":
    main()
