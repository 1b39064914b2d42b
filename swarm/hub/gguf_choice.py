"""Choice of one of a repository's GGUF models: by quantization, or by file. Pure; asks no hub.

Repositories hold one model in up to thirty quantizations. The file's name has the quantization's name near its end
(``tiny-instruct-Q4_K_M.gguf``). Large models are split (``…-00001-of-00003.gguf``), often in a folder of their own.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from swarm.errors import ModelError
from swarm.hub.gguf import PART
from swarm.hub.names import HubName, parse_name

SUFFIX = ".gguf"
MAX_PARTS = 1000
PREFERRED = "Q4_K_M"  # the example in error messages, if the repository has it

_QUANTIZATION = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|TQ\d(?:_[A-Z0-9]+)*|MXFP4(?:_MOE)?|BF16|F16|FP16|F32))(?=$|[-._/])",
    re.IGNORECASE,
)
# GGUF files that are not language models: projectors of images, and statistics for quantizers.
_OTHER = re.compile(r"mmproj|imatrix", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class GgufChoice:
    """One of a repository's GGUF models."""

    files: tuple[str, ...]  # all of its parts in order, by their paths in the repository
    quantization: str  # by the files' names, in capitals; empty if they have none


def list_models(files: Iterable[str]) -> list[GgufChoice]:
    """Return the GGUF models among a repository's files, without incomplete ones."""
    parts: dict[tuple[str, int], dict[int, str]] = defaultdict(dict)
    for file in files:
        if not _is_model(file):
            continue
        part = PART.fullmatch(file)
        if part is None:
            parts[file.removesuffix(SUFFIX), 1][1] = file
        elif 1 <= int(part["number"]) <= int(part["count"]) <= MAX_PARTS:
            parts[part["stem"], int(part["count"])][int(part["number"])] = file
    return [
        GgufChoice(tuple(numbered[number] for number in sorted(numbered)), _quantization_of(stem))
        for (stem, count), numbered in sorted(parts.items())
        if len(numbered) == count
    ]


def choose_model(name: HubName, models: Collection[GgufChoice]) -> GgufChoice:
    """Return the model that the name chooses, or the only one. Raises ModelError with the choices."""
    if not models:
        raise ModelError(f"{name.repository} has no complete GGUF model; choose another repository")
    fitting = [model for model in models if _fits(name, model)]
    if len(fitting) == 1:
        return fitting[0]
    if not name.has_choice:
        problem = f"{name} has several GGUF models"
    elif fitting:
        files = ", ".join(model.files[0] for model in fitting)
        raise ModelError(f"{name} could be each of {files}; name one of them as {_with_file(name, fitting[0])}")
    else:
        problem = f"{name.repository} has no GGUF model {name.file or name.quantization}"
    example = next((model for model in models if model.quantization == PREFERRED), min(models, key=_order))
    raise ModelError(
        f"{problem}; choose one of {_describe_choices(models)}, as in {_with_choice(name, example, models)}"
    )


def is_model_file(name: str) -> bool:
    """Whether a GGUF file with this name is one of a language model."""
    return not _OTHER.search(name)


def _is_model(file: str) -> bool:
    """Whether this is a GGUF file of a language model, with a path that can be named and stays inside its folder."""
    return parse_name(f"owner/name/{file}") is not None and is_model_file(file.rpartition("/")[2])


def _fits(name: HubName, model: GgufChoice) -> bool:
    if name.file:
        return name.file in model.files
    if not name.quantization:
        return True
    wanted = name.quantization.upper()
    file_names = {file.rpartition("/")[2].upper() for file in model.files}
    return wanted == model.quantization or not file_names.isdisjoint({wanted, wanted + SUFFIX.upper()})


def _quantization_of(stem: str) -> str:
    labels = _QUANTIZATION.findall(stem)
    return labels[-1].upper() if labels else ""


def _order(model: GgufChoice) -> tuple[str, ...]:
    return (model.quantization or "~", *model.files)


def _describe_choices(models: Collection[GgufChoice]) -> str:
    return ", ".join(dict.fromkeys(model.quantization or model.files[0] for model in sorted(models, key=_order)))


def _with_choice(name: HubName, model: GgufChoice, models: Collection[GgufChoice]) -> str:
    """Return a name that chooses this model: by its quantization if no other model has the same."""
    is_unique = sum(other.quantization == model.quantization for other in models) == 1
    if not model.quantization or not is_unique:
        return _with_file(name, model)
    return str(HubName(name.repository, name.revision, quantization=model.quantization))


def _with_file(name: HubName, model: GgufChoice) -> str:
    return str(HubName(name.repository, name.revision, file=model.files[0]))
