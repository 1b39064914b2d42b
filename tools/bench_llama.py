#!/usr/bin/env python3
"""The other peer of bench_decode.py: llama.cpp with a GGUF file, through llama-cpp-python's low-level functions.

    bench_llama.py --about                          one line of JSON: versions, and whether it can RPC
    bench_llama.py FILE THREADS [--wide] [--rpc N]  answers bench_questions.py
    bench_llama.py --serve PORT THREADS             one of the N RPC servers, which --rpc starts; ends with its stdin
    bench_llama.py --quantize FILE OUT TYPE         write FILE anew with llama.cpp's quantizer; TYPE such as Q4_K_M

Runs with an interpreter of its own that has llama_cpp and no torch. llama.cpp's own defaults (16-bit keys and values,
flash attention as it chooses, a buffer per sequence; --wide: float32 throughout), every sequence in one batch, greedy:
the largest logit is found by numpy, which is quicker than its own sampler. With servers, the layers are split evenly
over them, and each uses all threads, as only one of them computes at a time; the embedding is looked up here.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import closing, suppress
from time import perf_counter
from typing import Any

import llama_cpp
import numpy as np
from bench_questions import Contestant, answer_questions
from llama_cpp import llama_cpp as api

CPU = 0  # GGML_BACKEND_DEVICE_TYPE_CPU
FLOAT32 = 0  # GGML_TYPE_F32
SPARE = 256  # positions of a prepared context for tokens that come later
START_S = 30.0
TEXT, POINTER, SIZE = ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t
EVERYTHING = 10_000  # layers: more than any model has
SAID: deque[str] = deque(maxlen=200)  # the last lines of llama.cpp's log, told only if something fails


@api.llama_log_callback  # type: ignore[untyped-decorator]
def remember(_level: int, text: bytes, _data: object) -> None:
    if text.strip(b".\n"):  # dots show progress
        SAID.append(text.decode(errors="replace"))


class LlamaError(Exception):
    """llama.cpp refused. The text says what, and what it logged."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what}; llama.cpp said:\n{''.join(list(SAID)[-20:])}")


class Batch:
    """llama.cpp's own struct. The arrays are views of its memory."""

    def __init__(self, size: int) -> None:
        self.struct = api.llama_batch_init(size, 0, 1)
        self.tokens = np.ctypeslib.as_array(self.struct.token, (size,))
        self.positions = np.ctypeslib.as_array(self.struct.pos, (size,))
        self.wanted = np.ctypeslib.as_array(self.struct.logits, (size,))
        np.ctypeslib.as_array(self.struct.n_seq_id, (size,))[:] = 1

    def fill(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Fill it with rows: (token, position, sequence, is its logit wanted)."""
        self.struct.n_tokens = len(rows)
        for place, (token, position, sequence, wanted) in enumerate(rows):
            self.tokens[place], self.positions[place], self.wanted[place] = token, position, wanted
            self.struct.seq_id[place][0] = sequence

    def close(self) -> None:
        api.llama_batch_free(self.struct)


class Context:
    """Keys and values of ``sequences`` of up to ``length`` positions each."""

    def __init__(self, model: object, threads: int, wide: bool, sequences: int, length: int) -> None:
        params = api.llama_context_default_params()
        if wide:
            params.type_k = params.type_v = FLOAT32
            params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it would round them to 16 bit all the same
        params.n_seq_max = sequences
        params.n_ctx = sequences * -(-length // 256) * 256  # divided by the sequences, and rounded to this
        params.n_threads = params.n_threads_batch = threads
        self.shape = (sequences, length)
        self._context = api.llama_init_from_model(model, params)
        if not self._context:
            raise LlamaError(f"there is no room for {sequences} sequences of {length} tokens")
        self._memory = api.llama_get_memory(self._context)
        self._vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        self._size = api.llama_n_batch(self._context)
        self._batch = Batch(self._size)

    def close(self) -> None:
        self._batch.close()
        api.llama_free(self._context)

    def clear(self) -> None:
        api.llama_memory_clear(self._memory, False)

    def cut(self, sequence: int, length: int) -> None:
        if not api.llama_memory_seq_rm(self._memory, sequence, length, -1):
            raise LlamaError(f"sequence {sequence} can't be cut to {length}")

    def copy(self, source: int, target: int) -> None:
        api.llama_memory_seq_cp(self._memory, source, target, -1, -1)

    def compute(self, pieces: dict[int, tuple[int, list[int]]]) -> list[int]:
        """Compute each sequence's (first position, tokens); return the likeliest token after each one."""
        rows = [
            (token, start + number, sequence, number == len(tokens) - 1)
            for sequence, (start, tokens) in pieces.items()
            for number, token in enumerate(tokens)
        ]
        found: list[int] = []
        for begin in range(0, len(rows), self._size):
            part = rows[begin : begin + self._size]
            self._batch.fill(part)
            if api.llama_decode(self._context, self._batch.struct):
                raise LlamaError(f"a batch of {len(part)} tokens failed")
            found += [self._best(place) for place, row in enumerate(part) if row[3]]
        api.llama_synchronize(self._context)
        return found

    def logits(self, tokens: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Compute the tokens of one sequence as one batch; return the logits after each one."""
        self._batch.fill([(token, position, 0, True) for position, token in enumerate(tokens)])
        if api.llama_decode(self._context, self._batch.struct):
            raise LlamaError(f"a batch of {len(tokens)} tokens failed")
        return np.stack([self._row(place) for place in range(len(tokens))])

    def _best(self, place: int) -> int:
        return int(self._row(place).argmax())

    def _row(self, place: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        """View one row of the last batch's logits."""
        return np.ctypeslib.as_array(api.llama_get_logits_ith(self._context, place), (self._vocabulary,))

    def go_on(self, lengths: list[int], last: list[int], new: int) -> list[list[int]]:
        """Draw ``new`` further tokens of each sequence, whose ``last`` token is the first to be computed."""
        tokens: list[list[int]] = [[] for _ in last]
        for step in range(new):
            last = self.compute({n: (lengths[n] + step, [token]) for n, token in enumerate(last)})
            for mine, token in zip(tokens, last, strict=True):
                mine.append(token)
        return tokens


class Llama(Contestant):
    """The model, and the context of the case that is measured."""

    def __init__(self, path: str, threads: int, servers: list[str], wide: bool) -> None:
        params = api.llama_model_default_params()
        params.n_gpu_layers = EVERYTHING if servers else 0
        if servers:
            self.devices = devices_of(servers)
            params.devices = ctypes.addressof(self.devices)
            shares = [1.0] * len(servers) + [0.0] * (api.llama_max_devices() - len(servers))
            params.tensor_split = (ctypes.c_float * len(shares))(*shares)
        self.how = (threads, wide)
        self.model = api.llama_model_load_from_file(path.encode(), params)
        if not self.model:
            raise LlamaError(f"{path} can't be loaded")
        if not all(f"[{server}] model buffer" in "".join(SAID) for server in servers):
            raise LlamaError("not every RPC server got layers")
        self.context: Context | None = None
        self.prepared: list[list[int]] = []

    def generate(self, prompts: list[list[int]], new: int) -> tuple[float, list[list[int]]]:
        context = self._room(len(prompts), max(map(len, prompts)) + new)
        began = perf_counter()
        first = context.compute({number: (0, prompt) for number, prompt in enumerate(prompts)})
        later = context.go_on([len(prompt) for prompt in prompts], first, new - 1)
        took = perf_counter() - began
        return took, [[token, *tokens] for token, tokens in zip(first, later, strict=True)]

    def prepare(self, shared: list[int], tails: list[list[int]]) -> float:
        context = self._room(len(tails), len(shared) + max(map(len, tails)) + SPARE)
        began = perf_counter()
        context.compute({0: (0, shared)})
        for target in range(1, len(tails)):
            context.copy(0, target)
        context.compute({number: (len(shared), tail) for number, tail in enumerate(tails)})
        self.prepared = [[*shared, *tail] for tail in tails]
        return perf_counter() - began

    def go_on(self, new: int) -> float:
        context, lengths = self.context, [len(prompt) - 1 for prompt in self.prepared]
        if context is None or new > SPARE:
            raise ValueError(f"nothing is prepared for {new} further tokens")
        for sequence, length in enumerate(lengths):  # the last token is computed again, for its logits
            context.cut(sequence, length)
        began = perf_counter()
        context.go_on(lengths, [prompt[-1] for prompt in self.prepared], new)
        return perf_counter() - began

    def _room(self, sequences: int, length: int) -> Context:
        """Return an empty context, the last one if it fits: making one is no part of what is measured."""
        if self.context is None or self.context.shape != (sequences, length):
            if self.context is not None:
                self.context.close()
            self.context = Context(self.model, *self.how, sequences, length)
        self.context.clear()
        return self.context


# --- RPC: ggml's functions, which llama-cpp-python has no names for ---------------------------------------------------


def ggml(name: str, result: Any, *arguments: Any) -> Any:
    """Find a function of the very libraries that libllama found: loaded by path they would be copies."""
    function = api._lib[name]  # libllama itself: what it depends on is searched too
    function.restype, function.argtypes = result, arguments
    return function


def rpc(name: str, result: Any, *arguments: Any) -> Any:
    """Find a function of the RPC back end, which gives it by name: it may lie in any library."""
    back_end = ggml("ggml_backend_reg_by_name", POINTER, TEXT)(b"RPC")
    address = ggml("ggml_backend_reg_get_proc_address", POINTER, POINTER, TEXT)(back_end, name.encode())
    return ctypes.CFUNCTYPE(result, *arguments)(address)


def devices_of(servers: list[str]) -> ctypes.Array[ctypes.c_void_p]:
    """List one device of each server, and the null that ends the list."""
    found = []
    for server in servers:
        back_end = rpc("ggml_backend_rpc_add_server", POINTER, TEXT)(server.encode())
        if not back_end:
            raise LlamaError(f"the RPC server {server} does not answer")
        found.append(ggml("ggml_backend_reg_dev_get", POINTER, POINTER, SIZE)(back_end, 0))
    return (POINTER * (len(found) + 1))(*found)


def serve(port: int, threads: int) -> None:
    """Compute for whoever connects, until stdin ends: then whoever started this is gone."""
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
    devices = (POINTER * 1)(ggml("ggml_backend_dev_by_type", POINTER, ctypes.c_int)(CPU))
    start = rpc("ggml_backend_rpc_start_server", None, TEXT, TEXT, SIZE, SIZE, POINTER)
    start(f"127.0.0.1:{port}".encode(), None, threads, 1, ctypes.addressof(devices))
    raise SystemExit(f"the RPC server can't listen on port {port}")


def start_servers(count: int, threads: int) -> list[str]:
    """Start servers that end with this process, since the pipe to their stdin does. Ready when this returns."""
    servers = []
    for _ in range(count):
        port = free_port()
        command = [sys.executable, __file__, "--serve", str(port), str(threads)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        until_listening(port, process)
        RUNNING.append(process)
        servers.append(f"127.0.0.1:{port}")
    return servers


def free_port() -> int:
    """Find a port below those that systems lend to clients: nobody gets it by chance before the server has it."""
    for _ in range(200):
        port = random.randrange(10000, 19000)
        with closing(socket.socket()) as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise LlamaError("there is no free port for an RPC server")


RUNNING: list[subprocess.Popen[bytes]] = []


def until_listening(port: int, process: subprocess.Popen[bytes]) -> None:
    give_up_at = time.monotonic() + START_S
    while time.monotonic() < give_up_at and process.poll() is None:
        with closing(socket.socket()) as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise LlamaError(f"the RPC server on port {port} did not start")


# --- the program ------------------------------------------------------------------------------------------------------


def about() -> dict[str, object]:
    system = api.llama_print_system_info().decode().strip()
    return {"version": llama_cpp.__version__, "rpc": bool(api.llama_supports_rpc()), "system": system}


def quantize(source: str, target: str, kind: str) -> None:
    """Write a GGUF file in another type. It appears when it is complete."""
    params = api.llama_model_quantize_default_params()
    params.ftype = getattr(api, f"LLAMA_FTYPE_MOSTLY_{kind}")
    partial = f"{target}.part"
    if api.llama_model_quantize(source.encode(), partial.encode(), ctypes.byref(params)):
        raise LlamaError(f"{source} can't be quantized to {kind}")
    os.replace(partial, target)


def main() -> None:
    api.llama_log_set(remember, ctypes.c_void_p(0))
    api.llama_backend_init()
    match sys.argv[1:]:
        case ["--about"]:
            print(json.dumps(about()))
            return
        case ["--serve", port, threads]:
            serve(int(port), int(threads))
        case ["--quantize", source, target, kind]:
            quantize(source, target, kind)
        case [path, threads, *options]:
            cores = int(threads) or len(os.sched_getaffinity(0))
            servers = start_servers(int(options[-1]), cores) if "--rpc" in options else []
            answer_questions(Llama(path, cores, servers, "--wide" in options))


if __name__ == "__main__":
    try:
        main()
    except LlamaError as error:
        raise SystemExit(f"bench_llama.py: {error}") from None
