"""One step of a model from its input: laid out in a frame, then run through a captured graph or op by op."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeGuard

import torch

from spyglass.batch.types import Batch, CacheView, ImageBatch
from spyglass.config.model import TextConfig
from spyglass.ops.declare import Backend
from spyglass.runtime.capture import Capture, Outputs
from spyglass.runtime.frame import Frame, Frames, Pages
from spyglass.runtime.step_input import StepInput

EngramRows = Callable[[], Mapping[int, torch.Tensor]]


class ModelParts(Protocol):
    """The model as a driver sees it (`spyglass.model.VisionLanguageModel`)."""

    def encode_images(self, images: ImageBatch) -> torch.Tensor:
        """Image rows [I, C], image by image."""

    def embed(self, batch: Batch, image_rows_IC: torch.Tensor | None) -> torch.Tensor:
        """Residual streams [T, M, C]."""

    def text(self, streams_TMC: torch.Tensor, batch: Batch, cache: CacheView) -> tuple[torch.Tensor, Any]:
        """Hidden states [T, C] and what was captured."""

    def logits(self, hidden_TC: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        """Logits fp32 [R, V]."""

    def argmax(
        self, hidden_TC: torch.Tensor, rows_R: torch.Tensor, banned_V: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Id int64 [R] and value [R] of the largest logit that is not banned; None where `logits` is as quick."""


class CapturableModel(ModelParts, Protocol):
    """A model whose steps read nothing on the host; any other runs op by op."""

    @property
    def capture_backend(self) -> Backend:
        """What can capture the ops that were chosen."""

    @property
    def weights_version(self) -> int:
        """Another number whenever weights or adapters are others."""

    def held_tensors(self) -> Iterable[torch.Tensor]:
        """Every weight, adapters included."""


def _is_capturable(model: ModelParts) -> TypeGuard[CapturableModel]:
    # from Python 3.12 on, isinstance with a protocol does not see the submodules of an nn.Module
    return hasattr(model, "capture_backend")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Hidden states [T, C] of a step's rows; rows int64 [R] whose logits are wanted; with `argmax` also their best ids
    int64 [R] and values fp32 [R]. `captured` residual streams [T, M, C] by layer."""

    hidden_TC: torch.Tensor
    logit_rows_R: torch.Tensor
    captured: Mapping[int, torch.Tensor]
    argmax: tuple[torch.Tensor, torch.Tensor] | None


class StepRunner:
    """Runs the steps of one driver. `banned_V` (bool) ids are never an argmax. Not for two threads at once.

    `capture`: layers whose residual streams results have. `seconds` counts the time in `run` behind the layout of
    frames.
    """

    def __init__(
        self,
        model: ModelParts,
        text: TextConfig,
        page_rows: Mapping[str, int],
        device: torch.device,
        banned_V: torch.Tensor,
        *,
        backend: Backend | None = None,
        capture: tuple[int, ...] = (),
    ) -> None:
        self.model, self._banned_V, self._streams = model, banned_V, capture
        self.frames = Frames(text, page_rows, device)
        if backend is None:
            backend = model.capture_backend if _is_capturable(model) else "eager"
        self.capture = Capture(backend, device)
        self.seconds = 0.0

    def run(
        self,
        step: StepInput,
        pages: Pages,
        *,
        image_rows_IC: torch.Tensor | None = None,
        engram_rows: EngramRows | None = None,
        amend: Callable[[Batch], None] | None = None,
        argmax: bool = False,
        between_layers: Callable[[], object] | None = None,
    ) -> StepResult:
        """One step. `engram_rows` gives the gathered rows of each layer's memory table. `between_layers` is called
        before each layer of a step that has no graph; it may run others.

        `amend` may write into the tensors of the batch what the host does not know, as ids that were just drawn. What
        comes back is memory of its own.
        """
        captures = self.capture.backend != "eager" and not torch.is_grad_enabled()
        frame = self.frames.fill(step, pages) if captures else self.frames.exact(step, pages)
        if engram_rows is not None:
            frame.put_engram(engram_rows())
        if amend is not None:
            amend(frame.batch)
        started, seconds = time.perf_counter(), self.seconds
        try:
            behind = argmax and self.capture.backend == "cuda_graph"  # where launches behind a graph cost nothing
            within = argmax and not behind
            run = partial(self.forward, frame, image_rows_IC, within)
            if not (captures and frame.reused):
                frame.batch = replace(frame.batch, between_layers=between_layers)
                return self._result(frame, run(), behind)

            @contextmanager
            def padding() -> Iterator[None]:
                """Inside, the frame holds padding rows alone, so that a run changes nothing."""
                self.frames.padding(frame.shape, pages)
                try:
                    yield
                finally:
                    self.frames.fill(step, pages, frame.shape)
                    if amend is not None:
                        amend(frame.batch)

            self.use(pages)
            key = frame, within, torch.get_num_threads()
            outputs = self.capture.run(key, run, lasting=partial(self._known, frame, pages), harmless=padding)
            return self._result(frame, tuple([output.clone() for output in outputs]), behind)
        finally:
            self.seconds = seconds + time.perf_counter() - started  # those of steps within are in it

    def use(self, pages: Pages) -> None:
        """What was captured with other weights or pages is forgotten."""
        assert _is_capturable(self.model), "only such a model has a back end"
        self.capture.use((self.model.weights_version, tuple([tensor.data_ptr() for tensor in pages.values()])))

    def logits(self, hidden_TC: torch.Tensor, rows_R: torch.Tensor) -> torch.Tensor:
        """Logits fp32 [R, V] of some rows (int64) of the hidden states of the last step."""
        return self.model.logits(hidden_TC, rows_R)

    def encode_images(self, images: ImageBatch) -> torch.Tensor:
        """Image rows [I, C], image by image."""
        return self.model.encode_images(images)

    def _known(self, frame: Frame, pages: Pages) -> list[torch.Tensor]:
        """Every tensor that a captured step reads or writes and that outlives it."""
        assert _is_capturable(self.model)
        batch = frame.batch
        return [batch.ids_T, *batch.engram_rows.values(), *pages.values(), self._banned_V, *self.model.held_tensors()]

    def forward(self, frame: Frame, image_rows_IC: torch.Tensor | None, argmax: bool) -> Outputs:
        model, batch = self.model, replace(frame.batch, capture=self._streams)
        hidden_TC, captured = model.text(model.embed(batch, image_rows_IC), batch, frame.cache)
        found = model.argmax(hidden_TC, batch.logit_rows_R, self._banned_V) if argmax else None
        return (hidden_TC, *(captured[layer] for layer in self._streams), *(found or ()))

    def _result(self, frame: Frame, outputs: Outputs, behind: bool) -> StepResult:
        rows, count = frame.num_logit_rows, 1 + len(self._streams)
        found = self.model.argmax(outputs[0], frame.batch.logit_rows_R, self._banned_V) if behind else outputs[count:]
        hidden_TC, *streams = (output[: frame.num_rows] for output in outputs[:count])
        return StepResult(
            hidden_TC=hidden_TC,
            logit_rows_R=frame.logit_rows_R,
            captured=dict(zip(self._streams, streams, strict=True)),
            argmax=(found[0][:rows], found[1][:rows]) if found else None,
        )
