"""What a model is and how it is to be run, as frozen data; JSON dialects and the environment end here."""

from spyglass.config.cache import CachePlan, cache_plans
from spyglass.config.engine import EngineConfig, read_engine_config
from spyglass.config.model import (
    CandidatePlan,
    CompressorPlan,
    EngramConfig,
    LayerPlan,
    ModelConfig,
    RopeSpec,
    Rounding,
    TextConfig,
    VisionConfig,
    WeightQuant,
    YarnScaling,
)
from spyglass.config.read import parse_model_config, read_model_config

__all__ = [
    "CachePlan",
    "CandidatePlan",
    "CompressorPlan",
    "EngineConfig",
    "EngramConfig",
    "LayerPlan",
    "ModelConfig",
    "RopeSpec",
    "Rounding",
    "TextConfig",
    "VisionConfig",
    "WeightQuant",
    "YarnScaling",
    "cache_plans",
    "parse_model_config",
    "read_engine_config",
    "read_model_config",
]
