"""Faults in what DeepSeek-V4.1 does differently: roles, shared rows, candidates, shifted reads, engram, layout."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

READ = "spyglass/config/read_v41.py"
WIRING = "spyglass/text/v41.py"
GATE = "spyglass/text/engram.py"
INDEXER = "spyglass/text/indexer.py"
ATTENTION = "spyglass/text/attention.py"
COMPRESSOR = "spyglass/text/compressor.py"
TOPK = "spyglass/ops/index_topk/reference.py"
BLOCKS = "spyglass/ops/index_blocks/reference.py"
HASHING = "spyglass/engram/hashing.py"
VOCABULARY = "spyglass/engram/vocabulary.py"
STORE = "spyglass/engram/store.py"
FEED = "spyglass/engram/feed.py"
SEQUENCE = "spyglass/engine/sequence.py"
SCHEMA = "spyglass/params/table.py"
TOKENIZER = "spyglass/checkpoint/tokenizer.py"
PLAN = "spyglass/plan.py"
MODEL = "spyglass/model.py"

CONFIG = "tests/unit/config/test_read_v41.py"
LAYERS = "tests/unit/text/test_independent_v41.py"
LAWS = "tests/laws/test_v41.py"
HASHES = "tests/unit/engram/test_hashing.py"
WORDS = "tests/unit/engram/test_vocabulary.py"
TABLES = "tests/unit/engram/test_store.py"
SELECTION = "tests/ops/test_index_blocks.py"
LAYOUT = "tests/unit/checkpoint/test_v41_layout.py -m 'not slow'"
PLANS = "tests/unit/test_plan_v41.py"

V41_ROWS: list[Mutant] = [
    Mutant(READ, "q_head_norm=False", "q_head_norm=True", CONFIG, "a per-head norm of q"),
    Mutant(READ, "shifted_hyper=True", "shifted_hyper=False", CONFIG, "reads not shifted, by config"),
    Mutant(READ, "rope=far if ratio else near", "rope=far", CONFIG, "YaRN in local layers"),
    Mutant(READ, "if source <= index]", "if source < index]", CONFIG, "a source does not use itself"),
    Mutant(READ, "layer > candidate_source}", "layer >= candidate_source}", CONFIG, "the candidate source limits itself"),
    Mutant(READ, "gated=ratio > 1", "gated=True", CONFIG, "a gate at ratio 1"),
    Mutant(READ, "FakeQuant(element=\"e2m1\", block=16, scale=\"e4m3\")", "FakeQuant(element=\"e2m1\", block=16)", CONFIG,
           "pool scales as powers of two"),
    Mutant(READ, "kv_dims=head_dim", "kv_dims=head_dim - 64", CONFIG, "rotated channels not rounded"),
    Mutant(READ, 'text.fixed("gate_temp", 1)', "", CONFIG, "another gate temperature accepted"),
    Mutant(READ, "if text.get(name) is not None and text.get(name) != value:", "if False:", CONFIG, "two rope bases"),
    Mutant(WIRING, "self.ffn_norm(self.hc_ffn.collapse(streams_TMC, pre_ffn))",
           "self.ffn_norm(self.hc_ffn.collapse(streams_TMC, pre_next))", LAYERS, "experts read with their own weights"),
    Mutant(WIRING, "self.attn_norm(self.hc_attn.collapse(streams_TMC, pre_TM))",
           "self.attn_norm(self.hc_attn.collapse(streams_TMC, pre_ffn))", LAYERS, "attention reads with its own weights"),
    Mutant(WIRING, "streams_TMC, post, comb), pre_next", "streams_TMC, post, comb), pre_ffn", LAYERS,
           "the next layer gets the wrong read weights"),
    Mutant(WIRING, "pre_TM[:, 0] = 1.0", "pre_TM[:, 0] = 0.5", "tests/golden/test_v41.py -k sparse",
           "the first read is halved"),
    Mutant(WIRING, "streams_TMC = layer.recall(streams_TMC, step)", "layer.recall(streams_TMC, step)",
           "tests/golden/test_v41.py", "memory fetched and thrown away"),
    Mutant(GATE, "* self._inverse_size(h_TMC) ", "", LAYERS, "no norm of the streams in the gate"),
    Mutant(GATE, "* self._inverse_size(key_TMC) ", "", LAYERS, "no norm of the keys in the gate"),
    Mutant(GATE, "* self._hidden**-0.5", "", LAYERS, "no width in the gate"),
    Mutant(GATE, "(self.q_weight.tensor() * self.k_weight.tensor())", "self.q_weight.tensor()", LAYERS, "no k_weight"),
    Mutant(GATE, "(self.q_weight.tensor() * self.k_weight.tensor())", "self.k_weight.tensor()", LAYERS, "no q_weight"),
    Mutant(GATE, ".clamp(min=_LEAST).sqrt()", "", LAYERS, "no root in the gate"),
    Mutant(GATE, "torch.copysign(dot_TM.abs().clamp(min=_LEAST).sqrt(), dot_TM)",
           "dot_TM.abs().clamp(min=_LEAST).sqrt()", LAYERS, "the sign of the gate is lost"),
    Mutant(GATE, "gate_TM = gate_TM.masked_fill(step.picture_T[:, None], 0.0)", "pass", LAYERS, "memory on pictures"),
    Mutant(GATE, "x_TMC.square().mean(dim=-1) + self._eps", "x_TMC.square().mean(dim=-1)", LAYERS, "no eps in the gate"),
    Mutant(GATE, "rounding=parts.rounding.linear,", "", LAYERS, "engram rows not rounded"),
    Mutant(INDEXER, "self.k_norm(self.wk(latent_PD, slot_P))", "self.wk(latent_PD, slot_P)", LAYERS, "no norm of keys"),
    Mutant(INDEXER, "self._rounded(key_PI)", "key_PI", LAYERS, "index keys not rounded"),
    Mutant(INDEXER, "key_PI = self._ops.rope_partial(self.k_norm(self.wk(latent_PD, slot_P)), *tables)",
           "key_PI = self.k_norm(self.wk(latent_PD, slot_P))", LAYERS, "index keys not rotated"),
    Mutant(INDEXER, '("index", plan.index_keys_from)', '("index", plan.kv_from and 2)', LAYERS, "another layer's keys"),
    Mutant(INDEXER, "source = self._plan.candidates_from\n", "source = None\n", LAYERS, "candidates restrict nothing"),
    Mutant(ATTENTION, "return picks[source]", "return picks.get(self._plan.index)", LAYERS, "reuse layers attend all"),
    Mutant(ATTENTION, '("pool", plan.kv_from)', '("pool", 2)', LAYERS, "the rows of the first source everywhere"),
    Mutant(COMPRESSOR, "return latent_PD", "return row_PD if tables is not None else None", LAYERS,
           "index keys from rotated latents"),
    Mutant(COMPRESSOR, "if state is not None and pool.state_write_T is not None:", "if False:", LAWS + " -k cut",
           "open pairs forgotten"),
    Mutant(TOPK, "listed_TB.scatter_(1, torch.where(blocks_TY < 0, num_blocks, blocks_TY).long(), True)",
           "listed_TB.scatter_(1, blocks_TY.clamp(min=0).long(), True)", SELECTION, "an absent block allows the first"),
    Mutant(BLOCKS, ".amax(dim=-1)", ".amin(dim=-1)", SELECTION, "a block counts as its worst entry"),
    Mutant(BLOCKS, 'best_TB = best_TB.masked_fill(is_newest_TB, float("inf"))', "pass", SELECTION, "newest not pinned"),
    Mutant(BLOCKS, "(visible_T.long() - 1)", "visible_T.long()", SELECTION, "the pin one entry too far"),
    Mutant(HASHING, "alive_TL = np.logical_and.accumulate(tokens_TL >= 0, axis=1)", "alive_TL = tokens_TL >= 0", HASHES,
           "blocking not cumulative"),
    Mutant(HASHING, "np.where(kinds_T < 0, ids_T, -1)", "ids_T", HASHES, "pictures alive in the look-back"),
    Mutant(HASHING, "missing_TL[before] - 1]", "missing_TL[before] - 2]", HASHES, "look-back off by one"),
    Mutant(HASHING, "+ layer.offsets_J", "", HASHES, "no column offsets"),
    Mutant(HASHING, "np.bitwise_xor.accumulate", "np.add.accumulate", HASHES, "sum instead of xor"),
    Mutant(HASHING, "engram.prime_above - 1", "engram.prime_above", HASHES,
           "primes from one further on"),
    Mutant(HASHING, "if sum(primes) != num_rows:", "if False:", HASHES, "table sizes not checked"),
    Mutant(VOCABULARY, "normalizers.StripAccents(),", "", WORDS, "marks kept"),
    Mutant(VOCABULARY, "normalizers.NFKC(),", "", WORDS, "no compatibility forms"),
    Mutant(VOCABULARY, "normalizers.Lowercase(),", "", WORDS, "case kept"),
    Mutant(VOCABULARY, "normalizers.Strip(),", "", WORDS, "spaces at the ends kept"),
    Mutant(VOCABULARY, 'normalizers.Replace(Regex("^ $"), _LONE_SPACE),', "", WORDS, "a lone space becomes nothing"),
    Mutant(VOCABULARY, "normalise.normalize_str(text) or text", "normalise.normalize_str(text)", WORDS, "empty keys join"),
    Mutant(VOCABULARY, "tokenizer.id_to_token(token) if _NOT_TEXT in text else None", "None", WORDS, "broken bytes join"),
    Mutant(VOCABULARY, "if own.exists():", "if False:", WORDS, "the folder's own map ignored"),
    Mutant(VOCABULARY, "if found != engram.num_classes:", "if False:", WORDS, "any tokenizer passes"),
    Mutant(STORE, "_e8m0_values()[self.scale]", "np.ones_like(self.scale, np.float32)", TABLES, "row scales ignored"),
    Mutant(STORE, "mantissa * 2.0**-9", "0.0", TABLES, "subnormal codes lost"),
    Mutant(STORE, "header.start - first).reshape", "0).reshape", TABLES, "tables read from the page's start"),
    Mutant(FEED, "if table is None:", "if table is not None:", "tests/unit/engram/test_feed.py", "placements mixed up"),
    Mutant(SEQUENCE, "np.where(self._kinds[first:start] >= 0, -2, self._ids[first:start])[::-1]",
           "np.where(self._kinds[first:start] >= 0, -2, self._ids[first:start])", LAWS + " -k cut", "look-back reversed"),
    Mutant(SEQUENCE, "np.where(self._kinds[first:start] >= 0, -2, self._ids[first:start])",
           "self._ids[first:start].clip(0)", LAWS + " -k cut", "pictures alive across steps"),
    Mutant(SCHEMA, "**({} if text.shifted_hyper else _hyper_head(", "**({} if False else _hyper_head(", LAYOUT,
           "a hyper head expected"),
    Mutant(SCHEMA, "if compressor.gated:", "if True:", LAYOUT, "a gate expected at ratio 1"),
    Mutant(SCHEMA, "text = replace(text, n_routed_experts=int(experts))", "pass", LAYOUT, "drafts with all experts"),
    Mutant(SCHEMA, '"deepseek_v41": ("embed", "head")', '"deepseek_v41": ("markov_w1", "markov_w2")', LAYOUT,
           "V4 names in the draft head"),
    Mutant(TOKENIZER, "| (SYSTEM if config.family", "| (SYSTEM if not config.family", LAYOUT, "no system token"),
    Mutant(PLAN, 'if name != "engram"]', "]", PLANS, "tables counted as loaded"),
    Mutant(PLAN, 'if tables in ("host", "devices"):', "if False:", PLANS, "tables never counted"),
    Mutant(PLAN, "if rounding.pool.element == \"e2m1\" else", "if False else", PLANS, "index keys in FP8"),
    Mutant(MODEL, "if name in _NO_VECTOR[config.vision.layout]:", "if False:", "tests/golden/test_v41.py",
           "a pad vector expected"),
    Mutant(GATE, "(h_TMC + gate_TM[:, :, None] * value_TC[:, None])", "(gate_TM[:, :, None] * value_TC[:, None])",
           LAYERS, "memory in place of the streams"),
    Mutant(GATE, "gate_TM[:, :, None] * value_TC", "gate_TM[:, :, None] * 0 + value_TC",
           LAYERS, "memory without its gate"),
    Mutant(GATE, "torch.sigmoid(torch.copysign", "(torch.copysign",
           LAYERS, "no sigmoid in the gate"),
    Mutant(GATE, "clamp(min=_LEAST)", "clamp(min=0)",
           "tests/unit/text/test_v41_terms.py", "no least in the gate"),
    Mutant(GATE, "split([self._streams * self._hidden, self._hidden], dim=-1)", "split([self._hidden, self._streams * self._hidden], dim=-1)[::-1]",
           LAYERS, "the value first, then the keys"),
    Mutant(GATE, "engram_rows[self._layer]", "engram_rows[min(step.batch.engram_rows)]",
           LAYERS, "every layer reads the first one's memory"),
]  # fmt: skip
