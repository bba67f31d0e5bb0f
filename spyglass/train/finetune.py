"""Fine-tuning: a checkpoint folder and a file of chats become an adapter, through the very modules that serve.

Everything that can be seen to go wrong is refused before the model is loaded. State, log and plot of a run lie in
`training/` of its output folder; the adapter next to them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from spyglass.checkpoint.digest import checkpoint_digest
from spyglass.config import read_model_config
from spyglass.config.shipped import find_model
from spyglass.config.training import EPOCHS, TrainConfig
from spyglass.engram.feed import EngramFeed
from spyglass.engram.store import open_engram
from spyglass.errors import ConfigError, PromptError
from spyglass.lora.fit import check_trained
from spyglass.lora.new import TRAINED_ADAPTER, TrainableAdapter, new_adapter
from spyglass.model import LoadedModel, VisionLanguageModel, find_device, load_model
from spyglass.parallel.fsdp import Processes
from spyglass.params.targets import VISION_GROUPS, check_targets, describe_counts, group_of
from spyglass.prompt.tokenizer import load_tokenizer
from spyglass.train.answers import ExactMatch, Shown, answers, compared, shown_chats, table
from spyglass.train.data import Batches, Chat, Feed, Learner, read_chats
from spyglass.train.full_finetune import FullRun
from spyglass.train.held_out import HeldOut
from spyglass.train.log import CSV_NAME, PLOT_NAME, ExpectedTime, require_plots, require_wandb
from spyglass.train.loop import ALONE, LoopOptions, LoopResult, MicroLoss, Task, adamw, check_options, train
from spyglass.train.loss import step_logits, token_loss
from spyglass.train.packing import Sample, pack
from spyglass.train.recompute import recompute_layers
from spyglass.train.sharding import shard_layers, whole_adapter
from spyglass.train.state import has_state, held_alone

RUN_FOLDER = "training"
FEW_STEPS = 20
Tell = Callable[[str], None]


def finetune(
    config: TrainConfig,
    *,
    tell: Tell = lambda line: None,
    progress: bool = True,
    processes: Processes = ALONE,
) -> LoopResult:
    """Train an adapter, or with `full` every weight, and write it. An interrupted run leaves what it has so far.

    `config.model` may name a shipped model. `tell` gets lines for people.

    Raises:
        ConfigError: options that mean nothing, an output folder that holds another run, logs that cannot be plotted.
        PromptError: a line of the data cannot be used (all are listed), or the model has no tokenizer.
        AdapterError: targets that are none, or of which the model has no module.
        CheckpointError, DeviceError: as `load_model`; a training state that is damaged or cannot be written.
        SpyglassError: training went astray (see `spyglass.train.loop.train`).
    """
    check_config(config)
    named, config = str(config.model), replace(config, model=find_model(config.model))
    learner = _learner(config)
    config = replace(config, lr=config.rate(learner.config.text.hidden_size))
    chats, faults = read_chats(
        config.data, learner, most_tokens=config.batch_tokens, skip_bad=config.skip_bad, progress=progress
    )
    _refuse_blind(config, chats)
    batches = _batches(config, chats)
    options = loop_options(config, batches)
    check_options(options, processes)
    _make_folder(config.output / RUN_FOLDER)
    tell(_data_line(config, chats, faults))
    tell(
        f"{options.steps} steps of {options.accumulate} x at most {config.batch_chats} chats, "
        f"highest learning rate {config.lr:.2g} after {options.warmup} steps of warm-up"
    )
    if options.steps < FEW_STEPS:
        tell(
            f"warning: {options.steps} steps are too few to learn much; raise --epochs or --steps, or lower "
            "--batch-chats or --accumulate"
        )
    if ignored := sorted({name for chat in chats for name in chat.ignored}):
        tell(f"ignored columns, which say nothing about a chat: {', '.join(ignored)}")
    feed = Feed(chats, batches, learner, stride=processes.count)
    shown = shown_chats(chats, learner) if processes.count == 1 else []
    run = _train_whole if config.full else partial(_train_adapter, named=named)
    with held_alone(config.output / RUN_FOLDER) if processes.rank == 0 else contextlib.nullcontext():
        result = run(config, options, feed, shown, tell, progress, processes)
    if processes.rank == 0:
        tell(_result_line(config, options, result))
    return result


def _batches(config: TrainConfig, chats: list[Chat]) -> Batches:
    return Batches(
        [chat.tokens for chat in chats],
        most_tokens=config.batch_tokens,
        seed=config.seed,
        most_chats=config.batch_chats,
    )


def _held_out(
    config: TrainConfig, options: LoopOptions, feed: Feed, loaded: LoadedModel, adapter: TrainableAdapter,
    leaves: Mapping[str, torch.Tensor], tell: Tell, *, alone: bool,
) -> HeldOut | None:  # fmt: skip
    """What measures the chats of `eval_data`, without dropout; None if there are none. `alone`: on one process."""
    if config.eval_data is None:
        return None
    chats, _ = read_chats(
        config.eval_data, feed.learner, most_tokens=config.batch_tokens, skip_bad=config.skip_bad, progress=False
    )
    batches = _batches(config, chats)
    loss = _task(config, loaded, leaves, Feed(chats, batches, feed.learner)).loss
    logits = partial(_logits, config, loaded)
    able, left_out = compared(chats)
    chosen = shown_chats(able, feed.learner, config.eval_answers) if alone else []
    match = ExactMatch(
        chosen, logits, feed.learner, most_tokens=config.batch_tokens, most_chats=config.batch_chats, tell=tell
    )

    def plain(call: Callable[..., Any], *arguments: Any) -> Any:
        adapter.set_dropout(0.0)
        try:
            return call(*arguments)
        finally:
            adapter.set_dropout(config.dropout)

    said = f"the answers of {len(chosen)} of them are compared, in at most {match.most_passes} passes"
    why = "" if alone else ", on several processes"
    tell(
        f"held out: {len(chats)} chats of {config.eval_data}; {said if chosen else 'no answers are compared'} "
        f"(--eval-answers {config.eval_answers}{why})"
    )
    if left_out and alone and config.eval_answers:
        tell(f"held out: answers that cannot be compared: {', '.join(f'{n} {which}' for which, n in left_out.items())}")
    return HeldOut(
        partial(plain, loss),
        batches.count(1),
        leaves,
        steps=options.steps,
        every=config.eval_every,
        patience=config.patience,
        tell=tell,
        exact=partial(plain, match) if chosen else None,
    )


def _train_adapter(
    config: TrainConfig,
    options: LoopOptions,
    feed: Feed,
    shown: Sequence[Shown],
    tell: Tell,
    progress: bool,
    processes: Processes,
    *,
    named: str,
) -> LoopResult:
    """`named`: the model as it was asked for, which the adapter notes."""
    loaded = load_model(
        config.model,
        device=chosen_device(config),
        dtype=config.dtype,
        numerics=config.numerics,
        ops="training",
        vision_graphs="off",
        progress=progress,
    )
    if config.checkpointing:
        recompute_layers(loaded.model)
    adapter = new_adapter(
        loaded.model, config.targets, rank=config.rank, alpha=config.alpha, rslora=config.rslora, seed=config.seed
    )
    adapter.set_dropout(config.dropout)
    trained = sum(leaf.numel() for leaf in adapter.parameters.values())
    tell(f"training {describe_counts(dict(adapter.counts))}; {trained:,} numbers")
    leaves: Mapping[str, torch.Tensor] = adapter.parameters
    if processes.count > 1:
        leaves = shard_layers(loaded.model, adapter, processes)
    task = _task(config, loaded, leaves, feed)

    def said() -> list[str]:
        adapter.set_dropout(0.0)
        return answers(shown, partial(_logits, config, loaded), feed.learner)

    before = said()  # a new adapter changes nothing yet, also where a saved one follows
    adapter.set_dropout(config.dropout)
    held = _held_out(config, options, feed, loaded, adapter, leaves, tell, alone=processes.count == 1)
    expected = ExpectedTime(options.steps, tell)
    task = replace(task, after_step=expected.after_step)
    if held is not None:
        held.begin()
        after_step = partial(_each, (held.after_step, expected.after_step))
        task = replace(task, after_step=after_step, enough=held.enough, measured=held.measured)
    folder = config.output / RUN_FOLDER
    result = train(task, options, folder, resume=config.resume, processes=processes, progress=progress)
    if held is not None and result.finished:
        held.restore()
        tell(f"held out: kept the adapter of step {held.best_step}, loss {held.best:.4f}{held.best_match}")
    if shown:
        tell(table(shown, before, said(), feed.learner))
    adapter.set_dropout(0.0)
    adapter = whole_adapter(adapter, leaves, processes)
    if processes.rank == 0:
        adapter.save(config.output, names="native" if config.names == "official" else "hf", base_model=named)
    return result


def _each(hooks: Sequence[Callable[[int], None]], step: int) -> None:
    for hook in hooks:
        hook(step)


def _train_whole(
    config: TrainConfig, options: LoopOptions, feed: Feed, shown: Sequence[Shown], tell: Tell, progress: bool,
    processes: Processes,
) -> LoopResult:  # fmt: skip
    device = find_device(chosen_device(config))
    run = FullRun(feed.learner.config, config, device, progress=progress, processes=processes)
    if config.checkpointing:
        recompute_layers(run.model)
    tell(f"training all {run.masters.num_values():,} weights")
    task = run.task(feed, _facts(config, run.model, feed))
    assert task.after_step is not None
    hooks = (task.after_step, ExpectedTime(options.steps, tell).after_step)
    task = replace(task, after_step=partial(_each, hooks))
    before = answers(shown, run.logits, feed.learner)
    folder = config.output / RUN_FOLDER
    result = train(task, options, folder, resume=config.resume, processes=processes, progress=progress)
    if shown:
        tell(table(shown, before, answers(shown, run.logits, feed.learner), feed.learner))
    if processes.rank == 0:
        run.write(config.output)
    return result


def chosen_device(config: TrainConfig) -> str:
    """The device, "auto" settled."""
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return config.device


def check_config(config: TrainConfig) -> None:
    """What can be refused before any file is read.

    Raises:
        ConfigError, AdapterError: as `finetune`.
    """
    require_plots()
    require_wandb(config.wandb)
    check_targets(config.targets)
    if not config.full:
        check_trained(config.rank, config.alpha)
    resumable = has_state(config.output / RUN_FOLDER)
    taken = any((config.output / name).exists() for name in ("adapter_config.json", "config.json"))
    if resumable and not config.resume:
        raise ConfigError(f"{config.output} already holds a run; go on with it (--resume), or choose another folder")
    if taken and not resumable:
        raise ConfigError(
            f"{config.output} holds a result, and no state of training to go on from; it would be overwritten: choose "
            "another folder"
        )


def _refuse_blind(config: TrainConfig, chats: list[Chat]) -> None:
    unused = [target for target in config.targets if target in VISION_GROUPS]
    if unused and not config.full and not any(chat.images for chat in chats):
        raise ConfigError(
            f"{config.data} shows no image, so {' and '.join(unused)} would learn nothing; leave that out of the "
            "targets, or add chats with images"
        )


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}; choose another --output") from error


def loop_options(config: TrainConfig, batches: Batches) -> LoopOptions:
    """The loop's options; passes over the data become steps, the last of which may begin another pass."""
    steps = config.steps
    if steps is None:
        steps = -(-batches.count(config.epochs or EPOCHS) // config.accumulate)
    return LoopOptions(
        steps=steps,
        accumulate=config.accumulate,
        schedule=config.schedule,
        warmup=min(config.warmup, steps // 2),
        clip=config.clip,
        seed=config.seed,
        save_every=config.save_every,
        wandb=config.wandb,
        minutes=config.minutes,
    )


def _learner(config: TrainConfig) -> Learner:
    model, tokenizer = read_model_config(config.model), load_tokenizer(config.model)
    if tokenizer is None:
        raise PromptError(f"{config.model} has no tokenizer.json, and chats are text; add the file")
    return Learner(model, tokenizer, config.loss_on)


def _logits(config: TrainConfig, loaded: LoadedModel, samples: Sequence[Sample]) -> torch.Tensor:
    engram = open_engram_feed(config.model, loaded)
    step = pack(
        samples, loaded.config, device=loaded.device, dtype=loaded.dtype, adapter_id=TRAINED_ADAPTER, engram=engram
    )
    return step_logits(loaded.model, step)


def _task(config: TrainConfig, loaded: LoadedModel, leaves: Mapping[str, torch.Tensor], feed: Feed) -> Task:
    engram = open_engram_feed(config.model, loaded)
    of_images = [leaf for name, leaf in leaves.items() if group_of(name.rpartition(".")[0]) in VISION_GROUPS]

    def loss(number: int) -> MicroLoss:
        step = pack(
            feed(number),
            loaded.config,
            device=loaded.device,
            dtype=loaded.dtype,
            adapter_id=TRAINED_ADAPTER,
            engram=engram,
        )
        value, targets = token_loss(step_logits(loaded.model, step, of_images), step.targets_R)
        images = 0 if step.images is None else len(step.images.grids_I2)
        return MicroLoss(loss=value, targets=targets, tokens=len(step.batch.ids_T), images=images)

    group = {
        "params": list(leaves.values()),
        "lr": config.rate(loaded.config.text.hidden_size),
        "weight_decay": config.weight_decay,
    }
    return Task(leaves=leaves, optimisers=[adamw([group])], loss=loss, facts=_facts(config, loaded.model, feed))


def open_engram_feed(folder: Path, loaded: LoadedModel) -> EngramFeed | None:
    """What feeds rows of the memory tables to a model, None for one without."""
    if loaded.config.text.engram is None:
        return None
    return EngramFeed(open_engram(folder, loaded.config), device=loaded.device, dtype=loaded.dtype)


def _facts(config: TrainConfig, model: VisionLanguageModel, feed: Feed) -> dict[str, Any]:
    """What a run cannot change when it is resumed, besides the options of the loop."""
    same = (
        "full",
        "rank",
        "alpha",
        "rslora",
        "dropout",
        "batch_tokens",
        "batch_chats",
        "lr",
        "weight_decay",
        "loss_on",
        "skip_bad",
    )
    return {name: getattr(config, name) for name in same} | {
        "data": feed.digest(),
        "base model": checkpoint_digest(config.model),
        "dtype": str(model.options.build.dtype).removeprefix("torch."),  # "auto" and its meaning are the same run
        "numerics": model.options.numerics,
    }


def _data_line(config: TrainConfig, chats: list[Chat], faults: list[str]) -> str:
    tokens, targets = sum(chat.tokens for chat in chats), sum(chat.targets for chat in chats)
    line = f"{config.data}: {len(chats)} chats, {tokens:,} tokens, {targets:,} of them learnt"
    return "\n  left out: ".join([line, *faults])


def _result_line(config: TrainConfig, options: LoopOptions, result: LoopResult) -> str:
    folder = config.output / RUN_FOLDER
    loss = "nothing was left to learn" if math.isnan(result.loss) else f"loss {result.loss:.4f}"
    line = f"{loss} in step {result.step} of {options.steps}; result in {config.output}, "
    line += f"{CSV_NAME} and {PLOT_NAME} in {folder}"
    return line if result.finished else f"{line}\ninterrupted: --resume goes on from step {result.step}"
