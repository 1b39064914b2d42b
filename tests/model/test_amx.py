"""The AMX variant: its chain of sums, what it reads, and what stands between it and its users.

Some of these tests, and some of the variant's products, attention, quantized weights and int8 rows, run once more
without the processor's AMX, in a process of their own: a copy of the library has invalid instructions in place of the
eight, and a preloaded library (``amx_emulator.c``) does what the eight would do.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from swarm.stage import native
from swarm.stage.native import cores
from swarm.stage.native.linears import NativeLinear

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
SOURCES = Path(native.__file__).parent
LIBRARY = native.library()
RUNS = LIBRARY is not None and "amx" in native.variants(LIBRARY)
FLAGS = Path("/proc/cpuinfo")
IS_EMULATED = "emulator" in os.environ.get("LD_PRELOAD", "")
EMULATED = {"ldtilecfg", "tilerelease", "tilezero", "tileloadd", "tilestored", "tdpbf16ps", "tdpbssd", "tdpbsud"}
TILE_PAIRS = 16

Floats = NDArray[np.float32]

needs_amx = pytest.mark.skipif(not RUNS, reason="no AMX: runs under the emulator, by a test at the end of this file")
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def chain(rows: torch.Tensor, weights: torch.Tensor) -> Floats:
    """The sums that Intel's manual gives for rows ``[row, input]`` times ``[input, output]``, step by step.

    A product of two bfloat16 is exact in float64, and so is what decides how the sum of it and a float32 is rounded.
    """
    x, w = (part.double().numpy() for part in (rows, weights))
    sums = np.zeros((len(x), w.shape[1]), np.float32)
    for begin in range(0, len(w), 2 * TILE_PAIRS):
        halves = np.zeros((2, *sums.shape), np.float32)
        for at in range(begin, min(begin + 2 * TILE_PAIRS, len(w))):
            halves[at % 2] = halves[at % 2].astype(np.float64) + x[:, at, None] * w[at]
        sums += halves[0] + halves[1]
    return sums


@needs_amx
@pytest.mark.parametrize("shape", [(96, 64), (64, 30), (70, 97), (130, 1026)], ids=str)
def test_a_product_is_the_manual_s_chain(shape: tuple[int, int]) -> None:
    """Bit for bit, in one row and in many, whatever the number of inputs."""
    weight, rows = numbers(1, *shape), numbers(2, 70, shape[1])
    right = torch.from_numpy(chain(rows, weight.T)).bfloat16()
    with torch.inference_mode(), native.using_variant("amx"), cores.computing(2, 70):
        module = NativeLinear(weight, None)
        assert torch.equal(module(rows), right)
        assert torch.equal(module(rows[3:4]), right[3:4])


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The product that attention is made of, by itself."""
    built = tmp_path_factory.mktemp("pieces") / "pieces.so"
    command = ["cc", "-std=gnu11", "-O3", "-ffp-contract=off", "-shared", "-fPIC", f"-I{SOURCES}"]
    subprocess.run([*command, str(HERE / "amx_pieces.c"), "-o", str(built)], check=True, timeout=240)
    if IS_EMULATED:
        make_invalid(built)
    library = ctypes.CDLL(str(built))
    pointer, count = ctypes.c_void_p, ctypes.c_int64
    library.guarded.restype = pointer
    library.guarded.argtypes = [count]
    product = [pointer, count, count, ctypes.c_int, pointer, count, count, pointer, count, ctypes.c_int, pointer]
    library.piece_of_product.argtypes = product
    return library


def tile_instructions(library: Path) -> list[tuple[int, bytes, str]]:
    """Return address, bytes and name of each instruction of AMX in a library."""
    listing = subprocess.run(
        ["objdump", "-d", "--insn-width=16", str(library)], capture_output=True, text=True, check=True, timeout=240
    ).stdout
    used = re.findall(r"^ +([0-9a-f]+):\t([0-9a-f ]+)\t(\w*tile\w*|tdp\w+|\w+(?= +.*%tmm))", listing, re.MULTILINE)
    return [(int(address, 16), bytes.fromhex(code), name) for address, code, name in used]


def make_invalid(library: Path) -> None:
    """Turn each instruction of AMX into one that no processor has, by the number of its opcodes' map: 31 instead of 2.
    The emulator takes either."""
    code = bytearray(library.read_bytes())
    for address, before, name in tile_instructions(library):
        assert code[address : address + len(before)] == before, f"{name} is elsewhere in the file"
        assert before[1] & 0x1F == 2
        code[address + 1] |= 0x1F
    library.write_bytes(code)


def guarded(pieces: ctypes.CDLL, like: NDArray[np.generic]) -> int:
    """A copy of an array, behind which nothing may be read."""
    at = int(pieces.guarded(like.nbytes))
    ctypes.memmove(at, like.ctypes.data, like.nbytes)
    return at


@needs_amx
@needs_compiler
@pytest.mark.parametrize("vectors", [1, 2, 3, 4])
@pytest.mark.parametrize("pairs", [1, 15, 16, 17, 145, 250])
def test_pieces_of_every_size(pieces: ctypes.CDLL, vectors: int, pairs: int) -> None:
    """One to four vectors out of wider steps, rows apart, sums apart, in one call or cut after any 16 pairs: the same
    chain. Nothing is read behind rows, weights or sums."""
    room = vectors * 16 + 32  # of a step, and between rows of sums
    weights, x = numbers(3, 2 * pairs, room), numbers(4, 80, 2 * pairs + 6)
    right = chain(x[:, : 2 * pairs], weights[:, : vectors * 16])
    packed = weights.view(pairs, 2, room).transpose(1, 2).contiguous().view(torch.int16).numpy().reshape(-1)
    at_weights = guarded(pieces, packed[: packed.size - 2 * 32])  # the last step ends with its last vector
    for rows in (1, 2, 16, 17, 32, 33, 63, 80):
        at_x = guarded(pieces, x[:rows].view(torch.int16).numpy().reshape(-1)[:-6])
        for cut in {0, *range(TILE_PAIRS, pairs, 8 * TILE_PAIRS)}:
            sums = np.full((rows, room), 7.0, np.float32)
            at_sums = guarded(pieces, sums.reshape(-1)[: sums.size - 32])
            for first, last in ((0, cut), (cut, pairs)) if cut else ((0, pairs),):
                where = (at_weights + first * room * 4, room * 4, last - first, vectors)
                operand = (at_x + 4 * first, 2 * pairs + 6, rows)
                pieces.piece_of_product(*where, *operand, at_sums, room, first == 0, at_weights if cut else None)
            pieces.end_of_piece()
            ctypes.memmove(sums.ctypes.data, at_sums, sums.nbytes - 4 * 32)
            assert np.array_equal(sums[:, : vectors * 16], right[:rows]), (rows, cut)
            assert np.all(sums[:, vectors * 16 :] == 7.0), "what lies between the rows of sums is not ours"


# --- what stands between the variant and its users --------------------------------------------------------------------


@pytest.mark.skipif(LIBRARY is None, reason=f"no native kernels: {native.unavailable_reason()}")
def test_a_variant_that_fails_its_proof_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one computes, the reason is kept, and nobody can choose the other by name."""
    assert LIBRARY is not None
    first, second = native.variants(LIBRARY)[:2]
    honest = native._prove_variant
    monkeypatch.setattr(
        native, "_prove_variant", lambda opened, name: "it is wrong" if name == first else honest(opened, name)
    )
    monkeypatch.setattr(native, "_rejected", [])
    monkeypatch.setattr(native, "_chosen", native._chosen[:])
    try:
        assert native.use_first_valid(LIBRARY, native.variants(LIBRARY))
        assert native.variant() == second
        assert f"{first}: it is wrong" in native.rejected_variants()
        with pytest.raises(ValueError, match="fails on this processor"):
            native.use_variant(LIBRARY, first)
    finally:
        monkeypatch.undo()
        native.use_variant(LIBRARY, native.variant())


@pytest.mark.skipif(
    LIBRARY is None or shutil.which("objdump") is None, reason="no native kernels, or no objdump to look into them"
)
def test_no_instruction_is_used_that_is_not_emulated() -> None:
    """Of all that AMX has, the library uses what the tests run."""
    assert LIBRARY is not None
    names = {name for _, _, name in tile_instructions(Path(LIBRARY._name))}
    assert names == EMULATED if RUNS else names in (EMULATED, set()), (
        "a library may have been built without the variant"
    )


# --- the emulator -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Emulated:
    """An emulator, and a copy of the repository whose library needs it."""

    emulator: Path
    copy: Path

    def run(self, *arguments: str, how: str = "") -> subprocess.CompletedProcess[str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        return subprocess.run(
            [sys.executable, *arguments],
            env={**own, "LD_PRELOAD": str(self.emulator), "AMX_EMULATOR": how},
            cwd=self.copy,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    if IS_EMULATED:
        pytest.skip("this is the emulated process")
    if not FLAGS.exists() or "avx512_bf16" not in FLAGS.read_text():
        pytest.skip("AMX is emulated on x86-64 with AVX-512 BF16 alone, which the rest of the variant needs")
    if LIBRARY is None or shutil.which("cc") is None or shutil.which("objdump") is None:
        pytest.skip("no native kernels, or no C compiler and objdump for the emulator")
    folder = tmp_path_factory.mktemp("emulator")
    built, copy = folder / "emulator.so", folder / "copy"
    command = ["cc", "-std=gnu11", "-O3", "-mavx2", "-mfma", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(
        [*command, "-shared", "-fPIC", str(HERE / "amx_emulator.c"), "-o", str(built)], check=True, timeout=240
    )
    for name in ("swarm", "tests"):
        shutil.copytree(REPOSITORY / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", copy)
    make_invalid(copy / SOURCES.relative_to(REPOSITORY) / Path(LIBRARY._name).name)
    return Emulated(built, copy)


def test_the_variant_under_the_emulator(emulated: Emulated) -> None:
    """None of these tests is left out. The process fails if it leaves tiles set up. pytest's own handler of faults
    would stand in the emulator's way."""
    names = ("variants", "amx", "attention", "int8_rows", "quantized_kernels")
    files = [f"tests/model/test_{name}.py" for name in names]
    products = "amx-torch or (amx and (crowds or (every_number and bfloat16) or gated or another_order))"
    wanted = f"{products} or chain or pieces_of or (test_rows and bfloat16 and 20 and not without)"
    options = ["-q", "-p", "no:faulthandler", "-p", "no:cacheprovider", "-k", wanted]
    done = emulated.run("-m", "pytest", *options, *files)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert re.search(r"^\d+ passed, \d+ deselected", done.stdout, re.MULTILINE), done.stdout[-400:]  # none skipped


@pytest.mark.parametrize(
    ("how", "wrong"),
    [
        ("", ""),
        ("forgets", "its products are wrong"),
        ("poisoned", "its products are wrong"),
        ("uneven", "a row has other bits among few rows than among many"),
        ("three bytes", "its products of whole numbers are wrong"),
    ],
    ids=["sound", "forgets", "poisoned", "uneven", "three bytes"],
)
def test_a_processor_that_computes_otherwise(emulated: Emulated, how: str, wrong: str) -> None:
    """The proof at load passes a sound one, and passes over one that is wrong or whose bits depend on the rows."""
    program = (
        "from swarm.stage import native; native.library(); print(native.variant(), native.rejected_variants(), sep=';')"
    )
    done = emulated.run("-c", program, how=how)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == (f"avx512bf16;amx: {wrong}" if wrong else "amx;")
