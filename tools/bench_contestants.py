"""Start the benchmarks' peers: other programs that compute with the same weights, each in a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from bench_lib import PASSIVE, TOOLS, BenchError, note
from bench_swarm import START_S

TRANSFORMERS, LLAMA, LLAMA_RPC = "transformers", "llama", "llama-rpc"
PEERS = (TRANSFORMERS, LLAMA, LLAMA_RPC)
RPC_SERVERS = 2
GGUF = ".gguf"
ANSWER_S = 3600.0  # no measurement takes an hour; a peer that hangs must not hang us for ever

LLAMA_ADVICE = """Make an environment for it, in some minutes and with a C++ compiler, and name it:
  python3 -m venv DIR
  CMAKE_ARGS="-DGGML_RPC=ON -DLLAVA_BUILD=OFF" DIR/bin/pip install --no-binary llama-cpp-python llama-cpp-python
  … --llama-python DIR/bin/python
With gcc 12 on a processor with AMX, set CXXFLAGS="-include $PWD/tools/llama_tiles.h" for the second command, or it
crashes with quantized weights."""


class Peer:
    """Another program with the whole model, in a process that sleeps at its pipe between two questions."""

    def __init__(self, command: Sequence[str], *, spins: bool = False) -> None:
        environment = os.environ | ({} if spins else PASSIVE)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()  # it has nothing to tidy up; whatever it started ends with it
        self._process.wait()

    async def ask(self, do: str, **arguments: object) -> float:
        """Ask for seconds, or whatever the question is about."""
        return float(await self._answer(do, arguments))

    async def tokens(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """Have it generate."""
        found: list[list[int]] = await self._answer("tokens", {"prompts": prompts, "new": new})
        return found

    async def _answer(self, do: str, arguments: dict[str, object]) -> Any:
        return await asyncio.wait_for(asyncio.to_thread(self._ask, {"do": do, **arguments}), ANSWER_S)

    def _ask(self, question: dict[str, object]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())["answer"]
        except (BrokenPipeError, ValueError):
            raise BenchError(f"the peer's process ended; {self._describe_end()}") from None

    def _describe_end(self) -> str:
        if self._process.wait() == -signal.SIGSEGV:
            return f"it crashed. {LLAMA_ADVICE}"
        return "what it said stands above"


@dataclass(frozen=True)
class Peers:
    """Know which peers take part, and start them."""

    model: Path
    names: tuple[str, ...]
    threads: int
    spins: bool
    llama_python: str

    def start(self, name: str, *, wide: bool = False) -> Peer:
        """Start one. ``wide``: keys and values of llama.cpp in float32, not in its default of 16 bit."""
        if name == TRANSFORMERS:
            return self._start([sys.executable, str(TOOLS / "bench_peer.py"), str(self.model)])
        more = [*(["--wide"] if wide else []), *(["--rpc", str(RPC_SERVERS)] if name == LLAMA_RPC else [])]
        return self._start([self.llama_python, str(TOOLS / "bench_llama.py"), str(gguf_of(self.model))], *more)

    def _start(self, command: list[str], *more: str) -> Peer:
        return Peer([*command, str(self.threads), *more], spins=self.spins)

    def versions(self) -> dict[str, object]:
        """Tell what is measured beside transformers. Raises BenchError if it isn't here."""
        if not {LLAMA, LLAMA_RPC} & set(self.names):
            return {}
        return {"llama.cpp": llama_version(self.llama_python, rpc=LLAMA_RPC in self.names)}


def llama_version(python: str, *, rpc: bool) -> str:
    """Tell which llama.cpp an interpreter has. Raises BenchError, with what to do, if it can't be measured."""
    command = [python, str(TOOLS / "bench_llama.py"), "--about"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    except OSError as error:
        raise BenchError(f"{python} can't be started: {error.strerror}. {LLAMA_ADVICE}") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:]
        raise BenchError(f"{python} can't use llama.cpp ({''.join(said)}). {LLAMA_ADVICE}")
    found = json.loads(done.stdout.splitlines()[-1])
    if rpc and not found["rpc"]:
        raise BenchError(f"the llama.cpp of {python} was built without RPC. {LLAMA_ADVICE}")
    return f"llama-cpp-python {found['version']}, {found['system']}"


def gguf_of(model: Path) -> Path:
    """Write the model's weights for llama.cpp, once. A GGUF file is taken as it is."""
    if model.suffix == GGUF:
        return model
    file = model.with_name(model.name + ".gguf")
    newest = max((path.stat().st_mtime for path in model.glob("*.safetensors")), default=0.0)
    if not file.is_file() or file.stat().st_mtime < newest:
        run_writer(file, [sys.executable, str(TOOLS / "bench_gguf.py"), str(model), str(file)])
    return file


def quantized_gguf(model: Path, kind: str, llama_python: str) -> Path:
    """Write the model's GGUF file in another type, such as Q4_K_M, with llama.cpp's own quantizer, once."""
    source = gguf_of(model)
    file = source.with_name(f"{source.stem}-{kind}{GGUF}")
    if not file.is_file() or file.stat().st_mtime < source.stat().st_mtime:
        script = str(TOOLS / "bench_llama.py")
        run_writer(file, [llama_python, script, "--quantize", str(source), str(file), kind])
    return file


def run_writer(file: Path, command: Sequence[str]) -> None:
    """Run the program that writes a model, in a process of its own: this one shall not keep the memory."""
    note(f"writing {file} …")
    file.parent.mkdir(parents=True, exist_ok=True)
    if subprocess.run(command, check=False).returncode:
        raise BenchError(f"{file} could not be written; why stands above")


def add_peer_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peer", type=_names, default=(TRANSFORMERS,), metavar="A,B", help=f"of {', '.join(PEERS)}")
    parser.add_argument("--llama-python", default=sys.executable, help="an interpreter that has llama_cpp, with RPC")
    parser.add_argument("--peer-threads", type=int, default=0, help="of each peer; 0: as it chooses")
    parser.add_argument("--peer-spins", action="store_true", help="let the peers' threads wait as OpenMP likes to")


def peers_of(arguments: argparse.Namespace, model: Path) -> Peers:
    return Peers(model, arguments.peer, arguments.peer_threads, arguments.peer_spins, arguments.llama_python)


def _names(text: str) -> tuple[str, ...]:
    names = set(filter(None, text.split(",")))
    if not names or names - set(PEERS):
        raise argparse.ArgumentTypeError(f"{text!r} is not some of {','.join(PEERS)}")
    return tuple(sorted(names, key=PEERS.index))
