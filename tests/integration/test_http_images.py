"""Images over each API, with the template and tokenizer of a model's folder, from real processes."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText, Qwen2TokenizerFast, Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from swarm import AsyncClient
from swarm.cli.app import app
from swarm.cli.output import run_app
from tests.faults.zygote import Zygote
from tests.integration.gateway import Gateway, events_in, request
from tests.integration.processes import Processes, some_tokens, stages_of
from tests.seeing_model import TEMPLATE, save_seeing_model

Json = dict[str, Any]
NUM_TOKENS = 24
SYSTEM, ASK, THEN = "Look well.", "What is this? ", " And this?"


def picture(width: int, height: int, seed: int) -> tuple[Image.Image, str]:
    """An image of random pixels, and the base64 of its PNG."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    image, file = Image.fromarray(pixels, "RGB"), io.BytesIO()
    image.save(file, "PNG")
    return image, base64.b64encode(file.getvalue()).decode()


IMAGES = [picture(50, 70, 1), picture(33, 120, 2)]
DATA = [data for _, data in IMAGES]
URLS = ["data:image/png;base64," + data for data in DATA]

CHAT: Json = {
    "messages": [
        {"role": "system", "content": SYSTEM},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": ASK},
                {"type": "image_url", "image_url": {"url": URLS[0]}},
                {"type": "text", "text": THEN},
                {"type": "image_url", "image_url": {"url": URLS[1]}},
            ],
        },
    ]
}
RESPONSES: Json = {
    "instructions": SYSTEM,
    "input": [
        {
            "role": "user",
            "content": [
                {"type": "input_text", "text": ASK},
                {"type": "input_image", "image_url": URLS[0]},
                {"type": "input_text", "text": THEN},
                {"type": "input_image", "image_url": URLS[1]},
            ],
        }
    ],
}


def block(data: str) -> Json:
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}


MESSAGES: Json = {
    "system": SYSTEM,
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": ASK}, block(DATA[0]), {"type": "text", "text": THEN}, block(DATA[1])],
        }
    ],
}
# Of each API: its path, the conversation, and its name of the answer's length.
APIS = {
    "chat": ("/v1/chat/completions", CHAT, "max_tokens"),
    "responses": ("/v1/responses", RESPONSES, "max_output_tokens"),
    "messages": ("/v1/messages", MESSAGES, "max_tokens"),
}


class ImageProcessor(Qwen3VLProcessor):  # type: ignore[misc]
    """The model's processor, without its part for films, which needs torchvision."""

    def check_argument_for_proper_class(self, *_: object) -> None:
        pass


@dataclass(frozen=True)
class Swarm:
    processes: Processes
    url: str
    folder: Path


@dataclass(frozen=True)
class Expected:
    """The prompt's ids and the answer of transformers."""

    ids: list[int]
    answer: str


@pytest.fixture(scope="module")
def swarm(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    folder, logs = save_seeing_model(tmp_path_factory.mktemp("model") / "seer"), tmp_path_factory.mktemp("logs")
    with Processes(folder, logs, launch=zygote, options={"SWARM_STATE_DIR": str(logs / "state")}) as processes:
        processes.start(2)
        asyncio.run(until_serving(processes))
        gateway = Gateway(processes.url, logs, options={"SWARM_STATE_DIR": str(logs / "state")})
        try:
            gateway.start()
            yield Swarm(processes, gateway.url, folder)
        finally:
            gateway.stop()


async def until_serving(processes: Processes) -> None:
    async with AsyncClient(processes.url, connect_timeout_s=30.0) as client:
        await processes.until_serving(client, 2)


@pytest.fixture(scope="module")
def expected(swarm: Swarm) -> Expected:
    settings = json.loads((swarm.folder / "preprocessor_config.json").read_text())
    own = {name: settings[name] for name in ("size", "patch_size", "merge_size", "image_mean", "image_std")}
    tokenizer = Qwen2TokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(swarm.folder / "tokenizer.json")),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    processor = ImageProcessor(Qwen2VLImageProcessorPil(**own), tokenizer, None, TEMPLATE)
    content = [{"type": "text", "text": ASK}, {"type": "image", "image": IMAGES[0][0]}]
    content += [{"type": "text", "text": THEN}, {"type": "image", "image": IMAGES[1][0]}]
    messages = [{"role": "system", "content": [{"type": "text", "text": SYSTEM}]}, {"role": "user", "content": content}]
    inputs = processor.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    model = AutoModelForImageTextToText.from_pretrained(swarm.folder, dtype=torch.float32, attn_implementation="eager")
    made = model.eval().generate(**inputs, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
    ids = inputs["input_ids"][0].tolist()
    return Expected(ids, tokenizer.decode(made[0, len(ids) :]))


def ask(url: str, api: str, num_tokens: int = NUM_TOKENS, *, stream: bool = False) -> str:
    """The text of an answer."""
    path, conversation, length = APIS[api]
    body = {"model": "seer", length: num_tokens, "temperature": 0, "ignore_eos": True, "stream": stream}
    status, _, content = request(url + path, body | conversation)
    assert status == 200, content
    if stream:
        return "".join(map(text_of, [event.json for event in events_in(content.decode()) if event.data != "[DONE]"]))
    answer = json.loads(content)
    if api == "chat":
        return str(answer["choices"][0]["message"]["content"])
    parts = answer["content"] if api == "messages" else answer["output"][0]["content"]
    return "".join(part["text"] for part in parts)


def text_of(event: Json) -> str:
    """The text that an event of any API's stream adds."""
    if "choices" in event:
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    if event["type"] == "response.output_text.delta":
        return str(event["delta"])
    return str(event["delta"].get("text", "")) if event["type"] == "content_block_delta" else ""


def test_a_prompt_has_the_ids_of_transformers(swarm: Swarm, expected: Expected) -> None:
    status, _, content = request(swarm.url + "/tokenize", {"model": "seer", **CHAT})
    assert (status, json.loads(content)["tokens"]) == (200, expected.ids)


@pytest.mark.parametrize("api", APIS)
def test_each_api_gives_the_answer_of_transformers(api: str, swarm: Swarm, expected: Expected) -> None:
    assert ask(swarm.url, api) == expected.answer
    assert ask(swarm.url, api, stream=True) == expected.answer


def test_a_batch_has_images(swarm: Swarm, expected: Expected, tmp_path: Path) -> None:
    body = {"model": "seer", "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, **CHAT}
    line = {"custom_id": "c", "method": "POST", "url": APIS["chat"][0], "body": body}
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(json.dumps(line))
    words = ["run", str(source), "--output", str(output), "--gateway", swarm.url]
    assert run_app(lambda: app, "swarm", ["batch", *words]) == 0
    answer = json.loads(output.read_text())["response"]["body"]
    assert answer["choices"][0]["message"]["content"] == expected.answer


def test_a_user_s_text_is_no_image(swarm: Swarm) -> None:
    """Whatever it spells, beside images and without them."""
    spelled = "<|vision_start|><|image_pad|><|vision_end|>"
    text, image = {"type": "text", "text": spelled}, {"type": "image_url", "image_url": {"url": URLS[0]}}
    placeholder = Tokenizer.from_file(str(swarm.folder / "tokenizer.json")).token_to_id("<|image_pad|>")
    contents: list[tuple[Any, int]] = [(spelled, 0), ([text], 0), ([image, text], 6 * 9)]
    for content, num in contents:
        body = {"model": "seer", "messages": [{"role": "user", "content": content}]}
        status, _, answer = request(swarm.url + "/tokenize", body)
        assert (status, json.loads(answer)["tokens"].count(placeholder)) == (200, num)


def test_answers_outlive_their_workers(swarm: Swarm) -> None:
    """The stage with the vision tower, and the one behind it."""
    num = 300
    answers = {api: ask(swarm.url, api, num) for api in APIS}

    async def kill(place: int) -> None:
        async with AsyncClient(swarm.processes.url, connect_timeout_s=30.0) as client:
            await some_tokens(swarm.processes, client, 60)
            name = stages_of(await client.query("nodes"))[place]
            swarm.processes.kill(name)
            swarm.processes.start_worker(f"{name}x")

    for place in (0, 1):
        with ThreadPoolExecutor(len(APIS)) as threads:
            running = {api: threads.submit(ask, swarm.url, api, num, stream=place == 0) for api in APIS}
            asyncio.run(kill(place))
            assert {api: each.result() for api, each in running.items()} == answers
        asyncio.run(until_serving(swarm.processes))
