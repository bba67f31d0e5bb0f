"""The training loop: micro-batches to gradients, gradients to a step; it can stop anywhere and go on as if it had not.

One step is `accumulate` micro-batches over all processes. Their losses are sums over target tokens, and gradients are
divided by the number of targets of the whole step: how a batch is cut changes nothing. A micro-batch is known by its
number alone, and random numbers are seeded from it, so a run's state is its leaves, its optimisers and a step count.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from spyglass.config.training import Schedule
from spyglass.errors import CheckpointError, ConfigError, SpyglassError
from spyglass.parallel.fsdp import Processes
from spyglass.train.log import HeldOutRow, Row, TrainLog
from spyglass.train.state import State, load_state, save_state
from spyglass.train.stopping import asked_to_stop

ALONE = Processes()
_MUST_AGREE = ("steps", "accumulate", "schedule", "warmup", "final", "clip", "seed")  # or a resumed run is another one


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopOptions:
    """How to train. Rates are those of the optimisers, times a factor that `schedule` takes from 1 to `final`.

    `warmup`: steps over which the factor rises to 1 first. `clip`: largest norm of a step's gradient, None = any.
    `save_every`: steps between saved states (the last is always saved), `minutes`: save and stop after so long.
    `log_every`: steps between reads of the loss from the device.
    """

    steps: int
    accumulate: int = 1
    schedule: Schedule = "cosine"
    warmup: int = 0
    final: float = 0.0
    clip: float | None = 1.0
    seed: int = 0
    save_every: int = 100
    minutes: float | None = None
    log_every: int = 1
    wandb: str | None = None  # a project of Weights & Biases that gets the log too


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroLoss:
    """Loss of one micro-batch: the sum over its target tokens, differentiable; how many they are; rows and images."""

    loss: torch.Tensor
    targets: torch.Tensor | int
    tokens: int = 0
    images: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is trained.

    `leaves` by name, all of which the optimisers hold between them; `loss(number)` runs micro-batch `number` forward.
    `extra` tensors are saved and restored in place with the leaves; `after_step(step)` runs when leaves have changed,
    `restored` when a saved state has been put into them. `enough()`, asked after each step, may end the run as
    finished. `measured()`: rows of held-out chats for the log. A run is resumed only with the `facts` (of JSON) it
    began with: they tell it from others that train the same leaves.
    """

    leaves: Mapping[str, torch.Tensor]
    optimisers: Sequence[torch.optim.Optimizer]
    loss: Callable[[int], MicroLoss]
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)
    after_step: Callable[[int], None] | None = None
    restored: Callable[[], None] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    enough: Callable[[], bool] | None = None
    measured: Callable[[], list[HeldOutRow]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopResult:
    """`step`s done; `finished` False if the run was interrupted and may be resumed. `loss` of the last step,
    NaN if none was left to do.
    """

    step: int
    finished: bool
    loss: float


def adamw(
    groups: Sequence[Mapping[str, Any]], *, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8
) -> torch.optim.AdamW:
    """AdamW over groups `{"params": leaves, "lr": peak rate, "weight_decay": x}`; a kernel per group on a GPU.

    Leaves that processes share and leaves that each holds whole come apart: one kernel does not take both.
    """
    on_gpu = all(leaf.device.type == "cuda" for group in groups for leaf in group["params"])
    apart = [
        {**group, "params": [leaf for leaf in group["params"] if type(leaf) is kind]}
        for group in groups
        for kind in dict.fromkeys(map(type, group["params"]))
    ]
    return torch.optim.AdamW(apart, betas=betas, eps=eps, fused=on_gpu or None)


def train(
    task: Task,
    options: LoopOptions,
    folder: Path,
    *,
    resume: bool = False,
    processes: Processes = ALONE,
    progress: bool = True,
) -> LoopResult:
    """Run to the end, to `options.minutes`, or until SIGINT or SIGTERM asks to stop; state and logs lie in `folder`.

    The loop seeds torch's generators. `resume` goes on from the state in `folder`, or begins if there is none.

    Raises:
        ConfigError: options that contradict each other, the number of processes, or the run that is resumed.
        CheckpointError: the saved state is damaged, or it or the log cannot be written.
        SpyglassError: the loss, a gradient or a leaf is no finite number; the last good state stays.
    """
    check_options(options, processes)
    done = _restore(task, options, folder, processes) if resume else 0
    log, ended = None, False
    if processes.rank == 0:
        log = TrainLog(folder, done=done, steps=options.steps, progress=progress, wandb=options.wandb)
    try:
        result = _Loop(task, options, folder, processes, log).run(done)
        ended = True
        return result
    finally:
        if log is not None:  # a disk that is full may fail twice: the first error is the one that is raised
            with contextlib.nullcontext() if ended else contextlib.suppress(CheckpointError):
                log.close()


def check_options(options: LoopOptions, processes: Processes = ALONE) -> None:
    """Raises ConfigError for options that mean nothing."""
    for name, least in (("steps", 1), ("accumulate", 1), ("log_every", 1), ("warmup", 0), ("save_every", 1)):
        value = asdict(options)[name]
        if value < least:
            raise ConfigError(f"{name} is {value}, expected a whole number of at least {least}")
    if options.clip is not None and not options.clip > 0:
        raise ConfigError(f"clip is {options.clip}, expected a number above 0, or None for no clipping")
    if options.accumulate % processes.count:
        raise ConfigError(
            f"accumulate is {options.accumulate} micro-batches a step, which {processes.count} processes cannot share; "
            f"use a multiple of {processes.count}"
        )


def rate_factor(step: int, options: LoopOptions) -> float:
    """What the peak rate is multiplied with in step `step` (from 0): a linear rise, then the schedule.

    With x the share of the steps after the rise that are done: linear 1 - (1 - final) x, cosine
    final + (1 - final) (1 + cos π x) / 2.
    """
    if step < options.warmup:
        return (step + 1) / (options.warmup + 1)
    x = (step - options.warmup) / max(options.steps - options.warmup, 1)
    if options.schedule == "constant":
        return 1.0
    share = 1 - x if options.schedule == "linear" else (1 + math.cos(math.pi * x)) / 2
    return options.final + (1 - options.final) * share


@dataclass(frozen=True, slots=True)
class _Pending:
    """A step whose numbers are still on the device."""

    step: int
    rate: float
    loss: torch.Tensor
    targets: torch.Tensor
    norm: torch.Tensor
    tokens: torch.Tensor
    images: torch.Tensor


class _Loop:
    """One call of `train`."""

    def __init__(
        self, task: Task, options: LoopOptions, folder: Path, processes: Processes, log: TrainLog | None
    ) -> None:
        self._task, self._options, self._folder = task, options, folder
        self._processes, self._log = processes, log
        self._groups = [group for optimiser in task.optimisers for group in optimiser.param_groups]
        self._peaks = [group["lr"] for group in self._groups]
        self._pending: list[_Pending] = []
        self._last = math.nan
        self._since = time.perf_counter()

    def run(self, done: int) -> LoopResult:
        options, started, over = self._options, time.perf_counter(), False
        with asked_to_stop(signal.SIGINT, signal.SIGTERM) as asked:
            while done < options.steps and not over:
                self._pending.append(self._step(done))
                done += 1
                over = self._task.enough is not None and self._task.enough()
                timed_out = options.minutes is not None and time.perf_counter() - started >= 60 * options.minutes
                stop = self._any(asked.is_set() or timed_out)
                if stop or over or done % options.save_every == 0 or done == options.steps:
                    self._flush()
                    self._save(done)
                if stop:
                    break
                if done % options.log_every == 0:
                    self._flush()
        return LoopResult(step=done, finished=over or done == options.steps, loss=self._last)

    def _step(self, step: int) -> _Pending:
        task, options = self._task, self._options
        factor = rate_factor(step, options)
        for group, peak in zip(self._groups, self._peaks, strict=True):
            group["lr"] = peak * factor
        loss, targets, tokens, images = self._gradients(step)
        norm = self._scale_and_clip(targets)
        for optimiser in task.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        if task.after_step is not None:
            task.after_step(step)
        rate = self._peaks[0] * factor
        return _Pending(step + 1, rate, loss, targets, norm, tokens, images)

    def _gradients(self, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of the summed loss into the leaves; the sum, targets, rows and images over all processes."""
        accumulate, count = self._options.accumulate, self._processes.count
        device = next(iter(self._task.leaves.values())).device
        sums = torch.zeros(4, dtype=torch.float64, device=device)
        for micro in range(self._processes.rank, accumulate, count):
            number = step * accumulate + micro
            torch.manual_seed(_seed(self._options.seed, number))
            part = self._task.loss(number)
            part.loss.backward()
            sums[0] += part.loss.detach()
            sums[1] += part.targets
            sums[2] += part.tokens
            sums[3] += part.images
        sums = self._processes.total(sums)
        return sums[0], sums[1], sums[2], sums[3]

    def _scale_and_clip(self, targets: torch.Tensor) -> torch.Tensor:
        """Sums become means over the step's targets; the result is the norm before clipping."""
        leaves = self._task.leaves.values()
        if self._processes.count == 1 and all(leaf.grad is None for leaf in leaves):
            raise SpyglassError("no gradient reached anything that is trained; choose other targets")
        self._processes.sum_gradients(leaves)
        grads = [leaf.grad for leaf in leaves if leaf.grad is not None]
        norm = self._processes.norm(grads) / targets
        scale = 1 / targets
        if self._options.clip is not None:
            scale = scale * (self._options.clip / (norm + 1e-6)).clamp(max=1)
        self._processes.scale(grads, scale.float())
        return norm

    def _any(self, stop: bool) -> bool:
        """Whether any process has been asked to stop: all stop after the same step."""
        if self._processes.count == 1:
            return stop
        return bool(self._processes.total(torch.tensor(float(stop))).item())

    def _flush(self) -> None:
        """Read the numbers of the steps behind us from the device, check and log them."""
        now, count = time.perf_counter(), max(len(self._pending), 1)
        seconds = (now - self._since) / count
        rows = []
        for step in self._pending:
            total, targets, norm = float(step.loss), int(step.targets), float(step.norm)
            if not (math.isfinite(total) and math.isfinite(norm)) or targets == 0:
                raise _astray(step.step, f"the loss is {total} of {targets} target tokens, its gradient {norm}")
            self._last = total / targets
            rows.append(
                Row(
                    step=step.step,
                    loss=self._last,
                    rate=step.rate,
                    norm=norm,
                    targets=targets,
                    tokens=int(step.tokens),
                    images=int(step.images),
                    seconds=seconds,
                )
            )
        self._pending.clear()
        self._since = now
        if self._log is not None:
            self._log.add(rows, self._task.measured() if self._task.measured else ())

    def _save(self, done: int) -> None:
        tensors = state_tensors(self._task, self._processes)
        if not all(tensor.isfinite().all() for tensor in tensors.values()):
            raise _astray(done, "what is trained holds numbers that are not finite")
        if self._processes.rank == 0:
            save_state(self._folder, State(step=done, tensors=tensors, facts=_facts(self._task, self._options)))


def _astray(step: int, what: str) -> SpyglassError:
    return SpyglassError(
        f"step {step}: {what}; training cannot go on from here. A resumed run keeps its rate: begin another, in "
        "another folder, with a lower learning rate or a longer warm-up"
    )


def state_tensors(task: Task, processes: Processes = ALONE) -> dict[str, torch.Tensor]:
    """Everything that a run changes, by name: `leaf.<name>`, `extra.<name>`, `optimiser.<key>.<name>`."""
    out = {f"leaf.{name}": processes.whole(leaf.detach()) for name, leaf in task.leaves.items()}
    out |= {f"extra.{name}": tensor for name, tensor in task.extra.items()}
    for name, leaf in task.leaves.items():
        for key, value in _optimiser_state(task, leaf).items():
            out[f"optimiser.{key}.{name}"] = processes.whole(value)
    return out


def _optimiser_state(task: Task, leaf: torch.Tensor) -> Mapping[str, torch.Tensor]:
    for optimiser in task.optimisers:
        if leaf in optimiser.state:
            state: Mapping[str, torch.Tensor] = optimiser.state[leaf]
            assert all(isinstance(value, torch.Tensor) for value in state.values()), "only tensors are saved"
            return state
    return {}


@torch.no_grad()
def _restore(task: Task, options: LoopOptions, folder: Path, processes: Processes) -> int:
    """Put the saved state in place; the number of steps it has behind it."""
    state = load_state(folder)
    _refuse_own_folders(0 if state is None else state.step, folder, processes)
    if state is None:
        return 0
    asked = _facts(task, options)
    held = {name: state.facts.get(name) for name in asked}
    other = [f"{name} {held[name]}, this one has {asked[name]}" for name in asked if held[name] != asked[name]]
    if other:
        raise ConfigError(
            f"{folder} holds a run with {'; with '.join(other)}; resume with the model, data and options it was "
            "started with, or choose another folder"
        )
    expected = {f"leaf.{name}" for name in task.leaves} | {f"extra.{name}" for name in task.extra}
    found = {name for name in state.tensors if not name.startswith("optimiser.")}
    if found != expected:
        odd = ", ".join(sorted(found ^ expected)[:5])
        raise ConfigError(f"{folder} holds a run that trains something else ({odd}); choose another folder")
    for kind, tensors in (("leaf", task.leaves), ("extra", task.extra)):
        for name, tensor in tensors.items():
            processes.fill(tensor, state.tensors[f"{kind}.{name}"])
    _restore_optimisers(task, state, processes)
    if task.restored is not None:
        task.restored()
    return state.step


def _refuse_own_folders(step: int, folder: Path, processes: Processes) -> None:
    """Processes on machines that do not share the folder would begin at different steps, and wait for ever."""
    first = int(processes.total(torch.tensor(step if processes.rank == 0 else 0)))
    apart = int(processes.total(torch.tensor(int(step != first))))
    if apart:
        raise ConfigError(
            f"{apart} of {processes.count} processes do not find the run in {folder} that the first one goes on with "
            f"(step {first}); the output folder must lie on a disk that all machines share"
        )


def _restore_optimisers(task: Task, state: State, processes: Processes) -> None:
    saved: dict[str, dict[str, torch.Tensor]] = {name: {} for name in task.leaves}
    for entry, tensor in state.tensors.items():
        kind, _, rest = entry.partition(".")
        if kind == "optimiser":
            key, _, name = rest.partition(".")
            saved[name][key] = processes.like(task.leaves[name], tensor)
    names = {id(leaf): name for name, leaf in task.leaves.items()}
    for optimiser in task.optimisers:
        held = [leaf for group in optimiser.param_groups for leaf in group["params"]]
        states = {index: saved[names[id(leaf)]] for index, leaf in enumerate(held) if saved[names[id(leaf)]]}
        optimiser.load_state_dict({"state": states, "param_groups": optimiser.state_dict()["param_groups"]})


def _facts(task: Task, options: LoopOptions) -> dict[str, Any]:
    return {name: value for name, value in asdict(options).items() if name in _MUST_AGREE} | dict(task.facts)


def _seed(seed: int, number: int) -> int:
    """A seed of its own for every micro-batch: neighbouring numbers, and neighbouring seeds, share no stream."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {number}".encode(), digest_size=7).digest())
