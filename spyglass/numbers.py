"""Numbers are compared before anyone is served: kernels built for another processor, a broken driver and miscompiled
kernels give answers that look like answers.

A fixed prompt (an image where the model sees, text longer than a window, some single tokens) runs op by op through the
model as it was loaded. The first call of each op with arguments of a kind is made twice, by the chosen implementation
and by the reference, with the model's own weights and activations; the prompt goes on with what the reference gave.
Then the same prompt runs as it will in service, through captured graphs, and its hidden states are compared with those
of the chosen ops one by one.

Processes of a divided model do this together, each with its own part, since a step has sums over all of them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from spyglass.batch.images import pack_images
from spyglass.batch.rows import new_rows, poison
from spyglass.batch.types import ImageBatch
from spyglass.config.cache import cache_plans
from spyglass.engram.feed import EngramFeed
from spyglass.model import LoadedModel
from spyglass.ops.declare import Backend
from spyglass.ops.table import bind_ops
from spyglass.prompt.build import Part, prompt_from_parts
from spyglass.prompt.tokens import Patches, Prompt
from spyglass.quant.packed import Packed
from spyglass.runtime.step_input import StepInput, sequence_input
from spyglass.runtime.steps import StepRunner

WHOLE_PATH = "the whole path"
_TEXT_TOKENS, _CHUNK, _SINGLE = 140, 20, 3  # of the prompt: the first step's, a second one's, and steps of one token
_PAGE_ROWS = 16
# Root mean square of a difference over that of the reference: of all values, and of the worst row. Kernels round in
# another order, tensor cores more coarsely; rounded to few bits, one in a hundred values falls to the next of them.
_MOST = {"cpu": (0.02, 0.1), "cuda": (0.05, 0.25)}
_MOST_OF_CHOICES = 0.1  # of indices that differ: near ties fall otherwise
_MOST_OF_THE_PATH = 0.2  # of hidden states: other sizes of steps may round elsewhere, and layers add that up


@dataclass(frozen=True, slots=True)
class Mismatch:
    """An op whose implementation does not compute what its reference does, or `WHOLE_PATH`."""

    op: str
    implementation: str
    difference: str

    def __str__(self) -> str:
        return f"{self.op} ({self.implementation}): {self.difference}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NumbersReport:
    """What was compared and what differed; `compared` counts calls by op. Ops that differ run by their reference."""

    mismatches: tuple[Mismatch, ...] = ()
    compared: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def __str__(self) -> str:
        calls = f"{sum(self.compared.values())} calls of {len(self.compared)} ops"
        if not self.mismatches:
            return f"{calls} compared with their references in {self.seconds:.1f} s: they agree"
        return f"WRONG NUMBERS, so the slow reference runs in their place: {self.differences()}"

    def differences(self) -> str:
        """Each mismatch, with what differs."""
        return "; ".join(map(str, self.mismatches))

    def as_json(self) -> dict[str, Any]:
        """For `/health` and `check --json`."""
        return {
            "agree": not self.mismatches,
            "mismatches": [str(one) for one in self.mismatches],
            "compared": dict(self.compared),
            "seconds": round(self.seconds, 2),
        }


def compare_ops(loaded: LoadedModel, engram: EngramFeed | None, adapter_ids: Sequence[int] = ()) -> NumbersReport:
    """Each op against its reference in the fixed prompt, without an adapter and with each of those in `adapter_ids`.

    Of a divided model every process calls this at the same time; `engram` is rank 0's.
    """
    began, ops = time.perf_counter(), loaded.model.options.build.ops
    watch = _Comparison(loaded)
    for adapter_id in (0, *adapter_ids):
        # small work: on a busy machine threads that wait for one another would take half a minute
        with torch.inference_mode(), _one_thread(), ops.watched(watch):
            _Probe(loaded, engram, adapter_id).run("eager")
    watch.look_at_the_host(loaded)
    mismatches = tuple(watch.mismatches.values())
    return NumbersReport(mismatches=mismatches, compared=watch.compared, seconds=time.perf_counter() - began)


def compare_path(loaded: LoadedModel, engram: EngramFeed | None, adapter_ids: Sequence[int] = ()) -> NumbersReport:
    """The fixed prompt as it will run in service, against the ops one by one; called as `compare_ops`."""
    began, differs = time.perf_counter(), list[Mismatch]()
    for adapter_id in (0, *adapter_ids):
        with torch.inference_mode():
            difference = _path_differs(_Probe(loaded, engram, adapter_id))
        if difference is not None:
            where = f"states of a fixed prompt{_rank(loaded)}: {difference}"
            differs.append(Mismatch(WHOLE_PATH, loaded.model.capture_backend, where))
    return NumbersReport(mismatches=tuple(differs[:1]), seconds=time.perf_counter() - began)


def together(reports: Sequence[NumbersReport]) -> NumbersReport:
    """Reports of several processes, or of one after another, as one; `seconds` are those of the first process."""
    compared: Counter[str] = sum((Counter(one.compared) for one in reports), Counter())
    mismatches = tuple(wrong for one in reports for wrong in one.mismatches)
    return NumbersReport(mismatches=mismatches, compared=compared, seconds=reports[0].seconds)


def _path_differs(probe: _Probe) -> str | None:
    try:
        pairs = zip(probe.run(None), probe.run("eager"), strict=True)
        return next(filter(None, (_floats_differ(a, b, _MOST_OF_THE_PATH, float("inf")) for a, b in pairs)), None)
    except RuntimeError as error:
        return f"cannot be had: {error}"


def _rank(loaded: LoadedModel) -> str:
    group = loaded.model.options.build.group
    return f" on rank {group.rank}" if group.size > 1 else ""


class _Comparison:
    """What ops are watched with: each kind of call is made by the reference too, once."""

    def __init__(self, loaded: LoadedModel) -> None:
        ops = loaded.model.options.build.ops
        dtype = str(loaded.dtype).removeprefix("torch.")
        self._references = bind_ops(loaded.device.type, dtype, "reference")
        self._chosen, self._rank = ops.chosen, _rank(loaded)
        self._seen: set[Any] = set()
        self._most = _MOST[loaded.device.type]
        self.compared: dict[str, int] = {}
        self.mismatches: dict[str, Mismatch] = {}

    def __call__(self, op: str, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        kind = (op, _kind(args), _kind(options))
        if op in self.mismatches:
            return getattr(self._references, op)(*args, **options)
        if self._chosen[op] == "reference" or kind in self._seen:
            return function(*args, **options)
        self._seen.add(kind)
        own_args, own_options = _copied(args), _copied(options)
        try:
            expected = getattr(self._references, op)(*args, **options)
        except RuntimeError:  # it widens weights, for which memory may be short: then there is nothing to compare with
            return function(*own_args, **own_options)
        self.compared[op] = self.compared.get(op, 0) + 1
        try:
            got = function(*own_args, **own_options)
        except Exception as error:  # whatever a kernel breaks with
            difference: str | None = f"it broke ({type(error).__name__}: {str(error)[:200]})"
        else:
            pairs = zip(
                _tensors((got, own_args, own_options)), _tensors((expected, args, options)), strict=True
            )  # arguments too: some ops write into them
            difference = next(filter(None, (_differs(a, b, *self._most) for a, b in pairs if a is not b)), None)
        if difference is not None:
            self.mismatches[op] = Mismatch(op, self._chosen[op], difference + self._rank)
        return expected

    def look_at_the_host(self, loaded: LoadedModel) -> None:
        """Experts in host memory: their kernel, which no op of the device calls."""
        host = loaded.model.options.build.host
        if host is None or (trial := host.trial()) is None:
            return
        op = "experts_grouped"
        self.compared[op] = self.compared.get(op, 0) + 1
        if (difference := _differs(*trial, *_MOST["cpu"])) is not None:
            self.mismatches[op] = Mismatch(op, "cpu, of experts in host memory", difference)


class _Probe:
    """The fixed prompt in steps, with memory of its own."""

    def __init__(self, loaded: LoadedModel, engram: EngramFeed | None, adapter_id: int) -> None:
        self._loaded, self._engram, self._adapter_id = loaded, engram, adapter_id
        config, self._images = loaded.config, None
        vocab = config.text.vocab_size
        ids = [config.bos_token_id or 0, *((7 * np.arange(_TEXT_TOKENS + _CHUNK + _SINGLE) + 3) % vocab).tolist()]
        ids = [1 if one == config.image_token_id else one for one in ids]
        parts: list[Part] = [ids]
        if loaded.model.vision is not None and config.vision is not None:
            side, patch = 2 * config.vision.downsample_ratio, config.vision.patch_size
            pixels = np.random.default_rng(0).integers(256, size=(side * side, 3, patch, patch), dtype=np.uint8)
            parts = [ids[:9], Patches(pixels, (side, side)), ids[9:]]
        self._prompt: Prompt = prompt_from_parts(parts, config)
        if self._prompt.patches and config.vision is not None:
            self._images = pack_images(
                self._prompt.patches,
                [plan.vit_grid for plan in self._prompt.plans],
                config.vision,
                device=loaded.device,
                adapter_ids=[adapter_id],
            )

    def run(self, backend: Backend | None) -> list[torch.Tensor]:
        """Rows of the images, and hidden states of each step."""
        model, config = self._loaded.model, self._loaded.config
        rows = None if self._images is None else self._encode(self._images, backend)
        pages, tables = self._memory()
        banned_V = torch.zeros(config.text.vocab_size, dtype=torch.bool, device=self._loaded.device)
        page_rows = dict.fromkeys(tables, _PAGE_ROWS)
        runner = StepRunner(model, config.text, page_rows, self._loaded.device, banned_V, backend=backend)
        found = [] if rows is None else [rows]
        for step in self._steps(tables):
            image_rows = rows if step.image_index_T is not None else None
            result = runner.run(step, pages, image_rows_IC=image_rows, engram_rows=self._fetch(step), argmax=True)
            found.append(result.hidden_TC)
        return found

    def _encode(self, images: ImageBatch, backend: Backend | None) -> torch.Tensor:
        model = self._loaded.model
        if backend != "eager" or model.vision is None or model.aligner is None:
            return model.encode_images(images)
        out: torch.Tensor = model.aligner(model.vision(images), images.grids_I2, images.adapter_I)
        return out

    def _memory(self) -> tuple[dict[tuple[str, int], torch.Tensor], dict[str, NDArray[np.int32]]]:
        """Pages for the prompt, of NaN: a row that is read before it was written shows."""
        pages: dict[tuple[str, int], torch.Tensor] = {}
        tables: dict[str, NDArray[np.int32]] = {}
        for plan in cache_plans(self._loaded.config.text, stored=self._loaded.stores_rows):
            count = -(-len(self._prompt) // plan.tokens_per_row // _PAGE_ROWS) + 1
            tables[plan.group] = np.arange(count, dtype=np.int32)
            rows = new_rows(plan, (count, _PAGE_ROWS), self._loaded.dtype, self._loaded.device)
            pages[plan.kind, plan.layer] = poison(rows)
        return pages, tables

    def _steps(self, tables: Mapping[str, NDArray[np.int32]]) -> Iterator[StepInput]:
        prompt = self._prompt
        stops = [len(prompt) - _SINGLE - _CHUNK, *range(len(prompt) - _SINGLE, len(prompt) + 1)]
        for start, stop in zip([0, *stops], stops, strict=False):
            seen = start == 0 and self._images is not None
            yield sequence_input(
                prompt.ids_T[start:stop],
                prompt.kinds_T[start:stop],
                start,
                tables,
                range(stop - start),
                visible_T2=prompt.visible_T2[start:stop] if seen else None,
                image_index_T=prompt.image_row_T[start:stop] if seen else None,
                adapter_id=self._adapter_id,
            )

    def _fetch(self, step: StepInput) -> Callable[[], Mapping[int, torch.Tensor]] | None:
        engram, group = self._loaded.config.text.engram, self._loaded.model.options.build.group
        if engram is None:
            return None
        own = self._start(step)

        def rows() -> Mapping[int, torch.Tensor]:
            shape = len(step.ids_T), engram.row_width
            empty = torch.empty(shape, dtype=self._loaded.dtype, device=self._loaded.device)
            found = dict.fromkeys(engram.layers, empty) if own is None else own()
            return {layer: group.broadcast(found[layer].contiguous().clone()) for layer in engram.layers}

        return rows

    def _start(self, step: StepInput) -> Callable[[], Mapping[int, torch.Tensor]] | None:
        """The rows of the memory tables, of which rank 0 has the only ones."""
        if self._engram is None:
            return None
        (start,), (stop,) = step.start_S, step.stop_S
        depth = self._engram.store.config.lookback
        first = max(0, start - depth)
        before = np.where(self._prompt.kinds_T[first:start] >= 0, -2, self._prompt.ids_T[first:start])[::-1]
        lookback_1L = np.concatenate([before, np.full(depth - len(before), -1)]).astype(np.int32)[None]
        return self._engram.start(step.ids_T, step.kinds_T, lookback_1L, np.array([0, stop - start], np.int32))


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _kind(value: Any) -> Any:
    """All of an argument but the values of tensors: shapes, dtypes, formats, flags."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, Packed):
        return value.format, value.shape
    if isinstance(value, dict):
        return tuple((key, _kind(part)) for key, part in value.items())
    if isinstance(value, tuple | list):
        return tuple(map(_kind, value))
    if is_dataclass(value):
        return tuple(_kind(getattr(value, one.name)) for one in fields(value))
    return repr(value)


def _copied(value: Any) -> Any:
    """The same with tensors of its own, which an op may write into; weights are shared."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(map(_copied, value))
    if is_dataclass(value) and not isinstance(value, Packed | type):
        return replace(value, **{one.name: _copied(getattr(value, one.name)) for one in fields(value) if one.init})
    return value


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a result or in arguments, weights left out."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif is_dataclass(value) and not isinstance(value, Packed):
        for one in fields(value):
            yield from _tensors(getattr(value, one.name))


def _differs(got: torch.Tensor, want: torch.Tensor, most: float, most_of_a_row: float) -> str | None:
    """How one tensor is too far from another; None if it is not."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"gives {got.dtype} {list(got.shape)} for {want.dtype} {list(want.shape)}"
    if not want.numel():
        return None
    if not want.dtype.is_floating_point:
        share = float((got != want).float().mean())
        return f"{share:.0%} of the indices differ" if share > _MOST_OF_CHOICES and want.numel() > 1 else None
    return _floats_differ(got, want, most, most_of_a_row)


def _floats_differ(got: torch.Tensor, want: torch.Tensor, most: float, most_of_a_row: float) -> str | None:
    got, want = got.float(), want.float()
    lost = ~got.isfinite() & want.isfinite()
    if bool(lost.any()):
        return f"{float(lost.float().mean()):.0%} of the values are no finite numbers"
    off = torch.where(want.isfinite(), got - want, 0.0)
    size = torch.where(want.isfinite(), want, 0.0).square().mean().sqrt()
    share = float(off.square().mean().sqrt() / size.clamp(min=1e-30))
    if share > most:
        return f"off by {share:.0%}"
    rows = off.reshape(len(off), -1) if off.dim() > 1 else off.reshape(1, -1)
    worst = float(rows.square().mean(1).sqrt().max() / size.clamp(min=1e-30))
    return f"a row is off by {worst:.0%}" if worst > most_of_a_row else None
