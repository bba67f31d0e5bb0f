"""Faults in the backbone: layers, mechanisms, their order, the assembly of a step and of the model."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

LAYERS, TEXT, MODEL = "spyglass/layers/", "spyglass/text/", "spyglass/model.py"
ASSEMBLE = "spyglass/batch/assemble.py"
KEPT = "tests/unit/text/test_kept.py"
INDEPENDENT = "tests/unit/text/test_independent.py"
MODEL_TESTS = "tests/unit/text/test_model.py"
STEPS = "tests/laws/test_steps.py"
CONTEXT = "tests/laws/test_pictures_in_context.py"

TEXT_ROWS: list[Mutant] = [
    # layers
    Mutant(LAYERS + "rope.py", "/ yarn.factor * ramp_R", "* ramp_R", "tests/unit/layers", "YaRN factor dropped"),
    Mutant(
        LAYERS + "rope.py",
        "frequency_R * (1 - ramp_R)",
        "frequency_R * ramp_R",
        "tests/unit/layers",
        "ramp turned round",
    ),
    Mutant(LAYERS + "rope.py", "high += 0.001", "high += 0", "tests/unit/layers", "equal borders divide by zero"),
    Mutant(
        LAYERS + "rope.py",
        "positions_T.to(torch.float32)",
        "positions_T.to(torch.float64)",
        "tests/unit/layers",
        "angles in float64",
    ),
    Mutant(
        LAYERS + "linear.py",
        "self._rounding = self.spec.rounding if is_quantised(weight.format) else None",
        "self._rounding = self.spec.rounding",
        "tests/unit/layers",
        "inputs of bf16 weights rounded",
    ),
    Mutant(
        LAYERS + "linear.py",
        "return self.spec.rounding if is_quantised(self._found[1]) else None",
        "return None",
        "tests/unit/layers",
        "inputs of experts not rounded",
    ),
    Mutant(
        LAYERS + "linear.py",
        "if weight.format != first_format:",
        "if False:",
        "tests/unit/layers",
        "experts of mixed formats pass",
    ),
    Mutant(
        LAYERS + "linear.py",
        "torch.float32 if spec.fp32_out else build.dtype",
        "build.dtype",
        "tests/unit/layers",
        "fp32 products rounded",
    ),
    Mutant(
        LAYERS + "build.py", 'or weight.format.name == "f32"', "", "tests/unit/layers", "expanding rounds fp32 weights"
    ),
    Mutant(LAYERS + "embedding.py", "ids_T.clamp(min=0)", "ids_T", "tests/unit/layers", "picture ids looked up"),
    Mutant(
        LAYERS + "embedding.py",
        "if low < 0 or high >= below:",
        "if high >= below:",
        "tests/unit/layers",
        "negative experts pass",
    ),
    # hyper-connections and order
    Mutant(
        TEXT + "hyper.py",
        "norm_eps=self._norm_eps, hc_eps=self._hc_eps)\n        out",
        "norm_eps=0.0, hc_eps=0.0)\n        out",
        INDEPENDENT,
        "eps of the head dropped",
    ),
    Mutant(
        TEXT + "v4.py",
        "x_TC = self.ffn_norm(self.hc_ffn.collapse(streams_TMC, pre))",
        "x_TC = self.hc_ffn.collapse(streams_TMC, pre)",
        INDEPENDENT,
        "norm before the experts dropped",
    ),
    Mutant(
        TEXT + "v4.py",
        "pre, post, comb = self.hc_ffn.mix(streams_TMC)",
        "pre, post, comb = self.hc_attn.mix(streams_TMC)",
        INDEPENDENT,
        "experts mixed by the other connection",
    ),
    Mutant(
        TEXT + "v4.py",
        "if index in batch.capture:",
        "if index + 1 in batch.capture:",
        MODEL_TESTS,
        "captured one layer late",
    ),
    # router and experts
    Mutant(TEXT + "router.py", "self.bias_vl.tensor()", "self.bias.tensor()", INDEPENDENT, "bias_vl dropped"),
    Mutant(TEXT + "router.py", "optional=hashed", "optional=False", MODEL_TESTS, "hash layers demand a bias"),
    Mutant(
        TEXT + "router.py",
        "bias_E=None if forced is not None else self.bias.value",
        "bias_E=None",
        INDEPENDENT,
        "bias dropped",
    ),
    Mutant(
        TEXT + "experts.py",
        "self._add_shared(routed_TC, self.shared_experts(x_TC, step.batch.slot_T))",
        "routed_TC.to(x_TC.dtype)",
        INDEPENDENT,
        "shared expert dropped",
    ),
    Mutant(
        TEXT + "experts.py",
        "self._add_shared(routed_TC,",
        "self._add_shared(routed_TC.to(x_TC.dtype),",
        INDEPENDENT,
        "routed sum rounded by itself",
    ),
    # kept steps
    Mutant(TEXT + "kept.py", "absent in (0, rows)", "True", KEPT, "entries that close are part of a shape"),
    Mutant(TEXT + "kept.py", "(absent,), -1)", "(absent,), 0)", KEPT, "entries of open groups are written"),
    Mutant(TEXT + "kept.py", "-(-pool.max_visible // _BOUND) * _BOUND", "pool.max_visible", KEPT, "bounds not widened"),
    Mutant(TEXT + "kept.py", "batch.slot_T is None", "True", KEPT, "adapters are kept"),
    Mutant(TEXT + "kept.py", "len(batch.seq_len_S) == rows <= _MOST_ROWS", "True", KEPT, "chunks of prompts are kept"),
    Mutant(
        TEXT + "kept.py",
        "(part.shape, part.dtype, part.is_contiguous() or part.stride())",
        "()",
        KEPT,
        "a tape for every shape",
    ),
    Mutant(TEXT + "kept.py", "replay(pointers).clone()", "replay(pointers)", KEPT, "the next step overwrites a result"),
    Mutant(TEXT + "kept.py", "self._tapes.popitem(last=False)", "self._tapes.popitem()", KEPT, "the newest tape goes"),
    # attention
    Mutant(TEXT + "attention.py", "tables, inverse=True)", "tables)", INDEPENDENT, "output turned forward"),
    Mutant(TEXT + "attention.py", "if self._q_head_norm:", "if False:", INDEPENDENT, "head norm dropped"),
    Mutant(TEXT + "attention.py", "stepwise=self._stepwise)", "stepwise=False)", INDEPENDENT, "head norm rounds once"),
    Mutant(
        TEXT + "attention.py", "self._scale = dim**-0.5", "self._scale = 1.0", INDEPENDENT, "attention scale dropped"
    ),
    Mutant(
        TEXT + "attention.py",
        "self._stored(kv_TD), cache.window_write_T",
        "kv_TD, cache.window_write_T",
        INDEPENDENT,
        "window rows not rounded",
    ),
    Mutant(
        TEXT + "attention.py",
        'RowRounding(parts, "window")',
        "lambda row: row.bfloat16().to(row.dtype)",
        INDEPENDENT,
        "window rows only cast",
    ),
    Mutant(
        TEXT + "attention.py",
        "self.kv_norm(self.wkv(x_TC, slot_T))",
        "self.wkv(x_TC, slot_T)",
        INDEPENDENT,
        "norm of the latent dropped",
    ),
    Mutant(
        TEXT + "attention.py",
        "self.q_norm(self.wq_a(x_TC, slot_T))",
        "self.wq_a(x_TC, slot_T)",
        INDEPENDENT,
        "norm of the query dropped",
    ),
    # stored rows
    Mutant(
        TEXT + "rounding.py",
        "dims=self._dims, tail_bf16",
        "dims=None, tail_bf16",
        INDEPENDENT,
        "rotary channels in FP8",
    ),
    Mutant(
        TEXT + "rounding.py",
        "tail_bf16=self._tail_bf16",
        "tail_bf16=False",
        INDEPENDENT,
        "rotary channels left in fp32",
    ),
    Mutant(TEXT + "rounding.py", "if self._hadamard:", "if False:", INDEPENDENT, "Hadamard rotation dropped"),
    Mutant(
        TEXT + "rounding.py",
        "x_NI = self._ops.fake_quant(x_NI, self._quant)",
        "pass",
        INDEPENDENT,
        "index rows not rounded",
    ),
    # compressor
    Mutant(
        TEXT + "compressor.py",
        "ape_BE = None if self.ape is None else self.ape.tensor()",
        "ape_BE = None",
        INDEPENDENT,
        "ape dropped",
    ),
    Mutant(
        TEXT + "compressor.py",
        "latent_PD = self.norm(self._pooled(rows_TE, state, pool))",
        "latent_PD = self._pooled(rows_TE, state, pool).clone()",
        INDEPENDENT,
        "norm of entries dropped",
    ),
    Mutant(
        TEXT + "compressor.py",
        "out_dtype=self._dtype\n",
        "out_dtype=torch.float32\n",
        INDEPENDENT,
        "entries normed before the cast",
    ),
    Mutant(
        TEXT + "compressor.py",
        "self._stored(self._ops.rope_partial(latent_PD, *tables))",
        "self._ops.rope_partial(latent_PD, *tables)",
        INDEPENDENT,
        "entries not rounded",
    ),
    Mutant(
        TEXT + "compressor.py",
        "self._ops.cache_write(state, rows_TE, pool.state_write_T)",
        "pass",
        STEPS,
        "un-pooled rows not kept",
    ),
    # indexer
    Mutant(
        TEXT + "indexer.py",
        '"weight_scale": self._weight_scale',
        '"weight_scale": 1.0',
        INDEPENDENT,
        "weights not scaled",
    ),
    Mutant(
        TEXT + "indexer.py",
        "self._rounded(self._ops.rope_partial(q_TNI, *step.tables[self._plan.rope]))",
        "self._rounded(q_TNI)",
        INDEPENDENT,
        "index queries not turned",
    ),
    Mutant(
        TEXT + "indexer.py",
        '"stepwise": self._stepwise',
        '"stepwise": False',
        INDEPENDENT,
        "scores not rounded",
    ),
    Mutant(
        TEXT + "step.py",
        "lo_T = torch.maximum(lo_T, cache.valid_from_S[batch.seq_T.long()])",
        "pass",
        MODEL_TESTS,
        "absent rows read",
    ),
    # assembly of a step
    Mutant(
        ASSEMBLE,
        "put(pool.entry_P * ratio)",
        "put((pool.entry_P + 1) * ratio - 1)",
        INDEPENDENT,
        "entries turned at their last token",
    ),
    Mutant(
        ASSEMBLE,
        "        phase_T=phase_T,\n        visible_T",
        "        phase_T=(rows.position_T - rows.start_S[rows.seq_T]) % ratio,\n        visible_T",
        STEPS,
        "ape counted from the chunk",
    ),
    Mutant(
        ASSEMBLE,
        "visible_T=open_T + closes_T",
        "visible_T=open_T",
        INDEPENDENT,
        "the closing token does not see its entry",
    ),
    Mutant(
        ASSEMBLE,
        "hi_T = rows.position_T + right_T",
        "hi_T = rows.position_T + 0 * right_T",
        CONTEXT,
        "spans causal inside",
    ),
    Mutant(
        ASSEMBLE,
        "np.maximum(left_T, window - 1), 0), hi_T",
        "window + 0 * left_T - 1, 0), hi_T",
        CONTEXT,
        "spans cut at the window",
    ),
    Mutant(
        ASSEMBLE,
        "self.stop_S[self.seq_T] - reach",
        "self.stop_S[self.seq_T] - reach + 2",
        STEPS,
        "un-pooled rows lost",
    ),
    Mutant(ASSEMBLE, "sources_PB[carried] = -2 -", "sources_PB[carried] = -3 -", STEPS, "carried rows off by one"),
    # the model
    Mutant(
        MODEL,
        '1: "image_pad", 3: "image_newline"',
        '3: "image_pad", 1: "image_newline"',
        MODEL_TESTS,
        "pads and newlines swapped",
    ),
    Mutant(MODEL, "table_KC[kind] = holder.tensor()", "pass", MODEL_TESTS, "learned vectors dropped"),
    Mutant(
        MODEL,
        "rounding=config.text.reference_rounding if reference else Rounding()",
        "rounding=Rounding()",
        MODEL_TESTS,
        "reference numerics not rounded",
    ),
    Mutant(MODEL, "stepwise=reference", "stepwise=False", INDEPENDENT, "reference numerics not stepwise"),
    Mutant(
        MODEL,
        'return "reference" if packed else "plain"',
        'return "plain"',
        MODEL_TESTS,
        "packed checkpoints run plain",
    ),
    Mutant(
        MODEL,
        "pictures=config.vision is not None and options.pictures,",
        "pictures=False,",
        MODEL_TESTS,
        "bias_vl never asked for",
    ),
    Mutant("spyglass/text/hyper.py", "rounds=self._rounds", "rounds=1", INDEPENDENT, "one round of the mix"),
    Mutant(
        "spyglass/text/attention.py",
        "            self.attn_sink.value,\n",
        "            0 * self.attn_sink.value,\n",
        INDEPENDENT,
        "sinks of zero",
    ),
    Mutant(
        "spyglass/text/attention.py",
        "            self.attn_sink.value,\n",
        "            self.attn_sink.value.flip(0),\n",
        INDEPENDENT,
        "sinks of other heads",
    ),
    Mutant(
        "spyglass/text/router.py",
        "forced = None if self.tid2eid is None else",
        "forced = None if True else",
        INDEPENDENT,
        "hash layers choose by score",
    ),
    Mutant(
        "spyglass/text/router.py",
        "None if forced is None else step.ids_T",
        "None if forced is None else step.batch.positions_T.long()",
        INDEPENDENT,
        "hash layers choose by position",
    ),
    Mutant(
        "spyglass/text/step.py",
        "batch.kinds_T >= 0 if",
        "batch.kinds_T == 2 if",
        INDEPENDENT,
        "pads and line ends are no pictures",
    ),
    Mutant(
        "spyglass/text/step.py",
        "batch.kinds_T >= 0 if",
        "batch.kinds_T > 0 if",
        INDEPENDENT,
        "the first kind is no picture",
    ),
]
