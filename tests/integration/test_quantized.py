"""Quantized models in real processes: the same tokens however they are cut, batched, chunked and continued."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from swarm import AsyncClient
from swarm.params import SpeculationMode
from swarm.stage import native
from swarm.stage.native.variant_choice import PORTABLE
from tests.faults.zygote import Zygote
from tests.gguf_headers import write_file
from tests.integration.processes import START_S, Processes, figures, free_ports, some_tokens
from tests.model.gguf_files import write_model
from tests.model.models import llama_config, random_model

OPENED = native.library()
FAMILY = [] if OPENED is None else [name for name in native.variants(OPENED) if name in PORTABLE]
needs_kernels = pytest.mark.skipif(OPENED is None, reason=f"no native kernels: {native.unavailable_reason()}")
needs_two = pytest.mark.skipif(len(FAMILY) < 2, reason=f"kernels of the portable family here: {FAMILY or 'none'}")

TOKENS = 24
BEGINNING = [3 + (11 * j) % 450 for j in range(100)]  # three blocks that two prompts have in common
PROMPTS: list[list[int]] = [
    *([3 + (7 * i + j * (i + 1)) % 400 for j in range(length)] for i, length in enumerate((1, 5, 33, 150, 300))),
    [*BEGINNING, 7, 9],
    [*BEGINNING, 8],
]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.9, "seed": 11, "logprobs": 2},
    {"temperature": 0.7, "top_p": 0.9, "seed": 12, "repetition_penalty": 1.2, "logprobs": 0},
]
Answer = list[tuple[tuple[int, ...], tuple[Any, ...]]]


@dataclass(frozen=True)
class Case:
    """A model and how its workers load it. ``words``: in their descriptions in ``swarmctl nodes``."""

    file: str
    dtype: str
    settings: dict[str, str]
    words: tuple[str, ...]


INT4 = {"SWARM_WORKER__WEIGHTS": "int4"}
INT8_ROWS = {"SWARM_WORKER__ACTIVATIONS": "int8"}
CASES = {
    "int4": Case("", "bfloat16", INT4, ("int4 in groups of 32", "int6 in groups of 32")),
    "int4, int8 rows": Case("", "float32", INT4 | INT8_ROWS, ("int4 in groups of 32",)),
    "mixed": Case("tiny-mixed.gguf", "bfloat16", {}, ("Q4_K", "Q6_K", "Q8_0")),
    "mixed, int8 rows": Case("tiny-mixed.gguf", "bfloat16", INT8_ROWS, ("Q4_K", "Q6_K", "Q8_0")),
}


def pick_cases(*names: str) -> pytest.MarkDecorator:
    """Test these cases, and the others in a long check. Two tests have unlike cases, so that each type of weights and
    of activations is in one of them."""
    return pytest.mark.parametrize(
        "case",
        [pytest.param(case, id=name, marks=() if name in names else pytest.mark.long) for name, case in CASES.items()],
    )


def choose_type(name: str, _: object) -> Type:
    """Several types within a layer, as in llama.cpp's mixes. Head and embedding have types of high entropy: blocks of
    the K types are random here, and with such a head few tokens would ever be drawn."""
    if name in ("output.weight", "token_embd.weight"):
        return Type.Q8_0 if name == "output.weight" else Type.Q4_0
    return Type.Q6_K if any(part in name for part in ("attn_v", "ffn_down")) else Type.Q4_K


@pytest.fixture(scope="module")
def files(random_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A plain checkpoint, and a file with several types of blocks in each layer."""
    path = tmp_path_factory.mktemp("files") / "tiny-mixed.gguf"
    config = llama_config(hidden_size=256, intermediate_size=512, num_hidden_layers=4, head_dim=32)
    write_model(path, random_model(config), choose_type)
    return {"": random_llama, path.name: path}


class Quantized(Processes):
    """A swarm whose workers load a case's model."""

    def __init__(
        self, case: Case, files: dict[str, Path], logs: Path, zygote: Zygote, options: dict[str, str] | None = None
    ) -> None:
        settings = case.settings | {"SWARM_WORKER__DTYPE": case.dtype} | (options or {})
        logs.mkdir()
        super().__init__(files[case.file], logs, options=settings, launch=zygote)


async def ask(client: AsyncClient, index: int, speculation: SpeculationMode | None = None) -> Answer:
    """Tokens, and log probabilities to the last bit."""
    options = SAMPLING[index % len(SAMPLING)] | {"speculation": speculation}
    done = await client.generate(PROMPTS[index], max_tokens=TOKENS, ignore_eos=True, timeout=START_S, **options)
    return [(choice.tokens, choice.logprobs) for choice in done.choices]


async def one_by_one(client: AsyncClient) -> list[Answer]:
    return [await ask(client, index) for index in range(len(PROMPTS))]


async def all_at_once(client: AsyncClient, speculation: SpeculationMode | None = None) -> list[Answer]:
    """Ask for all answers at a time. "off": those that were given before are not guessed, and take as many steps."""
    return await asyncio.gather(*(ask(client, index, speculation) for index in range(len(PROMPTS))))


async def nodes(client: AsyncClient) -> list[dict[str, Any]]:
    report: Any = await client.query("nodes")
    return list(report["workers"])


@needs_kernels
@pick_cases("int4", "mixed, int8 rows")
async def test_the_same_tokens_in_every_swarm(
    case: Case, files: dict[str, Path], zygote: Zygote, tmp_path: Path
) -> None:
    """One worker answers one request at a time, and then all of them at once. Two and three workers give the same
    answers, with prompts in chunks, and again from what the prefix cache keeps of them."""
    with Quantized(case, files, tmp_path / "alone", zygote) as swarm:
        swarm.start(1)
        async with AsyncClient(swarm.url, connect_timeout_s=START_S) as client:
            await swarm.until_serving(client, 1)
            for word in case.words:
                assert all(word in str(node["weights"]) + str(node["kernels"]) for node in await nodes(client))
            expected = await one_by_one(client)
            assert len({token for answer in expected for tokens, _ in answer for token in tokens}) > TOKENS
            assert await all_at_once(client) == expected
    for num_workers, chunk in ((2, 32), (3, 7)):
        options = {"SWARM_BROKER__PREFILL_CHUNK": str(chunk), "SWARM_BROKER__STEP_TOKENS": "64"}
        with Quantized(case, files, tmp_path / str(num_workers), zygote, options) as swarm:
            swarm.start(num_workers)
            async with AsyncClient(swarm.url, connect_timeout_s=START_S) as client:
                await swarm.until_serving(client, num_workers)
                assert await all_at_once(client) == expected
                before = await figures(client)
                assert await one_by_one(client) == expected
                assert (await figures(client))["prefix_hits"] > before.get("prefix_hits", 0)


@needs_two
@pick_cases("int4, int8 rows", "mixed")
async def test_layers_move_between_unlike_kernels(
    case: Case, files: dict[str, Path], zygote: Zygote, tmp_path: Path
) -> None:
    """With portable bits, workers with unlike kernels answer as one of them alone; and when one dies in the middle of
    answers, the other computes the rest."""
    portable = {"SWARM_WORKER__BITS": "portable"}
    with Quantized(case, files, tmp_path / "alone", zygote, portable) as swarm:
        swarm.start_broker()
        swarm.start_worker("w0", SWARM_WORKER__KERNELS=FAMILY[-1])
        async with AsyncClient(swarm.url, connect_timeout_s=START_S) as client:
            await swarm.until_serving(client, 1)
            expected = await all_at_once(client)
    with Quantized(case, files, tmp_path / "together", zygote, portable) as swarm:
        swarm.start_broker(2)
        for name, kernels in zip(("w0", "w1"), FAMILY, strict=False):
            swarm.start_worker(name, SWARM_WORKER__KERNELS=kernels)
        async with AsyncClient(swarm.url, connect_timeout_s=START_S) as client:
            await swarm.until_serving(client, 2)
            shown = {str(node["name"]): str(node["kernels"]) for node in await nodes(client)}
            assert (FAMILY[0] in shown["w0"], FAMILY[1] in shown["w1"]) == (True, True), shown
            assert all("portable bits;" in kernels for kernels in shown.values()), shown
            assert await all_at_once(client) == expected
            disturbed = asyncio.create_task(all_at_once(client, "off"))
            await some_tokens(swarm, client, 40)
            swarm.kill("w0")
            assert await disturbed == expected


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def int4_swarm(files: dict[str, Path], zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """One worker with weights of four bits."""
    logs = tmp_path_factory.mktemp("refusals") / "logs"
    with Quantized(CASES["int4"], files, logs, zygote) as swarm:
        swarm.start(1)
        yield swarm


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"SWARM_WORKER__WEIGHTS": "auto"},
            "this swarm's weights are int4, head int6, groups of 32, quantizer 1, and this worker's plain bfloat16: "
            "set worker.weights (--weights)",
        ),
        ({"SWARM_WORKER__WEIGHTS": "int8"}, "and this worker's int8, groups of 32"),
        ({"SWARM_WORKER__WEIGHT_GROUP": "128"}, "and this worker's int4, head int6, groups of 128"),
        ({"SWARM_WORKER__HEAD": "int8"}, "and this worker's int4, head int8, groups of 32"),
        (
            INT8_ROWS,
            "this swarm multiplies activations as bfloat16, and this worker as int8: set worker.activations",
        ),
    ],
    ids=["plain", "int8", "other groups", "another head", "int8 rows"],
)
async def test_a_worker_with_other_weights_is_refused(
    int4_swarm: Processes, settings: dict[str, str], reason: str
) -> None:
    """It ends with the reason and the code that tells a supervisor not to try again; the swarm goes on."""
    async with AsyncClient(int4_swarm.url, connect_timeout_s=START_S) as client:
        await int4_swarm.until_serving(client, 1)
        before = await ask(client, 0)
        int4_swarm.start_worker("other", **settings)
        assert await asyncio.to_thread(int4_swarm.workers.pop("other").wait, 60) == 78
        assert reason in int4_swarm.log("other")
        assert "Traceback" not in int4_swarm.log("other")
        assert await ask(client, 0) == before


def refusal(model: Path, *options: str) -> str:
    """Return why ``swarm up`` refuses a model: with one line, before it starts anything."""
    command = ["up", "--no-http", "--workers", "2", "--port", str(free_ports()), "--model", str(model), *options]
    done = subprocess.run(
        [sys.executable, "-m", "swarm", *command], check=False, capture_output=True, text=True, timeout=START_S
    )
    assert (done.returncode, done.stdout) == (1, ""), done
    (line,) = done.stderr.splitlines()
    assert line.startswith("swarm: ")
    return line


def test_a_truncated_file_is_one_error(files: dict[str, Path], tmp_path: Path) -> None:
    """Wherever it ends: in the data or in the header."""
    content = files["tiny-mixed.gguf"].read_bytes()
    for name, length in (("data", len(content) - 32), ("header", 500)):
        file = tmp_path / f"{name}.gguf"
        file.write_bytes(content[:length])
        assert re.search(rf"{file} .* download it again$", refusal(file))


def test_an_unsupported_type_names_itself_and_what_to_use(tmp_path: Path) -> None:
    def add_blocks(writer: gguf.GGUFWriter) -> None:
        blocks = np.zeros((12, gguf.GGML_QUANT_SIZES[Type.IQ4_XS][1]), np.uint8)
        writer.add_tensor("output.weight", blocks, raw_dtype=Type.IQ4_XS)

    file = write_file(tmp_path / "tiny.gguf", change=add_blocks)
    assert re.search(r"tiny\.gguf stores output\.weight as IQ4_XS, .* use .* such as a Q4_K_M or Q8_0", refusal(file))


def test_a_quantized_file_is_not_quantized_again(files: dict[str, Path]) -> None:
    line = refusal(files["tiny-mixed.gguf"], "--weights", "int4")
    assert re.search(
        r"tiny-mixed is quantized already \(Q4_0, Q4_K, Q6_K, Q8_0\), .* leave worker\.weights at auto", line
    )


def test_a_folder_in_another_format_is_one_error(random_llama: Path, tmp_path: Path) -> None:
    """No worker starts, and the format is named with what to use."""
    folder = tmp_path / "model"
    shutil.copytree(random_llama, folder)
    config = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    line = refusal(folder)
    assert re.search(
        r"quantized with bitsandbytes are not supported; use the original files with worker\.weights", line
    )
