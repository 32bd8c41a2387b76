"""How much KV a model makes, and how much of it fits where: from configurations alone, without weights or engines."""

from __future__ import annotations

from kvcore.capacity.bits import MEASURED_ON, bits_of
from kvcore.capacity.configs import find_model, read_config
from kvcore.capacity.plan import Place, Plan, PlanRow, plan
from kvcore.capacity.shapes import LayerShape, ModelShape

__all__ = [
    "MEASURED_ON",
    "LayerShape",
    "ModelShape",
    "Place",
    "Plan",
    "PlanRow",
    "bits_of",
    "find_model",
    "plan",
    "read_config",
]
