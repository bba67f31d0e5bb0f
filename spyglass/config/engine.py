"""How a model is to be run: device, arithmetic, limits. Variables are `SPYGLASS_` and the field's name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from spyglass.config.model import ModelConfig
from spyglass.config.options import PREFIX, about, check_options, read_options
from spyglass.errors import ConfigError

NumbersMode = Literal["on", "strict", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Checked when made. The `help` metadata of each field is also the text of the command line's options.

    Raises:
        ConfigError: a field has a value that means nothing; the message names it.
    """

    device: str = field(default="auto", metadata=about("auto (a GPU if there is one), cpu, cuda or cuda:N"))
    dtype: Literal["auto", "float32", "bfloat16"] = field(
        default="auto", metadata=about("activations: auto (bfloat16, as released), float32 or bfloat16")
    )
    numerics: Literal["auto", "plain", "reference"] = field(
        default="auto",
        metadata=about(
            "plain: no rounding beyond the dtype; reference: round activations, cache rows and index vectors as the "
            "official code does; auto: reference for packed checkpoints, plain for bf16 ones"
        ),
    )
    ops: Literal["auto", "reference"] = field(
        default="auto", metadata=about("auto (the fastest built implementation of each op) or reference")
    )
    numbers: NumbersMode = field(
        default="on",
        metadata=about(
            "before anything is answered, compare each op with its reference: on (an op that differs runs by its "
            "reference, which is told), strict (refuse to start) or off"
        ),
    )
    vision_graphs: Literal["auto", "on", "off"] = field(
        default="auto",
        metadata=about("images through CUDA graphs: on, off or auto (where they can be had: bfloat16 on a GPU)"),
    )
    expand_weights: bool = field(
        default=False, metadata=about("widen packed FP8 and FP4 weights to the activation dtype when loading")
    )
    images: int = field(
        default=600,
        metadata=about("max images in one prompt; 0 leaves the image tower unloaded", low=0),
    )
    max_step_tokens: int = field(
        default=2048, metadata=about("max tokens of one step, of all answers (chunked prefill)", high=1 << 20)
    )
    step_milliseconds: int | None = field(
        default=None,
        metadata=about(
            "how long answers may wait for the prompts and images of others: on a CPU they go on between the layers of "
            "a long step (default: 150), elsewhere a step has as much of prompts as fits by what steps took lately "
            "(default: 1,000; one that is alone may take 8 times as long); 0: no bound",
            low=0,
        ),
    )
    max_sequences: int = field(
        default=64, metadata=about("max answers that run at a time (continuous batching)", high=4096)
    )
    max_length: int | None = field(
        default=None,
        metadata=about(
            "context length: prompt and answer together (default, and at most: the model's own; more is refused)"
        ),
    )
    cache_bytes: int | None = field(
        default=None,
        metadata=about(
            "memory for the KV cache of running answers (default: what is free, less the most a step needs)"
        ),
    )
    gpu_memory_utilization: float | None = field(
        default=None,
        metadata=about(
            "share of the device's memory, 0 to 1, that weights, steps and caches may take with what others hold "
            "(default: all that is free)",
            high=1,
        ),
    )
    prefix_cache_bytes: int | None = field(
        default=None,
        metadata=about(
            "memory for the prefix cache: beginnings of prompts that may come again (default: an eighth of what is "
            "free); 0 keeps none",
            low=0,
        ),
    )
    image_cache_bytes: int = field(
        default=256 << 20, metadata=about("memory for encoded images that may come again; 0 keeps none", low=0)
    )
    grammar_seconds: int = field(
        default=1,
        metadata=about(
            "CPU seconds that a pattern, schema or grammar of an answer may take to compile; its memory is bounded too"
        ),
    )
    engram: Literal["mmap", "host", "device"] = field(
        default="mmap",
        metadata=about(
            "where engram tables are: mmap (left in their files), host (memory) or device (with the weights)"
        ),
    )
    experts: str = field(
        default="auto",
        metadata=about(
            "where routed experts are: gpu (with the other weights), host (in host memory, computed there by the "
            "processor), auto (as many layers' on the GPU as fit beside caches and steps) or auto:GB (at most so many "
            "GB of them there)"
        ),
    )
    async_scheduling: Literal["auto", "on", "off"] = field(
        default="auto",
        metadata=about("start a step before the tokens of the last one are read: on, off or auto (on a GPU)"),
    )
    load: Literal["files", "dummy"] = field(
        default="files",
        metadata=about(
            "dummy: draw random weights at full size instead of reading them, to measure speed and memory; config.json "
            "(or a preset's name in place of a folder) is enough"
        ),
    )
    tensor_parallel_size: int = field(
        default=1,
        metadata=about(
            "processes among which the weights are divided: as many GPUs, or parts of the CPU's cores",
            high=64,
        ),
    )
    threads: int | None = field(
        default=None,
        metadata=about("CPU threads of each process (default: one for each physical core that it may use)", high=1024),
    )

    def __post_init__(self) -> None:
        check_options(self)

    def context_length(self, limit: int) -> int:
        """Max tokens of a prompt with its answer, for a model whose own `limit` that is.

        Raises:
            ConfigError: `max_length` is above the limit.
        """
        if self.max_length is not None and self.max_length > limit:
            raise ConfigError(
                f"max_length (--max-model-len) is {self.max_length:,}, and the context length of this model is "
                f"{limit:,} tokens; give at most that, or leave the option out"
            )
        return limit if self.max_length is None else self.max_length

    def check_model(self, config: ModelConfig) -> None:
        """Whether a model can be run so; nothing of it is read yet. An image that cannot be cut must fit into a step
        (spec v4 6.4).

        Raises:
            ConfigError: `max_length` is above the model's limit, or a step too small for its largest image.
        """
        self.context_length(config.text.max_position_embeddings)
        vision = config.vision
        if (
            vision is not None
            and self.images
            and vision.layout == "paired"
            and self.max_step_tokens < vision.max_tokens
        ):
            raise ConfigError(
                f"max_step_tokens is {self.max_step_tokens}, but an image of this model may take {vision.max_tokens} "
                f"tokens that must run in one step; raise it to at least {vision.max_tokens}, or set images=0"
            )

    @property
    def experts_mode(self) -> Literal["gpu", "host", "auto"]:
        """`experts` without its number."""
        return cast("Literal['gpu', 'host', 'auto']", self.experts.partition(":")[0])

    @property
    def experts_bytes(self) -> int | None:
        """The number of `experts` in bytes; None where there is none."""
        number = self.experts.partition(":")[2]
        return int(float(number) * 1e9) if number else None


def read_engine_config(
    stated: Mapping[str, Any] | None = None, environment: Mapping[str, str] | None = None
) -> EngineConfig:
    """`stated` fields, then `SPYGLASS_*` variables, then defaults. A stated None means "not stated".

    Raises:
        ConfigError: an unknown field or variable, or a value that means nothing.
    """
    return read_options(EngineConfig, PREFIX, stated, environment)
