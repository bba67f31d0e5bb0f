"""Faults in the engine: pages, turns, drawing, text, the step loop."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SAMPLER = "spyglass/engine/sampler.py"
TEXT = "spyglass/engine/detokenize.py"
BLOCKS = "spyglass/engine/blocks.py"
ASSEMBLE = "spyglass/batch/assemble.py"
PREFIX = "spyglass/engine/prefix.py"
IMAGES = "spyglass/engine/image_cache.py"
PAGES = "spyglass/engine/pages.py"
SCHEDULER = "spyglass/engine/scheduler.py"
GRAMMAR = "spyglass/engine/grammar.py"
SEQUENCE = "spyglass/engine/sequence.py"
WORKSPACE = "spyglass/engine/workspace.py"
RUNNER = "spyglass/engine/runner.py"
ENGINE = "spyglass/engine/engine.py"
ANSWERS = "spyglass/engine/answers.py"
CHECKS = "spyglass/engine/checks.py"
LLM = "spyglass/engine/llm.py"
UNIT = "tests/unit/engine"
ON_SAMPLER = f"{UNIT}/test_sampler.py"
ON_TEXT = f"{UNIT}/test_detokenize.py"
ON_BLOCKS = f"{UNIT}/test_blocks.py tests/laws/test_engine.py"
ON_SNAPSHOTS = f"{UNIT}/test_snapshots.py"
ON_CACHES = (
    f"{UNIT}/test_prefix.py {UNIT}/test_image_cache.py tests/laws/test_caches.py tests/laws/test_cache_limits.py"
)
ON_TURNS = f"{UNIT}/test_scheduler.py"
ON_LOOP = f"{UNIT}/test_engine.py {UNIT}/test_answers.py {UNIT}/test_refusals.py tests/laws/test_engine.py"
ON_FORMS = f"{UNIT}/test_grammar.py"
ON_PREEMPTION = "tests/laws/test_preemption.py"
ON_ROOM = f"{UNIT}/test_workspace.py"
ON_LLM = f"{UNIT}/test_llm.py"

ENGINE_ROWS: list[Mutant] = [
    Mutant(SAMPLER, "torch.where(logit_J > 0, logit_J / repetition_J, logit_J * repetition_J)", "logit_J / repetition_J",
           ON_SAMPLER, "negative logits divided by the repetition penalty"),
    Mutant(SAMPLER, "- frequency_J * count_J ", "", ON_SAMPLER, "no frequency penalty"),
    Mutant(SAMPLER, " - presence_J * (count_J > 0)", "", ON_SAMPLER, "no presence penalty"),
    Mutant(SAMPLER, "presence_J * (count_J > 0)", "presence_J * count_J", ON_SAMPLER, "presence counted"),
    Mutant(SAMPLER, "presence_J * (count_J > 0)", "presence_J", ON_SAMPLER, "presence of the prompt"),
    Mutant(SAMPLER, '    logits_SV.index_fill_(1, banned, float("-inf"))\n', "", ON_SAMPLER, "nothing banned"),
    Mutant(SAMPLER, "raw_SV = logits_SV.clone() if lse_S is not None else logits_SV", "raw_SV = logits_SV", ON_SAMPLER,
           "log-probabilities after penalties"),
    Mutant(SAMPLER, ".div_(temperature_S1)", "", ON_SAMPLER, "no temperature"),
    Mutant(SAMPLER, "np.where(top_k > 0, top_k, vocabulary + 1)", "np.where(top_k > 0, top_k + 1, vocabulary + 1)",
           ON_SAMPLER, "one token more than top_k"),
    Mutant(SAMPLER, "(inside_SN < limit_S1)", "(inside_SN <= limit_S1)", ON_SAMPLER, "a tie too far"),
    Mutant(SAMPLER, "            mass_SV = mass_SV.masked_fill_(x_SV < least_k_S1, 0.0)\n", "            pass\n", ON_SAMPLER,
           "top_p of everything instead of what top_k keeps"),
    Mutant(SAMPLER, "np.log(min_p)", "np.log(min_p * 0)", ON_SAMPLER, "no min_p"),
    Mutant(SAMPLER, "u_S[:, None] * mass_SN[:, -1:]", "u_S[:, None]", ON_SAMPLER, "weights taken for probabilities"),
    Mutant(SAMPLER, "target_S1 - before_S1)", "target_S1)", ON_SAMPLER, "the blocks before forgotten"),
    Mutant(SAMPLER, "(position + np.uint64(1)) * _GOLDEN", "position * np.uint64(0)", ON_SAMPLER,
           "the same number at every position"),
    Mutant(SAMPLER, "_mix(seed + _GOLDEN)", "_mix(seed * np.uint64(0))", ON_SAMPLER, "the same number for every seed"),
    Mutant(SAMPLER, "step.seed_S[random], step.position_S[random]", "step.seed_S[: len(random)], "
           "step.position_S[: len(random)]", ON_SAMPLER, "random numbers by place in the batch"),
    Mutant(SAMPLER, "keepdim=True).clamp(min=1) - 1", "keepdim=True) - 1", ON_SAMPLER, "a row of NaN breaks the step"),
    Mutant(TEXT, " and text not in GROUNDING_TAGS", "", ON_TEXT, "grounding tags silent"),
    Mutant(TEXT, "(token in self.tokenizer.special_ids", "(False", ON_TEXT, "special tokens spelled out"),
    Mutant(TEXT, "        if self._after:\n", "        if False:\n", ON_TEXT, "stop strings count in reasoning"),
    Mutant(TEXT, "keep = max(_overlap(text, stop) for stop in self._stop)", "keep = 0", ON_TEXT,
           "a begun stop string given out"),
    Mutant(TEXT, "text, self._held = text + self._held, \"\"", "self._held = \"\"", ON_TEXT, "held text lost at the end"),
    Mutant(TEXT, "min(found, key", "max(found, key", ON_TEXT, "the later stop string wins"),
    Mutant(TEXT, "self._decoder.decode(self._bytes[token])", "self._bytes[token].decode(errors='replace')", ON_TEXT,
           "half characters"),
    Mutant(TEXT, "*range(0xAE, 0x100)", "*range(0xAD, 0x100)", ON_TEXT, "the soft hyphen as itself"),
    Mutant(BLOCKS, "np.maximum(start - self._retention_G1, 0)", "np.maximum(start - self._retention_G1 + 1, 0)",
           ON_BLOCKS, "one kept row too few"),
    Mutant(BLOCKS, "self._hold(rows, first_GS, stop_GS, stop_GS)", "pass", ON_BLOCKS,
           "nothing given back behind the window"),
    Mutant(BLOCKS, "np.where(self._carries_G1, np.maximum(start, stop - self._retention_G1), start)",
           "np.broadcast_to(start, first_GS.shape)", ON_BLOCKS, "state pages for rows that nobody keeps"),
    Mutant(PAGES, "grown[: self.capacity] = self.tensors[plan.kind, plan.layer]", "pass", ON_BLOCKS,
           "growing forgets what was written"),
    Mutant(BLOCKS, "            self._live[group.name][:, row] = 0\n", "", ON_BLOCKS, "a reused row believes it has pages"),
    Mutant(BLOCKS, "self.pools[group.name].give_back(pages[pages >= 0])", "pass", ON_BLOCKS, "pages leak"),
    Mutant(PAGES, "free = pages[self._holders[pages] == 0].tolist()", "free = pages.tolist()", ON_SNAPSHOTS,
           "a page is free although others hold it"),
    Mutant(PAGES, "self._holders[pages] += 1", "pass", ON_SNAPSHOTS, "shared pages are not counted"),
    Mutant(PAGES, "tensor[target, :rows] = tensor[source, :rows]", "pass", ON_SNAPSHOTS, "a page that grows is not copied"),
    Mutant(BLOCKS, "if rest:", "if False:", ON_SNAPSHOTS, "the page that grows has no copy"),
    Mutant(BLOCKS, "                    self._fill_in(group, row, place)\n", "                    pass\n", ON_SNAPSHOTS,
           "no pages for rows before a resumable place"),
    Mutant(BLOCKS, "            self.pools[name].give_back(pages)\n", "            pass\n", ON_SNAPSHOTS, "forgotten pages leak"),
    Mutant(BLOCKS, "tensor.flatten(0, 1).index_copy_(0, place_W, snapshot.rows[key])", "pass", ON_SNAPSHOTS,
           "kept rows are not brought back"),
    Mutant(ASSEMBLE, "max(self.start_S[seq], place - reach)", "max(self.start_S[seq], place - reach + 1)",
           "tests/unit/test_assemble.py", "one row too few kept before a resumable place"),
    Mutant(BLOCKS, "if pool.limit is not None and missing > pool.num_free:", "if False:", ON_BLOCKS,
           "more pages given than there are"),
    Mutant(BLOCKS, "group.pages_for(count) for count in tokens) <= limit", "group.pages_for(count) for count in tokens[:1]) <= limit",
           ON_BLOCKS, "room for one taken for room for all"),
    Mutant(PREFIX, ", sequence.kinds(start, stop).tobytes()]", "]", ON_CACHES, "names without kinds"),
    Mutant(PREFIX, "facts += [place, sequence.prompt.digests[span.image], ", "facts += [place, ", ON_CACHES,
           "names without pictures"),
    Mutant(PREFIX, ", sequence.adapter.vision_digest]", "]", ON_CACHES, "names without the picture adapter"),
    Mutant(PREFIX, 'self._hash(b"", sequence.adapter.text_digest)', 'self._hash(b"")', ON_CACHES,
           "names without the text adapter"),
    Mutant(PREFIX, "return self._hash(before, *facts)", 'return self._hash(b"", *facts)', ON_CACHES, "blocks are not chained"),
    Mutant(PREFIX, "key=self._secret, ", "", ON_CACHES, "names anybody can compute"),
    Mutant(PREFIX, " | {sequence.cut_at_most(length - 1)}", "", ON_CACHES, "no snapshot before the end of a prompt"),
    Mutant(PREFIX, "{span.start + span.length for span in spans} | ", "set() | ", ON_CACHES, "none behind pictures"),
    Mutant(PREFIX, " if sequence.cut_at_most(place) == place", "", ON_CACHES, "a snapshot inside a span"),
    Mutant(PREFIX, " or sequence.wants_prompt_rows", "", ON_CACHES, "logits of a prompt that were never computed"),
    Mutant(PREFIX, "sequence.computed < tokens < sequence.length", "sequence.computed < tokens", ON_CACHES,
           "no token is left to run"),
    Mutant(PREFIX, "            self._entries.move_to_end(name)\n            while", "            while", ON_CACHES,
           "a hit does not count as use"),
    Mutant(PREFIX, "sorted(self._tails.get(names.block(number), ()), reverse=True)",
           "sorted(self._tails.get(names.block(number), ()))", ON_CACHES, "the shortest known prefix is taken"),
    Mutant(PREFIX, "while self._bytes > self._limit:", "while False:", ON_CACHES, "no limit"),
    Mutant(PREFIX, "        self._blocks.forget(entry.snapshot)\n", "", ON_CACHES, "pages of evicted snapshots leak"),
    Mutant(PREFIX, "if self._frees_pages(entry.snapshot)", "", ON_CACHES, "beginnings go before ends"),
    Mutant(PREFIX, "if self._has_spare(entry.snapshot)", "", ON_CACHES, "snapshots go although that frees nothing"),
    Mutant(IMAGES, "self._rows[key] = rows_IC.clone()", "self._rows[key] = rows_IC", ON_CACHES, "a part holds the whole"),
    Mutant(IMAGES, "            self._rows.move_to_end(key)\n", "", ON_CACHES, "first in, first out"),
    Mutant(IMAGES, "            self._bytes -= oldest.nbytes\n", "            break\n", ON_CACHES, "one goes, then no limit"),
    Mutant(RUNNER, "sequence.prompt.digests[picture], sequence.adapter.vision_digest",
           'sequence.prompt.digests[picture], b""', ON_CACHES, "rows of one adapter for another"),
    Mutant(RUNNER, "                self._pictures.put(key, part)\n", "", ON_CACHES, "nothing is put into the image cache"),
    Mutant(RUNNER, "unknown.setdefault(key, []).append", "unknown.setdefault((key, sequence), []).append", ON_CACHES,
           "a picture is encoded for each request"),
    Mutant(SCHEDULER, "                if not self._prefixes.give_way():\n                    self._preempt()\n",
           "                self._preempt()\n", ON_CACHES + " tests/laws/test_interleavings.py",
           "requests are preempted before the cache gives way"),
    Mutant(SCHEDULER, "        self._prefixes.keep(sequence, sequence.computed)\n", "", ON_CACHES, "a preempted one starts over"),
    Mutant(ENGINE, "        self.prefixes.clear()\n        self.pictures.clear()\n", "", ON_CACHES, "what is broken stays"),
    Mutant(ENGINE, "if error is None and sequence.row is not None:", "if False:", ON_CACHES, "no snapshot where an answer ends"),
    Mutant(SEQUENCE, "max(self.reached, self.computed))", "self.computed)", ON_CACHES,
           "what a preempted request computed itself counts as cached"),
    Mutant(BLOCKS, "grown[:, : table.shape[1]] = table", "pass", ON_BLOCKS, "a widened table is empty"),
    Mutant(SCHEDULER, "sequence.cut_at_most(sequence.computed + min(want, left))",
           "(sequence.computed + min(want, left))", ON_TURNS, "a span is cut"),
    Mutant(SCHEDULER, "(s.served, s.pending > 1, s.request_id)", "(s.pending > 1, s.request_id)", ON_TURNS,
           "whoever was left out waits on"),
    Mutant(SCHEDULER, "(easy if sequence.next_piece() <= quantum else hard)", "easy", ON_TURNS, "pictures crowd text out"),
    Mutant(SCHEDULER, "self._jumped = crowded and not self._jumped", "self._jumped = crowded", ON_TURNS,
           "long pieces first in every step"),
    Mutant(SCHEDULER, "self._jumped = crowded and not self._jumped", "self._jumped = False", ON_TURNS,
           "a long piece that never fits waits for ever"),
    Mutant(SCHEDULER, "self._step_tokens // (2 * max(1, prompts))", "self._step_tokens", ON_TURNS,
           "the first prompt takes the whole step"),
    Mutant(SCHEDULER, "left -= stop - sequence.computed", "left -= 0", ON_TURNS, "no budget"),
    Mutant(SCHEDULER, "sequence = self._running.pop()", "sequence = self._running.pop(0)", ON_PREEMPTION,
           "the oldest is preempted"),
    Mutant(SCHEDULER, "self._waiting.appendleft(sequence)", "self._waiting.append(sequence)", ON_PREEMPTION,
           "a preempted request goes to the end of the queue"),
    Mutant(SEQUENCE, "        self.computed = 0\n        self.row = None", "        self.row = None", ON_PREEMPTION,
           "a preempted request believes its rows are there"),
    Mutant(SCHEDULER, "if piece > self._step_tokens:", "if piece > self._step_tokens + 1:", ON_TURNS,
           "a piece that never fits is accepted"),
    Mutant(SEQUENCE, "ids = np.unique(prompt_ids[prompt_ids >= 0])", "ids = np.unique(prompt_ids[:0])", ON_LOOP,
           "the prompt escapes the repetition penalty"),
    Mutant(SEQUENCE, "len(self.sequence.answer) < self.sequence.limit", "True", ON_LOOP, "max_tokens 0 draws a token"),
    Mutant(RUNNER, "row_n - before + first", "row_n + first", ON_LOOP, "image rows of the wrong picture in later chunks"),
    Mutant(RUNNER, "row_n - before + first", "row_n - before", ON_LOOP, "image rows of the first sequence for all"),
    Mutant(RUNNER, "if picture not in sequence.image_rows:", "if True:", ON_LOOP, "pictures encoded again in every chunk"),
    Mutant(RUNNER, "visible_n2=visible,", "visible_n2=None,", ON_LOOP,
           "no in-span visibility"),
    Mutant(RUNNER, "        self._blocks.settle(rows, stop)\n", "", ON_LOOP, "a long prompt keeps its window pages"),
    Mutant(RUNNER, "<= chunk.stop]:", "<= chunk.stop - 10**6]:", ON_LOOP, "image rows kept for ever"),
    Mutant(RUNNER, "if calls[-1] and taken + cells > self._blocks.step_tokens:", "if False:", ON_ROOM,
           "pictures of many requests in one call of the tower"),
    Mutant(WORKSPACE, "- step - prefixes", "- prefixes", ON_ROOM, "rows take what a step works with"),
    Mutant(PAGES, "        self._untouched += fresh\n", "", ON_BLOCKS, "the same fresh pages for everyone"),
    Mutant(ENGINE, " and not params.ignore_eos)", ")", ON_LOOP, "ignore_eos ignored"),
    Mutant(ENGINE, "token in params.stop_token_ids or ", "", ON_LOOP, "stop ids ignored"),
    Mutant(ENGINE, "position_S=np.array([s.length", "position_S=np.array([0 * s.length", ON_LOOP,
           "the same random number at every step"),
    Mutant(ENGINE, " if sound else self._refuse(sequence)", "", ON_LOOP, "NaN drawn from"),
    Mutant(ENGINE, "- set(config.eos_token_ids)", "", ON_LOOP + " " + ON_LLM, "end of text banned where it is pad too"),
    Mutant(ANSWERS, "sequence.prompt_logprobs[start + r + 1] = logprob", "sequence.prompt_logprobs[start + r] = logprob",
           ON_LOOP, "prompt log-probabilities one place early"),
    Mutant(ENGINE, "row = first + start - chunk.start", "row = first", ON_LOOP,
           "only the first block of logits is right"),
    Mutant(ENGINE, "self._lost = deltas + [", "self._lost = [", ON_LOOP, "an answer lost in a failing step"),
    Mutant(CHECKS, "if options.max_step_tokens < vision.max_tokens:", "if False:", ON_LOOP,
           "a step too small for pictures"),
    Mutant(LLM, "        finally:\n            self._cancel(request)", "        finally:\n            pass", ON_LLM,
           "a closed stream goes on"),
    Mutant(LLM, "                        if delta.request_id in self._mail:\n",
           "                        if delta.request_id == request:\n", ON_LLM, "what a step brings for others is lost"),
    Mutant(LLM, "[self.config.bos_token_id, *self.tokenizer.encode_text(prompt)]", "self.tokenizer.encode_text(prompt)",
           ON_LLM, "text without BOS"),
    Mutant(SAMPLER, "masked_fill_(~allowed", "masked_fill_(allowed", ON_FORMS, "exactly the wrong tokens allowed"),
    Mutant(SAMPLER, "logits_SV[row_J, id_J] += bias_J.float()", "pass", ON_FORMS, "biases without effect"),
    Mutant(GRAMMAR, "matcher.deep_copy()", "matcher", ON_FORMS, "answers share one place in their form"),
    Mutant(GRAMMAR, "            if token == self._after:\n", "            if True:\n", ON_FORMS,
           "a form that begins with the reasoning"),
    Mutant(GRAMMAR, "if wrong or notes:", "if wrong:", ON_FORMS, "a part of a schema ignored"),
    Mutant(GRAMMAR, "if token in added or", "if", ON_FORMS, "added tokens as text"),
    Mutant(GRAMMAR, "self._after is None and self._matcher.is_stopped()", "False", ON_FORMS, "a form never ends an answer"),
    Mutant(ENGINE, "form_rows=[row for row, _ in _forms_of(drawing)]", "form_rows=list(range(len(_forms_of(drawing))))",
           ON_FORMS, "a mask on the wrong answer"),
]  # fmt: skip
