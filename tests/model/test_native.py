"""The kernels in C as a library: there, safe to share between threads, and possible to do without."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

from swarm.stage import native
from swarm.stage.engine import selfcheck
from swarm.stage.matmul import linears
from swarm.stage.model import program
from swarm.stage.modules import attention
from swarm.stage.modules.norms import NativeRmsNorm
from swarm.stage.modules.recognition import same_code
from swarm.stage.native import cores, sources
from swarm.stage.native.linears import NativeLinear
from tests.model.models import ARCHITECTURES, named_config

REPOSITORY = Path(__file__).parents[2]
SOURCES = Path(native.__file__).parent
FLAGS = Path("/proc/cpuinfo")

needs_library = pytest.mark.skipif(native.library() is None, reason=f"no native kernels: {native.unavailable_reason()}")


@pytest.mark.skipif(
    shutil.which("cc") is None or not FLAGS.exists() or "avx512_bf16" not in FLAGS.read_text(),
    reason="no C compiler, or a processor that doesn't multiply bfloat16",
)
def test_they_are_there_where_they_can_be() -> None:
    """An installation that silently lost its kernels would be slow, and nobody would know why."""
    assert native.library() is not None, native.unavailable_reason()


def test_a_process_can_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then torch's kernels are chosen, and the reason is told."""
    monkeypatch.setattr(native, "_refusals", [])
    native.disable("somebody wants to compare")
    assert native.library() is None
    assert native.unavailable_reason() == "somebody wants to compare"
    assert linears.choose_kernel(torch.device("cpu"), torch.bfloat16, (64,)) is not NativeLinear


def test_a_library_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its functions may take other arguments. Where there are no sources, as in a package, it is the package's own."""
    if not list(SOURCES.glob("_native*")):
        pytest.skip(f"no library was built: {native.unavailable_reason()}")
    for found, is_used in (("a digest of other sources", False), ("", True), (sources.digest(SOURCES), True)):
        monkeypatch.setattr(native, "digest", lambda _, found=found: found)
        library, why_not = native.open_library.__wrapped__()
        assert (library is not None) == is_used
        assert ("was built from other sources" in why_not) == (not is_used)


def test_sources_are_known_by_name_and_content(tmp_path: Path) -> None:
    """In the folder and those in it, headers too; a byte more, another name or another file is another digest. Dates
    and other kinds of files don't matter."""
    (tmp_path / "variants").mkdir()
    digests = [sources.digest(tmp_path)]
    assert digests == [""]
    for name, content in (("a.c", "1"), ("b.h", ""), ("variants/a.c", "2"), ("a.c", "12"), ("variants/b.c", "")):
        (tmp_path / name).write_text(content)
        digests.append(sources.digest(tmp_path))
    (tmp_path / "variants/b.c").rename(tmp_path / "variants/c.c")
    digests.append(sources.digest(tmp_path))
    assert len(set(digests)) == len(digests)
    (tmp_path / "a.py").write_text("3")
    os.utime(tmp_path / "a.c", (1, 1))
    assert sources.digest(tmp_path) == digests[-1]


@needs_library
def test_callers_at_the_same_time_disturb_nobody() -> None:
    """A stage warms up while another one computes: whoever finds the helpers busy works alone, with the same bits."""
    torch.manual_seed(3)
    module = NativeLinear(torch.randn(1000, 256).bfloat16(), None)
    rows = [torch.randn(count, 256).bfloat16() for count in (1, 3, 6, 7, 13, 40)]
    expected = [module(each) for each in rows]

    def again(index: int) -> bool:
        with cores.computing(1 + index % 4, 1):
            return all(torch.equal(module(each), right) for each, right in zip(rows, expected, strict=True))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(again, range(200)))


@needs_library
def test_more_threads_than_pieces_or_cores() -> None:
    """Only those who took something are waited for."""
    torch.manual_seed(4)
    module = NativeLinear(torch.randn(130, 64).bfloat16(), torch.randn(130).bfloat16())
    rows = torch.randn(5, 64).bfloat16()
    expected = module(rows)
    for count in (2, 3, 8, 16):
        with cores.computing(count, 5):
            assert torch.equal(module(rows), expected)


@needs_library
def test_the_helpers_end_with_the_process() -> None:
    """A process that used them ends as others do, at once and with its own status."""
    code = (
        "import torch; from swarm.stage.native import cores; from swarm.stage.native.linears import NativeLinear\n"
        "module = NativeLinear(torch.ones(640, 64, dtype=torch.bfloat16), None)\n"
        "with cores.computing(2, 1): module(torch.ones(1, 64, dtype=torch.bfloat16))\n"
        "raise SystemExit(7)"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=120, check=False, cwd=REPOSITORY)
    assert done.returncode == 7


def test_equal_code_around_another_function_is_not_recognised() -> None:
    """GLM's attention reads like Llama's, and rotates otherwise: its module calls another function by the same name."""
    assert same_code(_meta("llama"), LlamaAttention)
    assert not same_code(_meta("glm"), LlamaAttention)


def _meta(kind: str) -> Any:
    """The attention module of a first layer, without weights."""
    config = AutoConfig.for_model(kind, num_hidden_layers=1, pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return model.model.layers[0].self_attn


@needs_library
def test_kernels_that_compute_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are tried on a tiny model of the kind before any weights are read; torch's take their place."""
    config = AutoConfig.for_model("llama", num_hidden_layers=2, pad_token_id=0)
    monkeypatch.setattr(native, "_refusals", [])
    monkeypatch.setattr(program, "_refusals", ["it is the modules that are broken here"])
    selfcheck._difference.cache_clear()
    selfcheck.check_kernels(config, "bfloat16")
    assert native.library() is not None
    selfcheck._difference.cache_clear()
    monkeypatch.setattr(attention.NativeAttention, "_turn_heads", lambda self, rows, *tables: None)
    selfcheck.check_kernels(config, "bfloat16")
    selfcheck._difference.cache_clear()
    assert native.library() is None
    assert "compute LlamaConfig otherwise" in native.unavailable_reason()


@needs_library
def test_rows_of_another_kind_are_refused() -> None:
    """The kernels read memory as they are told: what isn't what they were told must not get that far."""
    module = NativeLinear(torch.randn(64, 32).bfloat16(), None)
    for rows in (torch.randn(2, 32), torch.randn(2, 48).bfloat16()):
        with pytest.raises(ValueError, match="for a matrix of 32 bfloat16 inputs"):
            module(rows)
    norm = NativeRmsNorm(torch.ones(32, dtype=torch.bfloat16), 1e-6)
    with pytest.raises(ValueError, match="for a norm of 32"):
        norm(torch.randn(2, 32))


def test_a_kernel_without_memory_is_an_error() -> None:
    """Not an answer made of whatever lay there."""
    native.check_status(0)
    with pytest.raises(MemoryError, match="no memory"):
        native.check_status(-1)


@needs_library
@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_named_kinds_of_models_are_served_by_them(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them is taken for one that they compute otherwise, experts that are chosen otherwise included."""
    monkeypatch.setattr(native, "_refusals", [])
    selfcheck.check_kernels(named_config(kind), "bfloat16")
    assert native.library() is not None, native.unavailable_reason()
