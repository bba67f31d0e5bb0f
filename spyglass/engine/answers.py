"""What an answer has become: its last delta with the whole output, and the log-probabilities of its prompt."""

from __future__ import annotations

import torch

from spyglass.engine.request import Delta, FinishReason, RequestOutput, Usage
from spyglass.engine.sampler import logprobs_of
from spyglass.engine.sequence import TokenSequence


def last_delta(
    sequence: TokenSequence, reason: FinishReason, tokens: tuple[int, ...], text: str, error: str | None
) -> Delta:
    """The end of an answer: what its last step added (`tokens`, `text`, which the sequence has too) and all of it."""
    params, prompt = sequence.params, sequence.prompt
    output = RequestOutput(
        request_id=sequence.request_id,
        text="".join(sequence.text),
        token_ids=tuple(sequence.answer),
        finish_reason=reason,
        usage=Usage(
            prompt_tokens=len(prompt),
            image_tokens=int((prompt.kinds_T >= 0).sum()),
            completion_tokens=len(sequence.answer),
            cached_tokens=sequence.cached,
        ),
        logprobs=None if params.logprobs is None else tuple(sequence.logprobs),
        prompt_logprobs=None if params.prompt_logprobs is None else tuple(sequence.prompt_logprobs),
        error=error,
        grammar_violation=sequence.matcher is not None and sequence.matcher.failed is not None,
        stopped_by=None if sequence.detokenizer is None else sequence.detokenizer.stopped_by,
    )
    last = tuple(sequence.logprobs[-len(tokens) :]) if tokens and params.logprobs is not None else None
    return Delta(
        request_id=sequence.request_id, text=text, token_ids=tokens, logprobs=last, finish_reason=reason, output=output
    )


def keep_prompt_logprobs(sequence: TokenSequence, start: int, logits_RV: torch.Tensor) -> None:
    """Log-probabilities of prompt tokens from the logits of rows `start` on, as far as the prompt asks for them.

    Row t foretells token t + 1; picture positions have no token.
    """
    prompt, top = sequence.prompt, sequence.params.prompt_logprobs
    rows = [r for r in range(len(logits_RV)) if start + r + 1 < len(prompt) and prompt.ids_T[start + r + 1] >= 0]
    if not rows:
        return
    picked = logits_RV[torch.as_tensor(rows, device=logits_RV.device)]
    ids = torch.as_tensor([int(prompt.ids_T[start + r + 1]) for r in rows], device=picked.device)
    for r, logprob in zip(rows, logprobs_of(picked, picked.logsumexp(dim=-1), ids, [top] * len(rows)), strict=True):
        sequence.prompt_logprobs[start + r + 1] = logprob
