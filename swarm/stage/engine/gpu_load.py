"""Utilisation of a GPU, as its driver reports it, if the package nvidia-ml-py is installed."""

from __future__ import annotations

import torch

try:
    import pynvml
except ImportError:
    pynvml = None


def gpu_utilization(device: torch.device) -> dict[str, float]:
    """Return the share of the last second in which the GPU computed, for whichever process; nothing if that is not
    known."""
    if pynvml is None:
        return {}
    try:
        return {"device_utilization": torch.cuda.utilization(device) / 100.0}
    except (RuntimeError, OSError, pynvml.NVMLError):
        return {}
