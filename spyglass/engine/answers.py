"""What an answer has become: its last delta with the whole output, and the log-probabilities of its prompt."""

from __future__ import annotations

import torch

from spyglass.engine.request import Delta, RequestOutput, Usage
from spyglass.engine.sampler import logprobs_of
from spyglass.engine.sequence import TokenSequence


def last_delta(sequence: TokenSequence, tokens: tuple[int, ...], text: str) -> Delta:
    """The end of an answer: what its last step added (`tokens`, `text`, which the answer has too) and all of it."""
    params, prompt, answer = sequence.params, sequence.prompt, sequence.answer
    assert answer.finish_reason is not None
    output = RequestOutput(
        request_id=sequence.request_id,
        text="".join(answer.texts),
        token_ids=tuple(answer.token_ids),
        finish_reason=answer.finish_reason,
        usage=Usage(
            prompt_tokens=len(prompt),
            image_tokens=int((prompt.kinds_T >= 0).sum()),
            completion_tokens=len(answer.token_ids),
            cached_tokens=sequence.cached,
        ),
        logprobs=None if params.logprobs is None else tuple(answer.logprobs),
        prompt_logprobs=None if params.prompt_logprobs is None else tuple(answer.prompt_logprobs),
        error=answer.error,
        grammar_violation=answer.grammar_violation,
        stopped_by=None if answer.detokenizer is None else answer.detokenizer.stopped_by,
    )
    return Delta(
        request_id=sequence.request_id,
        text=text,
        token_ids=tokens,
        logprobs=tuple(answer.logprobs[-len(tokens) :]) if tokens and params.logprobs is not None else None,
        finish_reason=answer.finish_reason,
        output=output,
    )


def keep_prompt_logprobs(sequence: TokenSequence, start: int, logits_RV: torch.Tensor) -> None:
    """Log-probabilities of prompt tokens from the logits of rows `start` on, as far as the prompt asks for them.

    Row t predicts token t + 1; image positions have no token.
    """
    prompt, top = sequence.prompt, sequence.params.prompt_logprobs
    rows = [r for r in range(len(logits_RV)) if start + r + 1 < len(prompt) and prompt.ids_T[start + r + 1] >= 0]
    if not rows:
        return
    picked = logits_RV[torch.as_tensor(rows, device=logits_RV.device)]
    ids = torch.as_tensor([int(prompt.ids_T[start + r + 1]) for r in rows], device=picked.device)
    for r, logprob in zip(rows, logprobs_of(picked, picked.logsumexp(dim=-1), ids, [top] * len(rows)), strict=True):
        sequence.answer.prompt_logprobs[start + r + 1] = logprob
