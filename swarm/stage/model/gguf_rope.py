"""Rotary positions of a model in a GGUF file, as transformers' ``rope_parameters``. Does not import torch."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any

from swarm.errors import ModelError
from swarm.hub.gguf import ROPE_DIVISORS
from swarm.stage.model.gguf_metadata import GgufMetadata

_LONG_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")


def rope_theta(metadata: GgufMetadata, default: float = 10000.0) -> float:
    theta = metadata.number("rope.freq_base", default)
    if theta <= 1:
        raise ModelError(f"{metadata.path} has the base {theta} for its rotary positions; download it again")
    return theta


def rope_parameters(metadata: GgufMetadata, size: int, *, theta: float | None = None) -> dict[str, Any]:
    """Return the parameters for heads of which ``size`` numbers are rotated. Raises ``ModelError``."""
    theta = rope_theta(metadata) if theta is None else theta
    factor = metadata.number("rope.scaling.factor", 0.0)
    kind = metadata.raw("rope.scaling.type") or ("linear" if factor else "none")
    original = metadata.integer("rope.scaling.original_context_length", metadata.integer("context_length"))
    # The first multiplies what YaRN multiplies queries and keys with, the second replaces it.
    more, attention = (metadata.number(f"rope.scaling.{name}", 1.0) for name in ("attn_factor", "yarn_attn_factor"))
    metadata.require("rope.scaling.yarn_ext_factor", 1.0)
    metadata.require("rope.scaling.yarn_log_multiplier", 0.0)
    metadata.require("rope.scaling.alpha", 0.0, 1.0)
    fast = metadata.number("rope.scaling.yarn_beta_fast", 32.0)
    slow = metadata.number("rope.scaling.yarn_beta_slow", 1.0)
    if kind == "longrope" or any(name in metadata.model.tensors for name in _LONG_FACTORS):
        raise ModelError(
            f"{metadata.path}: rotary positions that depend on the whole batch's length (longrope) can't be served; "
            "use a model with another context length"
        )
    if kind == "yarn" and factor > 0:
        parameters = {"rope_type": "yarn", "rope_theta": theta, "factor": factor}
        parameters |= {"original_max_position_embeddings": original, "beta_fast": fast, "beta_slow": slow}
        if attention != 1 or more != 1:
            usual = 1 + 0.1 * math.log(factor) if factor > 1 else 1.0
            parameters["attention_factor"] = more * (usual if attention == 1 else attention)
        return parameters
    if more != 1 or kind not in ("none", "linear", "yarn"):
        raise ModelError(f"{metadata.path} scales its rotary positions in a way that is not supported ({kind})")
    if kind != "none" and factor not in (0, 1):
        return {"rope_type": kind, "rope_theta": theta, "factor": factor}
    if ROPE_DIVISORS in metadata.model.tensors:
        return _llama3_parameters(metadata, size, theta)
    return {"rope_type": "default", "rope_theta": theta}


def _llama3_parameters(metadata: GgufMetadata, size: int, theta: float) -> dict[str, Any]:
    """Find the parameters of Llama 3's scaling. The file has only their result: a divisor for each frequency."""
    divisors = _read_divisors(metadata, size // 2)
    if max(divisors) == 1:
        return {"rope_type": "default", "rope_theta": theta}
    for low, high, original in ((1.0, 4.0, 8192), *_solve(divisors, size, theta)):
        parameters = {
            "rope_type": "llama3",
            "rope_theta": theta,
            "factor": float(f"{max(divisors):.6g}"),
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
        expected = _llama3_divisors(parameters, size)
        if all(math.isclose(one, other, rel_tol=1e-5) for one, other in zip(divisors, expected, strict=True)):
            return parameters
    raise ModelError(f"{metadata.path}: {ROPE_DIVISORS} scales the rotary positions in a way that is not supported")


def _llama3_divisors(parameters: dict[str, Any], size: int) -> list[float]:
    factor, low, high = (parameters[name] for name in ("factor", "low_freq_factor", "high_freq_factor"))
    original = parameters["original_max_position_embeddings"]
    divisors = []
    for index in range(size // 2):
        length = 2 * math.pi * parameters["rope_theta"] ** (2 * index / size)
        if length < original / high:
            divisors.append(1.0)
        elif length > original / low:
            divisors.append(factor)
        else:
            smooth = (original / length - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


def _solve(divisors: Sequence[float], size: int, theta: float) -> list[tuple[float, float, int]]:
    """Return (low_freq_factor, high_freq_factor, original context) that fit two divisors between the extremes.

    Only the ratios of the three can be found: low_freq_factor is taken as 1.
    """
    factor = max(divisors)
    points = []
    for index, divisor in enumerate(divisors):
        if 1 < divisor < factor:
            smooth = (1 / divisor - 1 / factor) / (1 - 1 / factor)
            points.append((1 / (2 * math.pi * theta ** (2 * index / size)), smooth))
    if len(points) < 2 or points[0][1] <= points[-1][1]:
        return []
    (x, y), (x2, y2) = points[0], points[-1]
    slope = (y - y2) / (x - x2)  # original / (high - low)
    offset = slope * x - y  # low / (high - low)
    if offset <= 0:
        return []
    return [(1.0, round(1 + 1 / offset, 4), round(slope / offset))]


def _read_divisors(metadata: GgufMetadata, count: int) -> tuple[float, ...]:
    stored, data = metadata.model.tensors[ROPE_DIVISORS], metadata.model.rope_divisors
    if stored.dtype != "F32" or stored.shape != (count,) or len(data) != 4 * count:
        raise ModelError(f"{stored.path} has {ROPE_DIVISORS} of another size than {count} float32; download it again")
    divisors: tuple[float, ...] = struct.unpack(f"<{count}f", data)
    if not all(math.isfinite(divisor) and divisor >= 1 for divisor in divisors):
        raise ModelError(f"{stored.path} has unusable numbers in {ROPE_DIVISORS}; download it again")
    return divisors
