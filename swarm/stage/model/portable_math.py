"""Powers, logarithms, cosines and sines with the same bits on every processor.

Libraries compute these functions differently on different processors, so the last bits differ. Tables of rotary
positions are made of them, by code that belongs to each model. That code runs unchanged on tensors, and while
:func:`portable_math` is active, its calls of these functions are computed here. Cosines and sines use sums, products
and roundings of float64 numbers, which give the same result on every processor (numpy fuses none of them). Powers,
exponentials and logarithms, of which there are few, are computed with decimal numbers. Results are rounded to the
tensor's own type.
"""

from __future__ import annotations

import decimal
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from swarm.errors import ModelError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Doubles = NDArray[np.float64]

# A quarter turn as three parts. The first two have 27 bits each, so that their products with a number of quarters below
# 2^26 are exact and the angle keeps its last bits.
_QUARTER = (float.fromhex("0x1.921fb54p+0"), float.fromhex("0x1.10b461p-30"), float.fromhex("0x1.a62633145c06ep-58"))
_QUARTERS = float.fromhex("0x1.45f306dc9c883p-1")  # number of quarter turns in an angle of 1
_MAX_ANGLE = 1e8  # radians: a larger angle has too many quarters
_CHUNK = 1 << 14  # numbers computed at a time, so that intermediate results stay in the caches
# fdlibm's polynomials for up to an eighth of a turn, in powers of the angle's square.
_SINE = (
    1.58969099521155010221e-10,
    -2.50507602534068634195e-08,
    2.75573137070700676789e-06,
    -1.98412698298579493134e-04,
    8.33333333332248946124e-03,
    -1.66666666666666324348e-01,
)
_COSINE = (
    -1.13596475577881948265e-11,
    2.08757232129817482790e-09,
    -2.75573143513906633035e-07,
    2.48015872894767294178e-05,
    -1.38888888888741095749e-03,
    4.16666666666666019037e-02,
    -0.5,
)
_DECIMALS = decimal.Context(prec=40, rounding=decimal.ROUND_HALF_EVEN)


def sine(angles: Doubles) -> Doubles:
    """Compute the sine of finite angles up to 10^8."""
    return _wave_in_chunks(angles, 0)


def cosine(angles: Doubles) -> Doubles:
    return _wave_in_chunks(angles, 1)


def _wave_in_chunks(angles: Doubles, num_quarters: int) -> Doubles:
    flat = angles.reshape(-1)
    out = np.empty_like(flat)
    for at in range(0, len(flat), _CHUNK):
        out[at : at + _CHUNK] = _wave(flat[at : at + _CHUNK], num_quarters)
    return out.reshape(angles.shape)


def _wave(angles: Doubles, num_quarters: int) -> Doubles:
    """Compute the sine of these angles plus ``num_quarters`` quarter turns."""
    if not bool((np.abs(angles) <= _MAX_ANGLE).all()):  # False for NaN, too
        raise ModelError(f"rotary positions with angles beyond {_MAX_ANGLE:.0e} can't be computed; shorten the context")
    quarters = np.rint(angles * _QUARTERS)
    rest = angles - quarters * _QUARTER[0]
    rest -= quarters * _QUARTER[1]
    rest -= quarters * _QUARTER[2]
    square = rest * rest
    sines = rest + rest * (square * _polynomial(_SINE, square))
    cosines = 1.0 + square * _polynomial(_COSINE, square)
    which = quarters.astype(np.int64) + num_quarters
    values = np.where(which & 1, cosines, sines)
    return np.where(which & 2, -values, values)


def _polynomial(factors: tuple[float, ...], x: Doubles) -> Doubles:
    result = np.full_like(x, factors[0])
    for factor in factors[1:]:
        result *= x
        result += factor
    return result


def power(base: float, exponent: float) -> float:
    """Raise a positive base to a power."""
    logarithm = _DECIMALS.ln(decimal.Decimal(base))
    return _double(_DECIMALS.exp(_DECIMALS.multiply(logarithm, decimal.Decimal(exponent))))


def exponential(x: float) -> float:
    return _double(_DECIMALS.exp(decimal.Decimal(x)))


def logarithm(x: float) -> float:
    """Compute the natural logarithm of a positive number."""
    return _double(_DECIMALS.ln(decimal.Decimal(x)))


def _double(exact: decimal.Decimal) -> float:
    return float(exact)  # the nearest float64; infinite or 0 if out of range


def portable_math() -> TorchFunctionMode:
    """Return a context manager in which this thread computes with the functions of this module."""
    return _PortableMathMode()


class _PortableMathMode(TorchFunctionMode):
    """Function mode that replaces some functions: torch calls it for every function call."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rule = _FUNCTIONS.get(getattr(func, "__name__", ""))
        if rule is None or kwargs or any(_has_no_data(each) for each in args):
            return func(*args, **(kwargs or {}))
        found = rule(*args)
        return func(*args) if found is None else found


def _has_no_data(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_meta


def _to_tensor(values: Doubles, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(values).to(dtype).to(like.device)


def _doubles(tensor: torch.Tensor) -> Doubles:
    return np.asarray(tensor.detach().cpu().double().numpy())


def _angle_function(function: Callable[[Doubles], Doubles]) -> Callable[..., torch.Tensor | None]:
    def compute(angles: torch.Tensor) -> torch.Tensor | None:
        return _to_tensor(function(_doubles(angles)), angles, angles.dtype) if angles.is_floating_point() else None

    return compute


def _elementwise(function: Callable[[float], float], least: float) -> Callable[..., torch.Tensor | None]:
    """Return a function that applies ``function`` to each element of a tensor.

    It returns None, so that torch computes the tensor instead, if an element is not above ``least`` or not finite.
    """

    def compute(x: torch.Tensor) -> torch.Tensor | None:
        if not x.is_floating_point() or not bool(((x > least) & x.isfinite()).all()):
            return None
        values = _doubles(x)
        return _to_tensor(np.array([function(each) for each in values.flat]).reshape(values.shape), x, x.dtype)

    return compute


def _power(base: torch.Tensor | float, exponent: torch.Tensor | float) -> torch.Tensor | None:
    if isinstance(exponent, int):
        return None  # repeated products, which are rounded the same way everywhere
    like = base if isinstance(base, torch.Tensor) else exponent
    assert isinstance(like, torch.Tensor), "one of the two is a tensor"
    dtype = torch.result_type(base, exponent)
    bases, exponents = np.broadcast_arrays(*(_numbers(each) for each in (base, exponent)))
    if not dtype.is_floating_point or not bool((bases > 0).all()):
        return None
    values = [power(float(b), float(e)) for b, e in zip(bases.flat, exponents.flat, strict=True)]
    return _to_tensor(np.array(values).reshape(bases.shape), like, dtype)


def _numbers(value: torch.Tensor | float) -> Doubles:
    return _doubles(value) if isinstance(value, torch.Tensor) else np.asarray(value, np.float64)


def _polar(size: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    angles = _doubles(angle)
    real, imaginary = (_to_tensor(wave(angles), angle, angle.dtype) for wave in (cosine, sine))
    return torch.complex(size * real, size * imaginary)


_FUNCTIONS: dict[str, Callable[..., torch.Tensor | None]] = {
    "cos": _angle_function(cosine),
    "sin": _angle_function(sine),
    "exp": _elementwise(exponential, -math.inf),
    "log": _elementwise(logarithm, 0.0),
    "pow": _power,
    "__pow__": _power,
    "__rpow__": lambda exponent, base: _power(base, exponent),
    "polar": _polar,
}
