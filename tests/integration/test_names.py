"""Long names: of a model's folder, shown shorter; of a file in it, refused in words and for good."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

from swarm import AsyncClient
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes

LONG = "a-model-with-every-detail-of-its-training-in-its-name-" + 150 * "x" + "-final"


async def test_a_model_with_a_long_name_is_served(random_llama: Path, zygote: Zygote, tmp_path: Path) -> None:
    """Longer than messages carry: it is shown with its beginning, its end and an ellipsis."""
    folder = tmp_path / LONG
    shutil.copytree(random_llama, folder)
    with Processes(folder, tmp_path, launch=zygote) as swarm:
        swarm.start(1)
        async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
            await swarm.until_serving(client, 1)
            status = await client.query("status")
            answer = await client.generate([5, 6, 7], max_tokens=3, ignore_eos=True, timeout=60)
    assert len(answer.tokens) == 3
    shown = str(status["model"])
    assert len(shown) == 128
    assert shown.startswith("a-model-with-every-detail")
    assert "…" in shown
    assert shown.endswith("-final")


async def test_a_worker_that_cannot_introduce_itself_says_so_and_stays_away(
    random_llama: Path, zygote: Zygote, tmp_path: Path
) -> None:
    """A file's name that no message carries: one line names the field, the code says that another start won't help."""
    folder = tmp_path / "model"
    shutil.copytree(random_llama, folder)
    name = 140 * "m" + ".safetensors"
    (folder / "model.safetensors").rename(folder / name)
    tensors = _tensors(folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))
    with Processes(folder, tmp_path, launch=zygote) as swarm:
        swarm.start(1)
        assert await asyncio.to_thread(swarm.workers.pop("w0").wait, 60) == 78
        log = swarm.log("w0")
    (line,) = [line for line in log.splitlines() if "this worker's Hello message is invalid" in line]
    assert "hello.manifest.files[1].name" in json.loads(line)["reason"]
    assert "Traceback" not in log


def _tensors(file: Path) -> list[str]:
    with file.open("rb") as content:
        header = json.loads(content.read(int.from_bytes(content.read(8), "little")))
    return [name for name in header if name != "__metadata__"]
