"""The same bits on unlike processors: every variant of the kernels that can be run here, aarch64's under qemu.

``tests/native`` has a driver in C that computes many cases of every kernel, and a whole small decoder, and prints a
hash of each result. It is linked with the library as it is installed, and built once more for aarch64 from the same
sources. Variants of the portable family must print the same lines.
"""

from __future__ import annotations

import shutil
import subprocess
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swarm.stage import native
from swarm.stage.native.variant_choice import PORTABLE

REPOSITORY = Path(__file__).parents[2]
KERNELS = Path(native.__file__).parent
TESTS = REPOSITORY / "tests" / "native"
DRIVER = [TESTS / "driver.c", TESTS / "decoder.c", TESTS / "quantized.c"]
CROSS, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
OWN_BITS = (
    "dense bfloat16",
    "grouped bfloat16",
    "quantized bfloat16",
    "attend bfloat16",
)  # where bfloat16 is multiplied
PROMPTS = 300
FEW_PROMPTS = 30  # plain C in an emulator takes its time

Command = list[str]
Lines = list[str]

pytestmark = [
    pytest.mark.skipif(native.library() is None, reason=f"no native kernels: {native.unavailable_reason()}"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler"),
]
long = pytest.mark.long
needs_aarch64 = pytest.mark.skipif(
    shutil.which(CROSS) is None or shutil.which(EMULATOR) is None,
    reason=f"no {CROSS} or no {EMULATOR} (Debian: gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)",
)


def flags() -> Command:
    """The package's own, with the compiler's usual complaints as errors."""
    (extension,) = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    return [*extension["extra-compile-args"], "-Wall", "-Wextra", "-Werror", f"-I{KERNELS}"]


def sources() -> list[Path]:
    return [*sorted(KERNELS.glob("*.c")), *sorted(KERNELS.glob("variants/*.c"))]


def macros() -> Command:
    """What the package's build says to the sources: which variants there are, and a digest."""
    names = [f"-DSWARM_HAS_{path.stem.upper()}" for path in sources() if path.parent != KERNELS]
    return ['-DSWARM_NATIVE_SOURCES=""', *names]


def compile_in(folder: Path, command: Sequence[str | Path]) -> None:
    done = subprocess.run([*map(str, command)], cwd=folder, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def compiled(command: Sequence[str | Path], program: Path) -> Path:
    compile_in(program.parent, [*command, "-o", program])
    return program


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """The driver for this processor, with the library that is installed."""
    opened, _ = native.open_library()
    assert opened is not None
    library = Path(opened._name)
    program = tmp_path_factory.mktemp("driver") / "driver"
    return [str(compiled(["cc", *flags(), *DRIVER, library, f"-Wl,-rpath,{library.parent}"], program))]


Build = Callable[[Sequence[Path], Path], Command]


@pytest.fixture(scope="module")
def for_aarch64(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """All kernels for aarch64: makes a program of them and of further sources, and says how it is run."""
    objects = tmp_path_factory.mktemp("aarch64")
    compiler = [CROSS, *flags(), *macros()]
    compile_in(objects, [*compiler, "-c", *sources()])

    def build(further: Sequence[Path], program: Path) -> Command:
        return [EMULATOR, str(compiled([*compiler, "-static", *further, *sorted(objects.glob("*.o")), "-lm"], program))]

    return build


@pytest.fixture(scope="module")
def aarch64(for_aarch64: Build, tmp_path_factory: pytest.TempPathFactory) -> Command:
    return for_aarch64(DRIVER, tmp_path_factory.mktemp("aarch64") / "driver")


def lines(command: Command, *arguments: str) -> Lines:
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, (command, arguments, done.stderr)
    return done.stdout.splitlines()


def all_lines(commands: Sequence[Command]) -> list[Lines]:
    """Two at a time."""
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(lines, commands))


def names_here() -> list[str]:
    opened = native.library()
    return [] if opened is None else native.variants(opened)


def differing(found: Lines, expected: Lines) -> Lines:
    """Names of the cases; they must be the same ones."""
    assert len(found) == len(expected)
    return [line for line, other in zip(found, expected, strict=True) if line != other]


@pytest.fixture(scope="module")
def expected(here: Command) -> Lines:
    """What plain C gives on this processor."""
    return lines(here, "portable", "cases")


def test_every_variant_of_this_processor(here: Command, expected: Lines) -> None:
    """All cases of every kernel: the portable family agrees in all of them, the others in all that isn't a product of
    bfloat16 (rows rounded to int8 are whole numbers). With one thread and with three, and each NaN where the others
    have one."""
    assert len(expected) >= 2100
    for name, found in zip(names_here(), all_lines([[*here, each, "cases"] for each in names_here()]), strict=True):
        unlike = differing(found, expected)
        if name not in PORTABLE:
            unlike = [line for line in unlike if not line.startswith(OWN_BITS)]
        assert unlike == [], name


def same_by_threads(found: Lines) -> int:
    """How many cases were computed with one thread and with three; their lines must differ by their names only."""
    by_case: dict[str, set[str]] = {}
    for line in found:
        name, _, digest = line.rpartition(" ")
        if " threads=" in name:
            by_case.setdefault(name.partition(" threads=")[0], set()).add(digest)
    assert [case for case, digests in by_case.items() if len(digests) != 1] == []
    return len(by_case)


def test_threads_change_nothing(expected: Lines) -> None:
    assert same_by_threads(expected) > 250


def test_a_compiler_that_knows_few_variants() -> None:
    """It may not know the names of what the others need either: they must not stand in what it compiles."""
    (file,) = (path for path in sources() if path.name == "module.c")
    command = ["cc", "-E", *flags(), '-DSWARM_NATIVE_SOURCES=""', "-DSWARM_HAS_AVX2", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "swarm_kernels_portable" in done.stdout
    assert '"avx512bf16"' not in done.stdout


# Plain C, which is not compiled with other instructions there, also computes in test_whole_answers. BFDOT is also asked
# in test_aarch64_proves_itself.
@needs_aarch64
@pytest.mark.parametrize("variant", ["neon", *(pytest.param(name, marks=long) for name in ("neonbf16", "portable"))])
def test_aarch64(aarch64: Command, expected: Lines, variant: str) -> None:
    """NEON and plain C, compiled for another processor: the same bits as here; with BFDOT, in all that isn't a product
    of bfloat16."""
    found = lines([*aarch64, variant, "cases"])
    unlike = differing(found, expected)
    if variant == "neonbf16":
        assert unlike
        unlike = [line for line in unlike if not line.startswith(OWN_BITS)]
    assert unlike == []
    assert same_by_threads(found) > 250


@needs_aarch64
def test_aarch64_proves_itself(for_aarch64: Build, tmp_path: Path) -> None:
    """What every variant is asked at load, of those for aarch64: right, and no row's bits depend on its neighbours."""
    found = lines(for_aarch64([TESTS / "prover.c"], tmp_path / "prover"))
    assert found == ["neonbf16: right", "neon: right", "portable: right"]


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_whole_answers(here: Command, kind: str, request: pytest.FixtureRequest) -> None:
    """A whole small decoder answers hundreds of prompts: the same tokens and the same logits, whichever of the family
    computes, here and on aarch64."""
    family = [name for name in names_here() if name in PORTABLE]
    runs = [[*here, name, "decode", kind, "0", str(PROMPTS)] for name in family]
    if not needs_aarch64.args[0]:
        aarch64 = request.getfixturevalue("aarch64")
        runs.append([*aarch64, "neon", "decode", kind, "0", str(PROMPTS)])
        runs.append([*aarch64, "portable", "decode", kind, "0", str(FEW_PROMPTS)])
    expected, *others = all_lines(runs)
    assert len(expected) == PROMPTS
    assert len({line.split("tokens")[1] for line in expected}) > PROMPTS * 0.9  # a decoder that says one thing is none
    for command, found in zip(runs[1:], others, strict=True):
        assert found == expected[: len(found)], command
        assert len(found) in (PROMPTS, FEW_PROMPTS)


# What a slip of ours or of a compiler's would do: in which header, what stands there, and what would.
SLIPS = {
    "not fused": ("portable.h", "fmaf(a, b, c)", "(a * b + c)"),
    "one bfloat16 in 65,536 rounded the other way": ("portable.h", "0x7fff + (bits >> 16 & 1)", "0x8000"),
    "a quotient by the reciprocal": ("portable.h", "V_EACH2(v_div, a / b)", "V_EACH2(v_div, a * (1.0f / b))"),
    "lanes summed in another order": ("functions.h", "+= lanes[i + width]", "+= lanes[2 * width - 1 - i]"),
}


@pytest.mark.parametrize(
    "slip", [pytest.param(slip, marks=pytest.mark.long if number != 1 else ()) for number, slip in enumerate(SLIPS)]
)
def test_a_slip_shows(tmp_path: Path, expected: Lines, slip: str) -> None:
    """Kernels that differ in no more than this have other lines."""
    kernels = tmp_path / "kernels"
    shutil.copytree(KERNELS, kernels, ignore=shutil.ignore_patterns("*.so", "*.py", "__pycache__"))
    name, right, wrong = SLIPS[slip]
    header = kernels / "simd" / name
    text = header.read_text()
    assert text.count(right) == 1
    header.write_text(text.replace(right, wrong))
    parts = [*DRIVER, TESTS / "alone.c", kernels / "pool.c", kernels / "packing.c", kernels / "variants" / "portable.c"]
    paths = [f"-I{kernels}" if flag == f"-I{KERNELS}" else flag for flag in flags()]
    command = ["cc", *paths, "-DONLY=swarm_kernels_portable", *map(str, parts), "-lm"]
    assert differing(lines([str(compiled(command, tmp_path / "driver"))], "portable", "cases"), expected)
