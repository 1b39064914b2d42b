"""Images of a request: what is refused, and what the model gets."""

from __future__ import annotations

import base64
import io
import sys
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps, JpegImagePlugin, WebPImagePlugin
from PIL import ImageFile as ImageFilePlugin
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from swarm.gateway.apis import anthropic, items, ollama
from swarm.gateway.errors import ApiError
from swarm.gateway.images import (
    ImageFile,
    ImageRules,
    PreparedImage,
    cut_patches,
    have_images,
    image_part,
    place_images,
    prepare_image,
    smart_resize,
    take_images,
)
from swarm.params import image_content
from swarm.wire.digests import prefix_digests
from swarm.wire.messages import Vision

VISION = Vision(
    7, 8, 9, patch=16, merge=2, least=1 << 12, most=1 << 20, mean=(0.5,) * 3, std=(0.5,) * 3, num_layers=3, depth=2
)
RULES = ImageRules(max_images=2, max_pixels=1 << 22, max_tokens=64)


class _Spelling:
    tokens = ("<7>", "<8>", "<9>")

    def secret_word(self, token: str) -> str:
        return f"secret{token}"


class _Text:
    spelling = _Spelling()

    class tokenizer:
        @staticmethod
        def id_to_token(token: int) -> str:
            return f"<{token}>"


class _Manifest:
    vision: Vision | None = VISION


class Served:
    """A model that sees, or not."""

    name, images = "seer", RULES

    def __init__(self, vision: Vision | None = VISION) -> None:
        self.manifest = _Manifest()
        self.manifest.vision = vision

    def require_text_model(self, instead: str) -> _Text:
        return _Text()


def picture(width: int, height: int, kind: str = "PNG", seed: int = 3, mode: str = "RGB") -> bytes:
    shape = (height, width) if mode == "L" else (height, width, len(mode))
    numbers = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    file = io.BytesIO()
    Image.fromarray(numbers, mode).save(file, kind)
    return file.getvalue()


def url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def prepared(data: bytes, vision: Vision = VISION) -> PreparedImage:
    return prepare_image(ImageFile(1, data, "messages"), vision, RULES.max_tokens)


def asked(*parts: Any, role: str = "user") -> list[dict[str, Any]]:
    return [{"role": "system", "content": "See."}, {"role": role, "content": list(parts)}]


GOOD = picture(64, 64)


@pytest.mark.parametrize(("width", "height"), [(200, 130), (64, 64), (33, 900), (17, 19), (1024, 768)])
@pytest.mark.parametrize("mode", ["RGB", "RGBA"])
def test_pixels_equal_those_of_transformers(width: int, height: int, mode: str) -> None:
    data = picture(width, height, mode=mode)
    size = {"shortest_edge": VISION.least, "longest_edge": RULES.max_tokens * 32 * 32}
    own = {"image_mean": VISION.mean, "image_std": VISION.std, "patch_size": 16, "merge_size": 2}
    processor = Qwen2VLImageProcessorPil(size=size, **own)
    expected = processor(Image.open(io.BytesIO(data)).convert("RGB"), return_tensors="np")
    image = prepared(data)
    assert [1, image.rows * 2, image.columns * 2] == expected["image_grid_thw"][0].tolist()
    numbers = np.frombuffer(image.pixels, np.uint8).reshape(-1, 3, 1, 256)
    actual = ((numbers / 255 - 0.5) / 0.5).repeat(2, axis=2).reshape(len(numbers), -1)
    assert np.abs(actual - expected["pixel_values"]).max() < 1e-5


def test_patches_of_a_token_come_together() -> None:
    vision = Vision(7, 8, 9, patch=1, merge=2, least=1, most=64, mean=(0.5,) * 3, std=(0.5,) * 3, num_layers=3, depth=2)
    pixels = bytes(number for pixel in range(8) for number in (pixel, 100 + pixel, 200 + pixel))
    patches = np.frombuffer(cut_patches(pixels, 2, 4, vision), np.uint8).reshape(8, 3)
    assert patches[:, 0].tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert patches[0].tolist() == [0, 100, 200]


def test_sizes_are_whole_tokens_within_the_limits() -> None:
    for height, width in ((1, 150), (5000, 4000), (31, 31), (640, 480), (2000, 11)):
        high, wide = smart_resize(height, width, VISION, RULES.max_tokens)
        assert (high % 32, wide % 32) == (0, 0)
        assert VISION.least <= high * wide
        assert high * wide <= RULES.max_tokens * 1024 or min(high, wide) == 32


def test_an_image_becomes_control_tokens_between_its_texts() -> None:
    part = image_part(url(picture(64, 64)))
    messages = asked("What is ", part, {"type": "text", "text": " this?"})
    assert have_images(messages)
    taken, images = take_images(messages, Served(), "messages")  # type: ignore[arg-type]
    assert taken[0] == messages[0]
    assert taken[1]["content"] == "What is secret<8>secret<7>secret<9> this?"
    assert [(image.rows, image.columns) for image in images] == [(2, 2)]


def test_placeholders_are_repeated_for_each_token() -> None:
    images = (PreparedImage(1, 2, b"a"), PreparedImage(2, 2, b"b"))
    ids, spans = place_images((1, 8, 7, 9, 2, 8, 7, 9), images, VISION, "messages")
    assert ids == (1, 8, 7, 7, 9, 2, 8, 7, 7, 7, 7, 9)
    assert [(span.start, span.stop, span.rows) for span in spans] == [(2, 4, 1), (7, 11, 2)]
    assert spans[0].digest != spans[1].digest
    with pytest.raises(ApiError, match="1 placeholders for 2 images"):
        place_images((1, 7, 2), images, VISION, "messages")


def test_images_of_one_colour_in_other_shapes_are_others() -> None:
    """Their pixels are the same bytes, but their tokens' places are not, and so neither are their features."""
    files = [io.BytesIO() for _ in range(3)]
    for file, size in zip(files, ((512, 128), (256, 256), (128, 512)), strict=True):
        Image.new("RGB", size, "white").save(file, "PNG")
    images = [prepared(file.getvalue()) for file in files]
    assert len({image.pixels for image in images}) == 1
    placed = [place_images((8, 7, 9, *range(10, 50)), (image,), VISION, "messages") for image in images]
    assert len({ids for ids, _ in placed}) == 1
    ids, spans = placed[0][0], [span for _, span in placed]
    assert len({image.digest for (image,) in spans}) == 3
    assert len({image_content(span, 0, len(ids)) for span in spans}) == 3
    assert len({prefix_digests(ids, len(ids), "", span) for span in spans}) == 3


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        (asked(image_part("https://example.org/cat.png")), "image 1 is at 'https.* not fetched here"),
        (asked(image_part("data:image/png;base64,%%%")), "image 1 has data that is not valid base64"),
        (asked({"type": "image_url"}), "image 1 needs a url"),
        (asked(image_part(url(b"no image"))), "image 1 is of no known format"),
        (asked(image_part(url(GOOD)), image_part(url(b"no image"))), "image 2 is of no known format"),
        (asked(image_part(url(GOOD)), image_part(url(GOOD[:-200]))), "image 2 can't be decoded"),
        (asked(image_part(url(GOOD)), image_part("cat.png")), "image 2 is at 'cat.png'"),
        (asked(image_part(url(b"")), role="assistant"), "only users' may"),
        (asked(image_part(url(b"")), {"type": "input_audio"}), "'input_audio' can't be beside an image"),
    ],
)
def test_bad_images_get_one_clear_error(messages: list[dict[str, Any]], why: str) -> None:
    with pytest.raises(ApiError, match=why):
        take_images(messages, Served(), "messages")  # type: ignore[arg-type]


def test_too_many_too_large_and_broken_images_are_refused() -> None:
    part = image_part(url(picture(40, 40)))
    with pytest.raises(ApiError, match="more than 2 images"):
        take_images(asked(part, part, part), Served(), "messages")  # type: ignore[arg-type]
    large = asked(image_part(url(picture(4000, 4000, "GIF", mode="L"))))
    with pytest.raises(ApiError, match="image 1 has 4000 × 4000 pixels; a request's images may have 4194304 together"):
        take_images(large, Served(), "messages")  # type: ignore[arg-type]
    with pytest.raises(ApiError, match="image 1 has 900 × 2 pixels; one side may be 200 times"):
        take_images(asked(image_part(url(picture(900, 2)))), Served(), "messages")  # type: ignore[arg-type]


def test_sizes_in_all_heads_are_checked_before_anything_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kilobyte can hold millions of pixels."""
    file = io.BytesIO()
    Image.new("RGB", (2000, 2000)).save(file, "WEBP", lossless=True)
    part = image_part(url(file.getvalue()))
    assert len(file.getvalue()) < 1 << 10
    for plugin in (WebPImagePlugin.WebPImageFile, ImageFilePlugin.ImageFile):
        monkeypatch.setattr(plugin, "load", lambda _: pytest.fail("an image is decoded"))
    why = "image 2 has 2000 × 2000 pixels, and 4000000 are those before it; a request's images may have 4194304"
    with pytest.raises(ApiError, match=why):
        take_images(asked(part, part), Served(), "messages")  # type: ignore[arg-type]


def test_a_photograph_is_decoded_no_larger_than_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which hardly changes what the model gets."""
    width, height = 1600, 1200
    rows, columns = np.mgrid[:height, :width]
    numbers = np.stack((columns * 255 // width, rows * 255 // height, (rows + columns) % 256), axis=2).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(numbers, "RGB").save(file, "JPEG", quality=95)
    decoded: list[tuple[int, int]] = []
    load = JpegImagePlugin.JpegImageFile.load

    def record(image: Any) -> Any:
        decoded.append(image.size)
        return load(image)

    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "load", record)
    image = prepared(file.getvalue())
    assert set(decoded) == {(800, 600)}
    monkeypatch.setattr(JpegImagePlugin.JpegImageFile, "draft", lambda *_: None)
    whole = prepared(file.getvalue())
    assert (image.rows, image.columns) == (whole.rows, whole.columns)
    parts = [np.frombuffer(each.pixels, np.uint8).astype(int) for each in (image, whole)]
    assert 0 < np.abs(parts[0] - parts[1]).mean() < 2


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_are_upright(orientation: int) -> None:
    source, exif, file = Image.open(io.BytesIO(picture(96, 64))), Image.Exif(), io.BytesIO()
    exif[ExifTags.Base.Orientation] = orientation
    source.save(file, "PNG", exif=exif)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(file.getvalue())))
    pixels = cut_patches(upright.tobytes(), upright.height, upright.width, VISION)
    assert prepared(file.getvalue()) == PreparedImage(upright.height // 32, upright.width // 32, pixels)


def test_without_pillow_the_error_names_the_command_of_this_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    monkeypatch.setattr("swarm.gateway.images.install_command", lambda extra: f"uv tool install '.[all,{extra}]'")
    with pytest.raises(ApiError, match=r"install Pillow there \(uv tool install '\.\[all,images\]'\)") as error:
        prepared(b"")
    assert error.value.status == 501


def test_a_model_of_text_only_refuses_images() -> None:
    with pytest.raises(ApiError, match="seer reads text only") as raised:
        take_images(asked(image_part(url(b"x"))), Served(None), "messages")  # type: ignore[arg-type]
    assert raised.value.status == 400


def test_each_apis_images_are_the_same_parts() -> None:
    """Texts keep their places around an image, and instructions and results of tools stay texts."""
    part, text = image_part("data:image/png;base64,aGk="), {"type": "text", "text": "What?"}
    source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    blocks = [{"type": "image", "source": source}, text]
    assert anthropic.to_messages(None, [{"role": "user", "content": blocks}])[0]["content"] == [part, text]
    given = [{"type": "input_image", "image_url": part["image_url"]["url"]}, {"type": "input_text", "text": "What?"}]
    assert items.to_messages([{"role": "user", "content": given}])[0]["content"] == [part, "What?"]
    message = {"role": "user", "content": "What?", "images": ["aGk="]}
    assert ollama.to_messages([message])[0]["content"] == [image_part("data:;base64,aGk="), text]


@pytest.mark.parametrize("start", ["data:image/png;base64,", "data:;base64,", "data:image/jpeg;charset=x;base64,"])
def test_data_urls_are_read(start: str) -> None:
    data = picture(64, 64)
    part = image_part(start + base64.b64encode(data).decode())
    _, images = take_images(asked(part), Served(), "messages")  # type: ignore[arg-type]
    assert images == (prepared(data),)
