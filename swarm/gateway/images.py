"""Images in conversations: read from data URLs, checked, scaled, and cut into the patches that the model takes.

In the conversation, an image becomes three control tokens: its beginning, a placeholder and its end. After the chat
template and the tokenizer have run, each placeholder is repeated for every token of its image. Nothing is fetched: a
URL of another server is refused.

An image is scaled as transformers does it (``smart_resize``), so that a model sees what it was trained with. Decoding
happens in the threads for prompts, needs Pillow, and is limited before any pixel is decoded.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from swarm.gateway.errors import ApiError, invalid_field
from swarm.params import MAX_IMAGE_SIDE, MAX_PIXEL_BYTES, ImageSpan
from swarm.wire.messages import Vision

if TYPE_CHECKING:
    from swarm.client.text.tokenizer import TextModel
    from swarm.gateway.completion_request import Json
    from swarm.wire.messages import Manifest

IMAGE = "image_url"  # type of a content part that is an image, and its field with the URL
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_MAX_RATIO = 200  # of an image's sides, as in transformers
_DATA_URL = re.compile(r"data:(?:image/[\w.+-]+)?(?:;[\w=.-]+)*?;base64,", re.ASCII)
# types of content parts with texts, and the field that has the text
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text"}


@dataclass(frozen=True, slots=True)
class ImageRules:
    """Limits of a request's images. ``max_pixels``: of an image as it comes. ``max_tokens``: of an image; larger ones
    are shrunk."""

    max_images: int = 16
    max_pixels: int = 32_000_000
    max_tokens: int = 512


DEFAULT_RULES = ImageRules()


@dataclass(frozen=True, slots=True)
class PreparedImage:
    """An image as the model takes it: ``rows`` × ``columns`` tokens, and their pixels as in ``Submit``."""

    rows: int
    columns: int
    pixels: bytes

    @property
    def num_tokens(self) -> int:
        return self.rows * self.columns


class Served(Protocol):
    """The part of a served model that images need."""

    manifest: Manifest
    images: ImageRules

    @property
    def name(self) -> str: ...

    def require_text_model(self, instead: str) -> TextModel: ...


def image_part(url: str) -> Json:
    """Return the content part of an image, as /v1/chat/completions has it."""
    return {"type": IMAGE, IMAGE: {"url": url}}


def have_images(messages: Sequence[Mapping[str, Any]] | None) -> bool:
    """Whether a conversation has images."""
    return any(_is_image(part) for message in messages or () for part in _parts(message))


def take_images(
    messages: Sequence[Json], served: Served, field: str
) -> tuple[tuple[Json, ...], tuple[PreparedImage, ...]]:
    """Return the conversation with control tokens in place of images, and the images in their order. Raises ApiError.

    ``field``: the client's name of the conversation. The texts around an image are joined with it as they are.
    """
    if not have_images(messages):
        return tuple(messages), ()
    vision, rules = served.manifest.vision, served.images
    if vision is None:
        raise invalid_field(field, f"{served.name} reads text only: leave the images out, or use a model that sees")
    mark = _spell_mark(served.require_text_model("it can't take images"), vision)
    images: list[PreparedImage] = []
    taken: list[Json] = []
    for message in messages:
        if not any(_is_image(part) for part in _parts(message)):
            taken.append(message)
            continue
        if message.get("role") != "user":
            raise invalid_field(field, f"a message of the role {message.get('role')!r} has an image: only users' may")
        texts: list[str] = []
        for part in _parts(message):
            if not _is_image(part):
                texts.append(_text_of(part, field))
                continue
            if len(images) == rules.max_images:
                raise invalid_field(field, f"has more than {rules.max_images} images: send fewer")
            images.append(prepare_image(_decode_url(part, field), vision, rules, field))
            texts.append(mark)
        taken.append({**message, "content": "".join(texts)})
    if (size := sum(len(image.pixels) for image in images)) > MAX_PIXEL_BYTES:
        num, most = size // vision.token_bytes, MAX_PIXEL_BYTES // vision.token_bytes
        raise invalid_field(field, f"its images have {num} tokens; at most {most} fit: send fewer or smaller ones")
    return tuple(taken), tuple(images)


def place_images(
    ids: Sequence[int], images: Sequence[PreparedImage], vision: Vision, field: str
) -> tuple[tuple[int, ...], tuple[ImageSpan, ...]]:
    """Return the prompt with all tokens of its images, and their places. Raises ApiError if the text itself has
    placeholders, too, or if the template has left some out."""
    if ids.count(vision.token) != len(images):
        raise invalid_field(field, f"the prompt has {ids.count(vision.token)} placeholders for {len(images)} images")
    placed: list[int] = []
    spans: list[ImageSpan] = []
    for token in ids:
        if token == vision.token:
            image = images[len(spans)]
            digest = hashlib.sha256(image.pixels).hexdigest()
            spans.append(ImageSpan(len(placed), image.rows, image.columns, digest))
            placed += [token] * image.num_tokens
        else:
            placed.append(token)
    return tuple(placed), tuple(spans)


def prepare_image(data: bytes, vision: Vision, rules: ImageRules, field: str) -> PreparedImage:
    """Decode and scale an image, and cut it into patches. Raises ApiError."""
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError  # noqa: PLC0415 (optional)
    except ImportError:
        text = "this gateway can't decode images: install Pillow there (pip install 'swarm-llm[images]')"
        raise ApiError(501, text, param=field, code="images") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
                width, height = image.size
                if width * height > rules.max_pixels:
                    raise invalid_field(field, f"an image has {width} × {height} pixels, at most {rules.max_pixels}")
                upright = ImageOps.exif_transpose(image).convert("RGB")
        height, width = smart_resize(upright.height, upright.width, vision, rules.max_tokens, field)
        scaled = upright.resize((width, height), Image.Resampling.BICUBIC)
    except UnidentifiedImageError:
        raise invalid_field(field, f"an image is of no known format; known are {', '.join(_FORMATS)}") from None
    except (
        OSError,
        ValueError,
        SyntaxError,
        EOFError,
        OverflowError,
        MemoryError,
        Image.DecompressionBombError,
    ) as error:
        raise invalid_field(field, f"an image can't be decoded: {str(error)[:200]}") from None
    side = vision.patch * vision.merge
    return PreparedImage(height // side, width // side, cut_patches(scaled.tobytes(), height, width, vision))


def smart_resize(height: int, width: int, vision: Vision, max_tokens: int, field: str) -> tuple[int, int]:
    """Return the height and width to scale an image to: whole tokens, about its own proportions, and no more pixels
    than the model or ``max_tokens`` allow. Raises ApiError."""
    side = vision.patch * vision.merge
    most = min(vision.most, max_tokens * side * side)
    least = min(vision.least, most)
    if max(height, width) > _MAX_RATIO * min(height, width):
        raise invalid_field(
            field, f"an image has {width} × {height} pixels; one side may be {_MAX_RATIO} times the other"
        )
    high, wide = round(height / side) * side, round(width / side) * side
    if high * wide > most:
        ratio = math.sqrt(height * width / most)
        high = max(side, math.floor(height / ratio / side) * side)
        wide = max(side, math.floor(width / ratio / side) * side)
    elif high * wide < least:
        ratio = math.sqrt(least / (height * width))
        high, wide = math.ceil(height * ratio / side) * side, math.ceil(width * ratio / side) * side
    longest = MAX_IMAGE_SIDE * side
    return min(high, longest), min(wide, longest)


def cut_patches(pixels: bytes, height: int, width: int, vision: Vision) -> bytes:
    """Return an image's pixels, which come row by row, as patches: those of a token together, each colour by colour."""
    import numpy as np  # noqa: PLC0415 (only with images)

    patch, merge = vision.patch, vision.merge
    shape = (height // (patch * merge), merge, patch, width // (patch * merge), merge, patch, 3)
    numbers = np.frombuffer(pixels, np.uint8).reshape(shape)
    return numbers.transpose(0, 3, 1, 4, 6, 2, 5).tobytes()


def _spell_mark(text: TextModel, vision: Vision) -> str:
    """Return an image's control tokens in the words that only the gateway knows: no message can contain them."""
    tokens = [text.tokenizer.id_to_token(token) for token in (vision.begin, vision.token, vision.end)]
    if not all(token in text.spelling.tokens for token in tokens):
        raise ApiError(501, "the tokenizer lacks the tokens of images: serve another copy of the model", code="images")
    return "".join(text.spelling.secret_word(str(token)) for token in tokens)


def _parts(message: Mapping[str, Any]) -> Sequence[object]:
    content = message.get("content")
    return content if isinstance(content, list | tuple) else ()


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == IMAGE


def _text_of(part: object, field: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get(_TEXTS[kind]) if isinstance(part, Mapping) and kind in _TEXTS else None
    if not isinstance(text, str):
        raise invalid_field(field, f"a part of type {kind!r} can't be beside an image: only texts can")
    return text


def _decode_url(part: object, field: str) -> bytes:
    given = part[IMAGE] if isinstance(part, Mapping) and IMAGE in part else None
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str):
        raise invalid_field(field, "an image needs a url")
    match = _DATA_URL.match(url)
    if match is None:
        why = "images are not fetched here, send them as data:image/…;base64,… URLs"
        raise invalid_field(field, f"{why}, not {url[:40]!r}")
    try:
        return base64.b64decode(url[match.end() :], validate=True)
    except (binascii.Error, ValueError):
        raise invalid_field(field, "an image's data is not valid base64") from None
