"""Whole models with quantized weights: near the same model with plain weights, with bits of a row that are its own."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from swarm.stage import native
from swarm.stage.engine import selfcheck
from swarm.stage.engine.selfcheck import MemorySource
from swarm.stage.model.build import ModelSkeleton, Stage, WeightLoader
from swarm.stage.native.quantized import QuantizedLinear
from swarm.stage.quantization.formats import Codes, Minima, Scales, WeightFormat
from swarm.stage.quantization.nearest import quantize_nearest
from swarm.wire.messages import LayerRange
from tests.model.models import ARCHITECTURES, named_config

CPU = torch.device("cpu")
INT4 = WeightFormat("int4", Codes.INT4, 32, offset=8)
ex = selfcheck
