"""Faults in adapters: reading, writing, banks, the routed experts' hook, merging."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ADAPTED = "spyglass/layers/adapted.py"
LINEAR = "spyglass/layers/linear.py"
BANK = "spyglass/lora/bank.py"
CONFIG = "spyglass/lora/config.py"
FIT = "spyglass/lora/fit.py"
LOW_RANK = "spyglass/lora/low_rank.py"
MERGE = "spyglass/lora/merge.py"
NAMES = "spyglass/params/targets.py"
NEW = "spyglass/lora/new.py"
PEFT = "spyglass/lora/peft.py"
PLACES = "spyglass/lora/places.py"
POOL = "spyglass/lora/pool.py"
USE = "spyglass/lora/use.py"
WRITE = "spyglass/lora/write.py"
RUNNER = "spyglass/engine/runner.py"
LLM = "spyglass/engine/llm.py"
PLAN = "spyglass/plan.py"
LAWS = "tests/laws/test_adapters.py"
ON_PEFT = "tests/unit/lora/test_peft.py"
ON_POOL = "tests/unit/lora/test_pool.py"
ON_NAMES = "tests/unit/lora/test_names.py"
ON_NEW = "tests/unit/lora/test_new.py"
ON_USE = "tests/unit/lora/test_use.py"
ON_MERGE = "tests/unit/lora/test_merge.py"
ON_LLM = "tests/unit/engine/test_llm_adapters.py"
GOLDEN = "tests/golden/test_lora.py"

LORA_ROWS: list[Mutant] = [
    Mutant(POOL, "if not (pair.a_RI.any() and pair.b_OR.any()):", "if False:", LAWS, "experts with pairs of zeros leave the fused op"),
    Mutant(ADAPTED, '_product(experts, delta, "w3", expert, x, slot)', '_product(experts, delta, "w1", expert, x, slot)',
           LAWS, "w1 for w3"),
    Mutant(ADAPTED, ".float().clamp(max=limit)", ".float()", LAWS, "gate not clamped"),
    Mutant(ADAPTED, ".float().clamp(-limit, limit)", ".float().clamp(max=limit)", LAWS, "up clamped from above only"),
    Mutant(ADAPTED, " * weights_TK[token, choice, None]", "", LAWS, "routing weight dropped"),
    Mutant(ADAPTED, "addend_TO=delta(matrix, expert, x, slot)", "addend_TO=None", LAWS, "experts without addend"),
    Mutant(LINEAR, "if adapted_T.all():", "if adapted_T.any():", "tests/unit/layers/test_adapted_experts.py", "rows without adapter through the slow path"),
    Mutant(BANK, "rows = rows if keep_R.all() else rows.select(keep_R)", "rows = rows.select(~keep_R)", LAWS,
           "the rows of absent slots"),
    Mutant(BANK, "parts = {**self._parts, slot: rows}", "parts = {slot: rows}", LAWS, "the last adapter alone"),
    Mutant(BANK, "total = added if total is None else total + added", "total = added", LAWS, "the last adapter's rows"),
    Mutant(CONFIG, 'rf"(.*\\.)?({key})$"', 'rf"({key})$"', ON_PEFT, "patterns match whole names"),
    Mutant(CONFIG, "return min(found)[1] if found", "return max(found)[1] if found", ON_PEFT, "the last pattern wins"),
    Mutant(CONFIG, 'or value in ("none", 0, [], {}, "")', "or True", ON_PEFT, "unknown fields ignored"),
    Mutant(LOW_RANK, "math.sqrt(self.rank) if self.rslora else self.rank", "self.rank", ON_PEFT, "rsLoRA ignored"),
    Mutant(LOW_RANK, "shapes, pair.scale * factor", "shapes", ON_POOL, "scale not in the digest"),
    Mutant(LOW_RANK, "(pair.a_RI, pair.b_OR):\n", "(pair.a_RI,):\n", ON_POOL, "B not in the digest"),
    Mutant(NAMES, 'r"attn\\.(wq_a|wq_b|wkv|wo_a|wo_b)"', 'r"attn\\.(indexer\\.)?(wq_a|wq_b|wkv|wo_a|wo_b)"', ON_NAMES,
           "the indexer's query is attention's"),
    Mutant(PEFT, "b.view(len(b), rank, experts)", "b.view(len(b), experts, rank).transpose(1, 2)", ON_PEFT,
           "B of stacked experts read like A"),
    Mutant(PEFT, "b_OrE.chunk(parts)[part]", "b_OrE.chunk(parts)[parts - 1 - part]", GOLDEN, "gate and up swapped"),
    Mutant(PEFT, "if not out.isfinite().all():", "if False:", ON_PEFT, "NaN accepted"),
    Mutant(PEFT, "sound = columns == rank and (rows == rank or own_for_each_group)", "sound = True", ON_PEFT,
           "ranks not compared"),
    Mutant(PEFT, 'if module != outer:\n        return native, "gate_up_proj"', 'if module != outer:\n        return native, "down_proj"',
           ON_PEFT, "the inner pair is down_proj"),
    Mutant(FIT, "if rank > max_rank:", "if False:", ON_POOL, "no limit of ranks"),
    Mutant(POOL, "pair.a_RI.to(torch.float32, copy=True)", "pair.a_RI.float()", ON_POOL, "banks share the caller's memory"),
    Mutant(POOL, "self._next_slot += 1", "self._next_slot += 0", ON_POOL, "slots given twice"),
    Mutant(POOL, "eye_GG * b_rGO", "b_rGO + 0 * eye_GG", ON_POOL, "groups mixed"),
    Mutant(POOL, "[pair.scale * factor] * len(a_RI)", "[pair.scale] * len(a_RI)", LAWS, "factor dropped"),
    Mutant(POOL, "scales = [pair.scale * factor for", "scales = [pair.scale for", LAWS, "factor of experts dropped"),
    Mutant(PLACES, "                if not bank.slots:\n                    place.adapter = None\n", "", ON_POOL,
           "empty banks left behind"),
    Mutant(PLACES, "if expert[1] >= spec.num_experts:", "if False:", ON_POOL, "experts that do not exist"),
    Mutant(NEW, "a_RI = (torch.rand((num_rows, inner), generator=generator) * 2 - 1) / math.sqrt(inner)",
           "a_RI = torch.rand((num_rows, inner), generator=generator) * 2 - 1", ON_NEW, "A not scaled"),
    Mutant(NEW, "b_leaf = nn.Parameter(torch.zeros((num_rows, outer), device=device))",
           "b_leaf = nn.Parameter(torch.ones((num_rows, outer), device=device))", ON_NEW, "B does not begin at zero"),
    Mutant(WRITE, "pair.b_OR * (pair.scale / first.scale)", "pair.b_OR", ON_PEFT, "scales of a stack not joined"),
    Mutant(WRITE, 'inside = ".base_layer" if both and name == "gate_up_proj" else ""', 'inside = ""', ON_PEFT,
           "both stacks under one name"),
    Mutant(MERGE, "after = encode(before + delta, format)", "after = encode(before, format)", ON_MERGE, "delta not added"),
    Mutant(MERGE, "if lost and not self._force:", "if False:", ON_MERGE, "a merge of nothing accepted"),
    Mutant(MERGE, "return self.unchanged_share > MOST_UNCHANGED", "return self.unchanged_share > 0.999", ON_MERGE, "a group is lost beside others"),
    Mutant(MERGE, "return specs | draft_params(config, kind) if kind is not None and config.num_draft_layers else specs", "return specs", ON_MERGE + " tests/unit/train/test_full.py", "draft stages are left out"),
    Mutant(MERGE, "self.unchanged += int((after == before).sum())", "self.unchanged += 0", ON_MERGE, "loss not counted"),
    Mutant(MERGE, "if key not in _QUANTISATION_FIELDS\n        }", "}", ON_MERGE, "a plain checkpoint that says FP8"),
    Mutant(RUNNER, "slot_S=slots_of([chunk.sequence.adapter.slot for chunk in chunks]),", "slot_S=None,", LAWS,
           "tokens without their adapter"),
    Mutant(RUNNER, "slots=[sequence.adapter.slot for", "slots=[0 for", LAWS, "pictures without their adapter"),
    Mutant(PLAN, "if need + adapters > free:", "if need > free:", "tests/unit/test_plan.py", "adapters need no room"),
    Mutant(PLAN, "_bytes_per_device(weights, count, tables) + adapter_bytes", "_bytes_per_device(weights, count, tables)",
           "tests/unit/test_plan.py", "a plan without adapters"),
    Mutant(LLM, "sum(file.bank_bytes() for file in files.values())", "0", "tests/unit/engine/test_llm.py",
           "adapters are not counted at start"),
    Mutant(LLM, "{adapter_name(name): read", "{name: read", ON_LLM, "adapters of the start have any name"),
    Mutant(LLM, "self.lora.attach(adapter_name(name), file", "self.lora.attach(name, file", ON_LLM, "adapters have any name"),
    Mutant(LLM, "            self._users[request] = adapter\n", "            pass\n", ON_LLM, "adapters in use may go"),
    Mutant(USE, "[A-Za-z0-9][A-Za-z0-9._:-]{0,127}", "[A-Za-z0-9._:-]{1,128}", ON_USE, "a name begins with a sign"),
    Mutant(USE, "{0,127}", "{0,128}", ON_USE, "a name of 129"),
    Mutant(USE, "{0,127}", "{0,126}", ON_USE, "a name of 128 is too long"),
    Mutant(USE, "{0,127}", "*", ON_USE, "a name of any length"),
    Mutant(USE, "_NAME.fullmatch(name)", "_NAME.match(name)", ON_USE, "a name with anything behind it"),
    Mutant(USE, "not isinstance(name, str) or ", "", ON_USE, "what is no text is a traceback"),
    Mutant(USE, "repr(name[:_SHOWN_CHARS])", "repr(name)", ON_USE, "a refusal as long as the name"),
    Mutant(USE, "repr(name[:_SHOWN_CHARS])", "name[:_SHOWN_CHARS]", ON_USE, "signs of a terminal in a refusal"),
    Mutant(USE, "    if name in models:\n", "    if False:\n", ON_USE, "the model's own name"),
    Mutant(CONFIG, "    if not _TAME.fullmatch(key):\n", "    if False:\n", ON_PEFT, "nested repetitions"),
    Mutant(CONFIG, "    if ways > _MOST_WAYS:\n", "    if False:\n", ON_PEFT, "many repetitions side by side"),
    Mutant(CONFIG, "* math.prod(choices)", "", ON_PEFT, "many choices side by side"),
    Mutant(CONFIG, '* 2 ** bare.count("?")', "", ON_PEFT, "much that may be left out"),
    Mutant(FIT, "if not LEAST_ALPHA <= abs(alpha) <= MOST_ALPHA:", "if alpha == 0:", ON_PEFT, "an alpha that fp32 has not"),
    Mutant(NAMES, "[1-9][0-9]{0,5}", "[1-9][0-9]*", ON_PEFT, "numbers of thousands of digits"),
    Mutant(MERGE, "if not delta.isfinite().all():", "if False:", ON_MERGE, "a merge of infinite values"),
]  # fmt: skip
