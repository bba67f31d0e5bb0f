"""Spyglass runs the DeepSeek-V4 family of vision models.

The names below are looked up on first use, so that `import spyglass.prompt` or `spyglass --help` never load torch.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spyglass.config.engine import EngineConfig
    from spyglass.config.training import TrainConfig
    from spyglass.engine import (
        LLM,
        Delta,
        Patches,
        RequestOutput,
        SamplingParams,
        Structured,
        TokenLogprob,
        Usage,
    )
    from spyglass.errors import (
        AdapterError,
        CapacityError,
        CheckpointError,
        ConfigError,
        DeviceError,
        NotServedError,
        OverloadedError,
        PromptError,
        RankError,
        SpyglassError,
    )
    from spyglass.lora.merge import merge_adapter
    from spyglass.train.finetune import finetune

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AdapterError",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "Delta",
    "DeviceError",
    "EngineConfig",
    "NotServedError",
    "OverloadedError",
    "Patches",
    "PromptError",
    "RankError",
    "RequestOutput",
    "SamplingParams",
    "SpyglassError",
    "Structured",
    "TokenLogprob",
    "TrainConfig",
    "Usage",
    "__version__",
    "finetune",
    "merge_adapter",
]


def __getattr__(name: str) -> object:
    if name in ("LLM", "Delta", "Patches", "RequestOutput", "SamplingParams", "Structured", "TokenLogprob", "Usage"):
        import spyglass.engine

        return getattr(spyglass.engine, name)
    if name.endswith("Error") and name in __all__:
        import spyglass.errors

        return getattr(spyglass.errors, name)
    if name == "EngineConfig":
        import spyglass.config.engine

        return spyglass.config.engine.EngineConfig
    if name == "TrainConfig":
        import spyglass.config.training

        return spyglass.config.training.TrainConfig
    if name == "merge_adapter":
        import spyglass.lora.merge

        return spyglass.lora.merge.merge_adapter
    if name == "finetune":
        import spyglass.train.finetune

        return spyglass.train.finetune.finetune
    raise AttributeError(f"module 'spyglass' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
