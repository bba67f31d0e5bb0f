"""What to train, on what, and how: the options of `spyglass finetune`, without torch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from spyglass.config.options import about, check_options
from spyglass.errors import ConfigError

Schedule = Literal["constant", "linear", "cosine"]
LossOn = Literal["assistant", "all"]
EPOCHS = 3  # unless somebody says
_RATE, _RATE_SIZE = 2e-4, 4096  # of adapters, and the hidden size that it is for
MAX_FACTOR = 1e12  # of what fp32 values are multiplied with
_OF_ADAPTERS = ("targets", "rank", "alpha", "rslora", "dropout", "names")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Checked when made; `model`, `data` and `output` are looked at when training starts.

    Raises:
        ConfigError: a field has a value that means nothing; the message names it.
    """

    model: Path
    data: Path
    output: Path
    targets: tuple[str, ...] = field(
        default=("attention", "shared"),
        metadata=about("groups that get an adapter, with commas: attention,compressor,shared,experts,tower,aligner"),
    )
    rank: int = field(default=16, metadata=about("rank of every adapter"))
    alpha: float = field(default=32.0, metadata=about("adapters are scaled by alpha / rank"))
    rslora: bool = field(default=False, metadata=about("by alpha / sqrt(rank) instead"))
    dropout: float = field(default=0.0, metadata=about("share of an adapter's inputs that is dropped"))
    full: bool = field(
        default=False, metadata=about("train every weight instead of adapters; the output is a checkpoint")
    )
    epochs: int | None = field(default=None, metadata=about("passes over the data (default: 3)"))
    steps: int | None = field(default=None, metadata=about("steps, instead of passes (--epochs)"))
    batch_tokens: int = field(
        default=4096, metadata=about("max tokens of a micro-batch, and of a chat, images included")
    )
    batch_chats: int = field(
        default=8, metadata=about("max chats of a micro-batch, so that a small file makes many steps")
    )
    accumulate: int = field(default=1, metadata=about("micro-batches of a step, over all processes"))
    lr: float | None = field(
        default=None,
        metadata=about(
            "highest learning rate (default: 2e-4 for a hidden size of 4,096, of adapters of smaller models more)"
        ),
    )
    weight_decay: float = field(default=0.0, metadata=about("of AdamW"))
    schedule: Schedule = field(default="cosine", metadata=about("how the rate falls: constant, linear or cosine, to 0"))
    warmup: int = field(default=10, metadata=about("steps in which it rises first, at most half of all", low=0))
    clip: float = field(default=1.0, metadata=about("longest gradient of a step; longer ones are scaled down"))
    seed: int = field(default=0, metadata=about("of the order of the data, of new adapters and of dropout", low=0))
    loss_on: LossOn = field(
        default="assistant", metadata=about("what is learnt: the assistant's tokens, or all that are text")
    )
    eval_data: Path | None = field(
        default=None,
        metadata=about(
            "chats that are not learnt: their loss and exact match are told, and the adapter of the best step is kept"
        ),
    )
    eval_every: int = field(default=20, metadata=about("steps between measurements of --eval-data"))
    eval_answers: int = field(
        default=16,
        metadata=about(
            "answers to --eval-data, spread over the file, that each measurement compares with the right ones, in at "
            "most 32 forward passes of a micro-batch, or 2 for each answer if that is more; 0 none",
            low=0,
        ),
    )
    patience: int = field(
        default=5, metadata=about("end after so many measurements without a better one; 0 never", low=0)
    )
    skip_bad: bool = field(default=False, metadata=about("leave out lines that cannot be used, naming them"))
    checkpointing: bool = field(
        default=True, metadata=about("compute layers again for the gradient, instead of keeping what is inside them")
    )
    resume: bool = field(default=False, metadata=about("go on with the run in the output folder, if it holds one"))
    wandb: str | None = field(
        default=None, metadata=about("also log to this project of Weights & Biases, where wandb is installed")
    )
    save_every: int = field(default=100, metadata=about("steps between saved states; the last is always saved"))
    minutes: float | None = field(default=None, metadata=about("save and stop after so long; resume with --resume"))
    names: Literal["official", "hf"] = field(
        default="official", metadata=about("names of the adapter's modules: official, or those of Transformers")
    )
    device: str = field(default="auto", metadata=about("auto (a GPU if there is one), cpu, cuda or cuda:N"))
    dtype: Literal["auto", "float32", "bfloat16"] = field(
        default="auto", metadata=about("activations: auto (bfloat16, as released), float32 or bfloat16")
    )
    numerics: Literal["auto", "plain", "reference"] = field(
        default="auto", metadata=about("rounding of activations, as in `spyglass run`")
    )

    def rate(self, hidden_size: int) -> float:
        """The highest learning rate for a model: `lr`, or the default.

        What an adapter changes is a product of two thin matrices, and in thin models it takes larger ones to change
        as much: the default is 2e-4 (4096 / hidden_size)^0.8, of a whole model 2e-4.
        """
        if self.lr is not None:
            return self.lr
        return _RATE if self.full else _RATE * (_RATE_SIZE / hidden_size) ** 0.8

    def __post_init__(self) -> None:
        check_options(self)
        self._check_numbers()
        if self.full:
            self._refuse_adapter_options()

    def _check_numbers(self) -> None:
        if self.full and self.eval_data is not None:
            raise ConfigError("eval_data goes with adapters; with full, measure the checkpoint afterwards")
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(f"steps ({self.steps}) and epochs ({self.epochs}) both say how long; give one of them")
        for name in ("alpha", "clip", *(["lr"] if self.lr is not None else [])):
            if not 0 < getattr(self, name) <= MAX_FACTOR:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected a number above 0, at most {MAX_FACTOR:g}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout is {self.dropout}, expected a share from 0 to below 1")
        if not 0 <= self.weight_decay <= MAX_FACTOR:
            raise ConfigError(f"weight_decay is {self.weight_decay}, expected a number from 0 to {MAX_FACTOR:g}")
        if self.minutes is not None and not self.minutes >= 0:
            raise ConfigError(f"minutes is {self.minutes}, expected a number of at least 0")

    def _refuse_adapter_options(self) -> None:
        """An option that would do nothing was meant for another run, or for another option than `full`."""
        idle = [
            item.name for item in fields(self) if item.name in _OF_ADAPTERS and getattr(self, item.name) != item.default
        ]
        if idle:
            raise ConfigError(
                f"full trains every weight and makes no adapter, so {', '.join(idle)} would do nothing; leave that or "
                "full out"
            )
