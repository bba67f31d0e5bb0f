"""Faults in headers, names, matching, loading, saving and planning."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

HEADERS = "spyglass/checkpoint/safetensors.py"
MATCH = "spyglass/checkpoint/match.py"
LOAD = "spyglass/checkpoint/load.py"
STREAM = "spyglass/checkpoint/stream.py"
NAMES = "spyglass/params/hf_names.py"
SCHEMA = "spyglass/params/table.py"
LAYOUT = "spyglass/checkpoint/layout.py"
SAVE = "spyglass/checkpoint/save.py"
RANDOM = "spyglass/checkpoint/random.py"
PLAN = "spyglass/plan.py"
HEADER_TESTS = "tests/unit/checkpoint/test_headers.py"
INDEX_TESTS = "tests/unit/checkpoint/test_index.py"
NAME_TESTS = "tests/unit/checkpoint/test_names.py"
SCHEMA_TESTS = "tests/unit/checkpoint/test_schema.py"
LOAD_TESTS = "tests/unit/checkpoint/test_load.py"
VALUE_TESTS = "tests/unit/checkpoint/test_damaged_values.py"
SAVE_TESTS = "tests/unit/checkpoint/test_save.py"
RANDOM_TESTS = "tests/unit/checkpoint/test_random.py"
PLAN_TESTS = "tests/unit/test_plan.py"

CHECKPOINT_ROWS: list[Mutant] = [
    Mutant(HEADERS, "or 8 + length > status.st_size:", "or False:", HEADER_TESTS, "a header longer than its file is read"),
    Mutant(HEADERS, "if tensor.start != end:", "if tensor.start < end:", HEADER_TESTS, "gaps between tensors pass"),
    Mutant(HEADERS, "if tensor.start != end:", "if tensor.start > end:", HEADER_TESTS, "overlapping tensors pass"),
    Mutant(HEADERS, "    if end != size:", "    if end < size:", HEADER_TESTS, "a truncated file passes"),
    Mutant(HEADERS, "    if end != size:", "    if end > size:", HEADER_TESTS, "a file with a tail passes"),
    Mutant(HEADERS, "if offsets[1] - offsets[0] != nbytes:", "if offsets[1] - offsets[0] < nbytes:", HEADER_TESTS,
           "a byte range longer than its shape passes"),
    Mutant(HEADERS, "if len(result) != len(pairs):", "if False:", HEADER_TESTS, "a name twice in a header passes"),
    Mutant(HEADERS, "return type(value) is int and 0 <= value < 1 << 63", "return isinstance(value, int) and value >= 0",
           HEADER_TESTS, "true is a size, so is a number beyond 63 bits"),
    Mutant(HEADERS, "        if twice:\n            raise CheckpointError(f\"{directory}: found in", "        if False:\n            "
           "raise CheckpointError(f\"{directory}: found in", INDEX_TESTS, "a tensor in two shards passes"),
    Mutant(HEADERS, 'or "/" in file', "or False", INDEX_TESTS, "an index may name files elsewhere"),
    Mutant(HEADERS, "if name in tensors and tensors[name].file.name != file", "if False", INDEX_TESTS,
           "a tensor in another shard than listed passes"),
    Mutant(HEADERS, "(match is None or int(match[2]) == 1)", "True", INDEX_TESTS, "one shard of two passes for a model"),
    Mutant(NAMES, '"w1": ("gate_up_proj", 0, 2), "w3": ("gate_up_proj", 1, 2)',
           '"w1": ("gate_up_proj", 1, 2), "w3": ("gate_up_proj", 0, 2)', NAME_TESTS, "w3 stacked before w1"),
    Mutant(NAMES, '"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}', '"w1": "up_proj", "w2": "down_proj", '
           '"w3": "gate_proj"}', NAME_TESTS, "gate and up of experts exchanged"),
    Mutant(NAMES, '".scale": ".weight_scale_inv"', '".scale": ".scale"', NAME_TESTS, "scales keep their native ending"),
    Mutant(MATCH, "start = header.start + nbytes * (part.expert * part.parts + part.part)",
           "start = header.start + nbytes * (part.part * experts + part.expert)", LOAD_TESTS, "stacked halves interleaved"),
    Mutant(MATCH, "        elif name.endswith(\".scale\"):", "        elif name.endswith(\".scale\") and False:", LOAD_TESTS,
           "an orphan scale is not called one"),
    Mutant(MATCH, "            result.missing.append(f\"{name}.scale\")\n            return",
           "            result.missing.append(name)\n            return", LOAD_TESTS, "a missing scale is not named"),
    Mutant(MATCH, "    result.mixed.extend(_mixed_experts(result.sources))\n", "", LOAD_TESTS, "mixed experts pass"),
    Mutant(MATCH, "if weight.dtype in formats and weight.shape == entry.shape:", "if weight.dtype in formats:",
           LOAD_TESTS, "shapes of plain tensors unchecked"),
    Mutant(MATCH, "if known and format.scale_shape(shape) == scale.shape:", "if known:", LOAD_TESTS,
           "shapes of scales unchecked"),
    Mutant(MATCH, '    if part in skip:\n        return part\n', "    return part\n", LOAD_TESTS, "left-over tensors pass"),
    Mutant(MATCH, "    if twice:\n        raise CheckpointError(f\"{checkpoint.directory}: two names",
           "    if False:\n        raise CheckpointError(f\"{checkpoint.directory}: two names", LOAD_TESTS,
           "two names for one tensor pass"),
    Mutant(LOAD, "            _refuse_non_numbers(name, packed, slot.kind)\n", "", VALUE_TESTS, "NaN in a bias passes"),
    Mutant(LOAD, "int(scale.max()) < E8M0_NAN", "True", VALUE_TESTS, "NaN scales pass"),
    Mutant(STREAM, "while done < header.nbytes:", "if done < header.nbytes:", LOAD_TESTS, "a file that shrinks reads as noise"),
    Mutant(STREAM, "scale = None if source.scale is None else found[id(source.scale)]", "scale = None", LOAD_TESTS,
           "scales are dropped"),
    Mutant(SCHEMA, "optional=hashed)", "optional=True)", SCHEMA_TESTS, "any router may lack its bias"),
    Mutant(SCHEMA, "rows = (2 + streams) * streams", "rows = (1 + streams) * streams", SCHEMA_TESTS, "no post rows"),
    Mutant(SCHEMA, "(group_rows, heads // text.o_groups * dim)", "(group_rows, heads * dim)", SCHEMA_TESTS,
           "wo_a reads all heads"),
    Mutant(LAYOUT, "if current and size + nbytes > shard_bytes:", "if False:", SAVE_TESTS, "everything in one file"),
    Mutant(LAYOUT, "key=lambda tensor: (-DTYPE_BYTES[tensor.dtype], tensor.name)", "key=lambda tensor: tensor.name",
           SAVE_TESTS, "tensors are not aligned"),
    Mutant(LAYOUT, "tensor.nbytes * (part.expert * part.parts + part.part)", "tensor.nbytes * part.expert", LOAD_TESTS,
           "w3 overwrites w1 in a stack"),
    Mutant(SAVE, "            path.unlink(missing_ok=True)", "            pass", SAVE_TESTS, "a failed save leaves files"),
    Mutant(SAVE, "        _refuse_strangers(directory, layout)\n", "", SAVE_TESTS, "two checkpoints in one folder"),
    Mutant(SAVE, "            _refuse_small_disk(directory, layout)\n", "            pass\n", SAVE_TESTS, "a full disk is found late"),
    Mutant(RANDOM, 'f"{seed}:{name}"', 'f"{seed}"', RANDOM_TESTS, "every tensor is drawn alike"),
    Mutant(RANDOM, 'f"{seed}:{name}"', 'f"{name}"', RANDOM_TESTS, "the seed is ignored"),
    Mutant(PLAN, "fixed += row * (plan.retention + (1 if plan.kind == \"window\" else 0))", "fixed += row * plan.retention",
           PLAN_TESTS, "a window has a row too few"),
    Mutant(PLAN, "per_token += row / plan.tokens_per_row", "per_token += row", PLAN_TESTS, "pooled rows count every token"),
    Mutant(PLAN, "fits = room > 0 and context >= LEAST_CONTEXT", "fits = room > 0", PLAN_TESTS, "no room for a prompt"),
    Mutant(PLAN, "min(machine.gpus, key=lambda gpu: gpu.free)", "max(machine.gpus, key=lambda gpu: gpu.free)", PLAN_TESTS,
           "the emptiest card decides"),
]  # fmt: skip
