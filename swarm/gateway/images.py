"""Images in conversations: read from data URLs, checked, scaled, and cut into the patches that the model takes.

In the conversation, an image becomes three control tokens: its beginning, a placeholder and its end. After the chat
template and the tokenizer have run, each placeholder is repeated for every token of its image. Nothing is fetched: a
URL of another server is refused.

An image is scaled as transformers does it (``smart_resize``), so that a model sees what it was trained with. Decoding
needs Pillow, and a thread that no prompt of text waits for: a file of a kilobyte can have millions of pixels. All sizes
in the files' heads are checked before any pixel is decoded.
"""

from __future__ import annotations

import base64
import binascii
import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from swarm.gateway.errors import ApiError, invalid_field
from swarm.params import MAX_IMAGE_SIDE, MAX_PIXEL_BYTES, ImageSpan, image_digest
from swarm.version import install_command
from swarm.wire.messages import Vision

if TYPE_CHECKING:
    from swarm.client.text.tokenizer import TextModel
    from swarm.gateway.completion_request import Json
    from swarm.wire.messages import Manifest

IMAGE = "image_url"  # type of a content part that is an image, and its field with the URL
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_MAX_RATIO = 200  # of an image's sides, as in transformers
_DRAFT_FACTOR = 2  # times the size to scale to: as small as a JPEG file may be decoded
# By a file's orientation: how its pixels are turned to be upright. From 5 on, rows become columns.
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
_DATA_URL = re.compile(r"data:(?:image/[\w.+-]+)?(?:;[\w=.-]+)*?;base64,", re.ASCII)
# types of content parts with texts, and the field that has the text
_TEXTS = {"text": "text", "input_text": "text", "output_text": "text"}


@dataclass(frozen=True, slots=True)
class ImageRules:
    """Limits of a request's images. ``max_pixels``: of all of them as they come. ``max_tokens``: of an image; larger
    ones are shrunk."""

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


@dataclass(frozen=True, slots=True)
class ImageFile:
    """Content of an image's file. ``number``: counts the images of a request from 1. ``field``: the client's name of
    the conversation."""

    number: int
    data: bytes
    field: str

    def refuse(self, problem: str) -> ApiError:
        return invalid_field(self.field, f"image {self.number} {problem}")

    @contextmanager
    def opened(self) -> Iterator[Any]:
        """Open the file with Pillow, which reads its head. Raises ApiError, also for errors of the block."""
        try:
            from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 (optional)
        except ImportError:
            text = f"this gateway can't decode images: install Pillow there ({install_command('images')})"
            raise ApiError(501, text, param=self.field, code="images") from None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with Image.open(io.BytesIO(self.data), formats=_FORMATS) as image:
                    yield image
        except UnidentifiedImageError:
            raise self.refuse(f"is of no known format; known are {', '.join(_FORMATS)}") from None
        except (
            OSError,
            ValueError,
            SyntaxError,
            EOFError,
            OverflowError,
            MemoryError,
            Image.DecompressionBombError,
        ) as error:
            raise self.refuse(f"can't be decoded: {str(error)[:200]}") from None


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
    vision, rules = served.manifest.vision, served.images
    if vision is None:
        raise invalid_field(field, f"{served.name} reads text only: leave the images out, or use a model that sees")
    mark = _spell_mark(served.require_text_model("it can't take images"), vision)
    files: list[ImageFile] = []
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
            if len(files) == rules.max_images:
                raise invalid_field(field, f"has more than {rules.max_images} images: send fewer")
            files.append(_decode_url(part, len(files) + 1, field))
            texts.append(mark)
        taken.append({**message, "content": "".join(texts)})
    check_sizes(files, rules.max_pixels)
    images = tuple(prepare_image(file, vision, rules.max_tokens) for file in files)
    if (size := sum(len(image.pixels) for image in images)) > MAX_PIXEL_BYTES:
        num, most = size // vision.token_bytes, MAX_PIXEL_BYTES // vision.token_bytes
        raise invalid_field(field, f"its images have {num} tokens; at most {most} fit: send fewer or smaller ones")
    return tuple(taken), images


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
            digest = image_digest(image.rows, image.columns, image.pixels)
            spans.append(ImageSpan(len(placed), image.rows, image.columns, digest))
            placed += [token] * image.num_tokens
        else:
            placed.append(token)
    return tuple(placed), tuple(spans)


def check_sizes(files: Sequence[ImageFile], max_pixels: int) -> None:
    """Raise ApiError unless images have sides of sizes that can be served, and together at most ``max_pixels``. Decodes
    nothing."""
    total = 0
    for file in files:
        with file.opened() as image:
            width, height = image.size
        if max(width, height) > _MAX_RATIO * min(width, height):
            raise file.refuse(f"has {width} × {height} pixels; one side may be {_MAX_RATIO} times the other")
        total += width * height
        if total > max_pixels:
            before = f", and {total - width * height} are those before it" if total > width * height else ""
            raise file.refuse(
                f"has {width} × {height} pixels{before}; a request's images may have {max_pixels} together: "
                "send fewer or smaller ones"
            )


def prepare_image(file: ImageFile, vision: Vision, max_tokens: int) -> PreparedImage:
    """Decode and scale an image, and cut it into patches. Raises ApiError."""
    with file.opened() as image:
        from PIL import ExifTags, Image  # noqa: PLC0415 (optional)

        orientation = image.getexif().get(ExifTags.Base.Orientation)
        turn, is_sideways = _TURNS.get(orientation), orientation in range(5, 9)
        wide, high = reversed(image.size) if is_sideways else image.size
        height, width = smart_resize(high, wide, vision, max_tokens)
        size = (height, width) if is_sideways else (width, height)
        image.draft(None, tuple(_DRAFT_FACTOR * side for side in size))  # of formats that can be decoded smaller
        # A copy of a large image takes as much memory as the image: none is made of one that has three colours.
        coloured = image if image.mode == "RGB" else image.convert("RGB")
        scaled = coloured.resize(size, Image.Resampling.BICUBIC)
        pixels = (scaled if turn is None else scaled.transpose(Image.Transpose[turn])).tobytes()
    side = vision.patch * vision.merge
    return PreparedImage(height // side, width // side, cut_patches(pixels, height, width, vision))


def smart_resize(height: int, width: int, vision: Vision, max_tokens: int) -> tuple[int, int]:
    """Return the height and width to scale an image to: whole tokens, about its own proportions, and no more pixels
    than the model or ``max_tokens`` allow."""
    side = vision.patch * vision.merge
    most = min(vision.most, max_tokens * side * side)
    least = min(vision.least, most)
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


def _decode_url(part: object, number: int, field: str) -> ImageFile:
    file = ImageFile(number, b"", field)
    given = part[IMAGE] if isinstance(part, Mapping) and IMAGE in part else None
    url = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(url, str):
        raise file.refuse("needs a url")
    match = _DATA_URL.match(url)
    if match is None:
        raise file.refuse(f"is at {url[:40]!r}: images are not fetched here, send them as data:image/…;base64,… URLs")
    try:
        return replace(file, data=base64.b64decode(url[match.end() :], validate=True))
    except (binascii.Error, ValueError):
        raise file.refuse("has data that is not valid base64") from None
