"""Faults in whole-model training: packing, bins, dense ops, masters, optimiser, balancing, and the tiny models' steps."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PACKING = "spyglass/train/packing.py"
BINS = "spyglass/train/bins.py"
DENSE = "spyglass/train/dense.py"
ROUNDING = "spyglass/ops/fake_quant/training.py"
MASTERS = "spyglass/train/masters.py"
MUON = "spyglass/train/muon.py"
BALANCE = "spyglass/train/balance.py"
LOSS = "spyglass/train/loss.py"
PLACES = "spyglass/train/places.py"
WHOLE = "spyglass/train/whole.py"
FEED = "scripts/tiny/feed.py"
TINY_TRAIN = "scripts/tiny/train.py"
PAIRS = "scripts/tiny/pairs.py"
PACK_TESTS = "tests/unit/train/test_packing.py"
WHOLE_TESTS = "tests/unit/train/test_whole.py"
PLACE_TESTS = "tests/unit/train/test_places.py"
SCRIPT_TESTS = "tests/unit/train/test_tiny_script.py"
ADAPTER_TESTS = "tests/unit/train/test_tiny_adapters.py"

WHOLE_TRAINING_ROWS: list[Mutant] = [
    Mutant(
        TINY_TRAIN, "    if missing:\n", "    if False:\n", SCRIPT_TESTS, "a state without taught tokens is a KeyError"
    ),
    Mutant(
        PACKING,
        "prompt.image_row_T + cells, -1)",
        "prompt.image_row_T, -1)",
        PACK_TESTS,
        "every sample gets the pictures of the first",
    ),
    Mutant(
        PACKING,
        "visible_n2=prompt.visible_T2 if prompt.spans else None",
        "visible_n2=None",
        PACK_TESTS,
        "pictures are read in one direction only",
    ),
    Mutant(
        PACKING,
        "return np.flatnonzero(learn_T[1:])",
        "return np.flatnonzero(learn_T)",
        PACK_TESTS,
        "a token predicts itself",
    ),
    Mutant(PACKING, "count, initial=0)", "[1] * len(count), initial=0)", PACK_TESTS, "sequences share memory"),
    Mutant(LOSS, 'reduction="sum"', 'reduction="mean"', PACK_TESTS, "the loss is a mean already"),
    Mutant(LOSS, "(targets_R != IGNORED).sum()", "torch.tensor(len(targets_R))", PACK_TESTS, "padding counts"),
    Mutant(BINS, "(seq[:, :, None] == seq[:, None]) &", "", WHOLE_TESTS, "sequences of a bin see each other"),
    Mutant(BINS, "& (key >= lo[:, :, None])", "", WHOLE_TESTS, "the window has no end"),
    Mutant(BINS, "& (key <= hi[:, :, None])", "", WHOLE_TESTS, "rows see what comes after them"),
    Mutant(BINS, "(owner == seq[:, :, None]) &", "", WHOLE_TESTS, "entries of a neighbour are attended"),
    Mutant(BINS, "& (entry < visible[:, :, None])", "", WHOLE_TESTS, "entries that are not closed yet are attended"),
    Mutant(
        BINS,
        "index_select(0, row_U), angle.index_select(0, column_U)",
        "index_select(0, column_U), angle.index_select(0, row_U)",
        WHOLE_TESTS,
        "rows and columns of patches change places",
    ),
    Mutant(BINS, "taken[ratio] += entries", "taken[ratio] += 0", WHOLE_TESTS, "entries of a bin share their places"),
    Mutant(
        BINS,
        "padded_NY.index_select(0, place_U[:-1])",
        "padded_NY.index_select(0, place_U[:-1].flip(0))",
        WHOLE_TESTS,
        "gradients of patches reach others",
    ),
    Mutant(
        BINS,
        "if max(patches, default=0) > most.largest_picture:",
        "if False:",
        WHOLE_TESTS,
        "a picture larger than the attention was told",
    ),
    Mutant(DENSE, "+ torch.exp(sink_H.float()[:, None] - top)", "", WHOLE_TESTS, "no sink"),
    Mutant(DENSE, "(z * weight_TE[:, :, None])", "z", WHOLE_TESTS, "experts are not weighted"),
    Mutant(DENSE, "up.float().clamp(-limit, limit)", "up.float()", WHOLE_TESTS, "up is not clamped"),
    Mutant(DENSE, "gate.float().clamp(max=limit)", "gate.float()", WHOLE_TESTS, "the gate is not clamped"),
    Mutant(DENSE, 'gate_PBD.masked_fill(absent, float("-inf"))', "gate_PBD", WHOLE_TESTS, "absent rows are pooled"),
    Mutant(
        ROUNDING,
        "return grads[0], None",
        "return torch.zeros_like(grads[0]), None",
        WHOLE_TESTS,
        "rounding stops gradients",
    ),
    Mutant(
        DENSE,
        "multiply(grad_TO.mT, x_TI)",
        "0 * multiply(grad_TO.mT, x_TI)",
        WHOLE_TESTS,
        "weights of fp32 products are not learned",
    ),
    Mutant(
        DENSE, "[real_T & ~picture, real_T & picture]", "[~picture, picture]", WHOLE_TESTS, "padding counts as load"
    ),
    Mutant(MASTERS, "> mantissa).to", ">= mantissa).to", WHOLE_TESTS, "a block that just fits gets a larger scale"),
    Mutant(
        MASTERS,
        "self._quantise, format=stack.format",
        "lambda v, format: v, format=stack.format",
        WHOLE_TESTS,
        "what is trained is not what is packed",
    ),
    Mutant(
        MASTERS,
        "stack.names[::experts]",
        "reversed(stack.names[::experts])",
        WHOLE_TESTS,
        "experts of one layer go to another",
    ),
    Mutant(MUON, "return (x.mT if tall else x).float()", "return x.float()", WHOLE_TESTS, "tall updates come out wide"),
    Mutant(MUON, "b * gram + c * gram @ gram", "b * gram", WHOLE_TESTS, "the iteration does not settle"),
    Mutant(MUON, 'self.state["number"].add_(finite)', "", WHOLE_TESTS, "Adam's bias is never corrected"),
    Mutant(
        BALANCE,
        "torch.sign(load_2E.mean(dim=1, keepdim=True) - load_2E)",
        "torch.sign(load_2E - load_2E.mean(dim=1, keepdim=True))",
        WHOLE_TESTS,
        "busy experts get busier",
    ),
    Mutant(
        FEED,
        "[len(sample.rows) for sample in order]",
        "[1 for sample in order]",
        SCRIPT_TESTS,
        "targets belong to other cases",
    ),
    Mutant(
        PLACES,
        "np.tile(across, len(down)), np.repeat(down, len(across))",
        "np.repeat(down, len(across)), np.tile(across, len(down))",
        PLACE_TESTS,
        "column and line change places",
    ),
    Mutant(
        PLACES,
        "(first + np.minimum(first + ratio, length)) / 2",
        "first",
        PLACE_TESTS,
        "a cell stands at its first patch",
    ),
    Mutant(PLACES, "(targets_N != IGNORED).sum()", "len(targets_N)", PLACE_TESTS, "unused cells are asked too"),
    Mutant(WHOLE, " + self.place_rate * count * places", "", PLACE_TESTS, "places are measured, not learned"),
    Mutant(
        PAIRS,
        "lambda value: stored_values(value, BF16)",
        "lambda value: value",
        ADAPTER_TESTS,
        "trained in fp32, saved in bf16",
    ),
    Mutant(PAIRS, "self.alpha / self.rank *", "self.alpha *", ADAPTER_TESTS, "pairs are added without their scale"),
    Mutant(
        PAIRS,
        "if group_of(name) in targets]",
        "if group_of(name) is not None]",
        ADAPTER_TESTS,
        "every group is trained",
    ),
    Mutant(PAIRS, "b_OR=b_OR, alpha=self.alpha", "b_OR=b_OR, alpha=1.0", ADAPTER_TESTS, "the file has another scale"),
    Mutant(
        PAIRS,
        "zip(self.bases, sides[::2]",
        "zip(self.bases[::-1], sides[::2]",
        ADAPTER_TESTS,
        "pairs join other matrices",
    ),
    Mutant(FEED, "variant=source.variant", "variant=None", ADAPTER_TESTS, "an adapter learns what the model knows"),
    Mutant(
        DENSE,
        "unflatten(1, q_BLHD.shape[1:3]) * scale",
        "unflatten(1, q_BLHD.shape[1:3])",
        WHOLE_TESTS,
        "dense attention without scale",
    ),
    Mutant(
        DENSE,
        "rounded = p + (p.to(q_BLHD.dtype).float() - p).detach()",
        "rounded = p",
        WHOLE_TESTS,
        "dense attention: p is not rounded",
    ),
    Mutant(DENSE, "return (out / total).to", "return out.to", WHOLE_TESTS, "dense attention: not divided by the sum"),
    Mutant(
        DENSE,
        "x = x_TI if rounding is None else self.round_to(x_TI, rounding)",
        "x = x_TI",
        WHOLE_TESTS,
        "dense inputs not rounded",
    ),
    Mutant(
        DENSE,
        "z_TEF if rounding is None else self.round_to(z_TEF, rounding)",
        "z_TEF",
        WHOLE_TESTS,
        "dense activations not rounded",
    ),
    Mutant(
        DENSE,
        "x_TC if rounding is None else self.round_to(x_TC, rounding)",
        "x_TC",
        WHOLE_TESTS,
        "dense experts' inputs not rounded",
    ),
    Mutant(DENSE, "for w in (w1, w3))", "for w in (w3, w1))", WHOLE_TESTS, "gate and up change places"),
    Mutant(
        DENSE,
        "index = sources_PB[:, :half], sources_PB[:, half:]",
        "index = sources_PB[:, half:], sources_PB[:, :half]",
        WHOLE_TESTS,
        "halves of overlapping groups change places",
    ),
    Mutant(
        DENSE,
        "return grad_TO @ weight_OI.to(x_TI.dtype), ",
        "return 0 * grad_TO @ weight_OI.to(x_TI.dtype), ",
        WHOLE_TESTS,
        "inputs of fp32 products learn nothing",
    ),
    Mutant(
        DENSE,
        '"hyper_mix": HyperMix(fused(coefficients)),',
        '"hyper_mix": lambda *a, **k: tuple(t.detach() for t in reference.hyper_mix(*a, **k)),',
        WHOLE_TESTS,
        "hyper-connections learn nothing",
    ),
    Mutant(
        DENSE,
        "[real_T & ~picture, real_T & picture]",
        "[real_T & picture, real_T & ~picture]",
        WHOLE_TESTS,
        "loads of text and pictures change places",
    ),
    Mutant(
        BALANCE,
        "zip(BIASES, step_2E, strict=True)",
        "zip(BIASES[::-1], step_2E, strict=True)",
        WHOLE_TESTS,
        "text moves the bias of pictures",
    ),
    Mutant(
        BALANCE,
        "torch.sign(load_2E.mean(dim=1, keepdim=True) - load_2E)",
        "(load_2E.mean(dim=1, keepdim=True) - load_2E)",
        WHOLE_TESTS,
        "balancing by how much",
    ),
    Mutant(
        BALANCE, "load_2E.mean(dim=1, keepdim=True)", "load_2E.mean()", WHOLE_TESTS, "one mean of text and pictures"
    ),
    Mutant(
        PLACES,
        "torch.nn.functional.rms_norm(rows_IC.float(), rows_IC.shape[-1:], eps=1e-6)",
        "rows_IC.float()",
        PLACE_TESTS,
        "rows of any size",
    ),
    Mutant(PLACES, " * (_SHARPNESS / hidden_size**0.5)", "", PLACE_TESTS, "names of any size"),
    Mutant(PLACES, '"ic,apc->iap"', '"ic,apc->ipa"', PLACE_TESTS, "scores turned"),
    Mutant(
        PLACES, "ignore_index=IGNORED, reduction", "ignore_index=0, reduction", PLACE_TESTS, "the first part is ignored"
    ),
    Mutant(
        PLACES, "np.minimum(first + ratio, length)", "(first + ratio)", PLACE_TESTS, "a cut cell's centre lies outside"
    ),
    Mutant(PLACES, ".sum().clamp(min=1)", ".sum()", PLACE_TESTS, "no cells, no number"),
    Mutant(
        WHOLE,
        "place_loss(image_rows_IC, self._place_names",
        "place_loss(image_rows_IC.detach(), self._place_names",
        PLACE_TESTS,
        "places: the tower learns nothing",
    ),
    Mutant(
        WHOLE,
        "self.place_rate * count * places",
        "self.place_rate * places",
        PLACE_TESTS,
        "the loss of places shrinks with the number of targets",
    ),
    Mutant(WHOLE, "(loss + self.place_rate", "(0 * loss + self.place_rate", WHOLE_TESTS, "only places are learned"),
    Mutant(
        PAIRS,
        "values = base.value + self.alpha",
        "values = self.alpha",
        ADAPTER_TESTS,
        "pairs in place of the matrices",
    ),
    Mutant(
        PAIRS,
        "(b_NOR @ a_NRI)",
        "(b_NOR @ a_NRI.flip(1))",
        ADAPTER_TESTS,
        "rows of A and columns of B joined the other way",
    ),
    Mutant(PAIRS, ") / math.sqrt(inner)", ")", ADAPTER_TESTS, "A of any size"),
    Mutant(
        PAIRS,
        "values = a_NRI, torch.zeros(count, outer, rank)",
        "values = a_NRI, torch.ones(count, outer, rank)",
        ADAPTER_TESTS,
        "B does not begin at zero",
    ),
    Mutant(
        PAIRS,
        "            super().deliver()",
        "            pass",
        ADAPTER_TESTS,
        "what is frozen never reaches the model",
    ),
    Mutant(
        PAIRS,
        "straight_through(leaf, lambda value: stored_values(value, BF16))",
        "stored_values(leaf, BF16).detach().requires_grad_()",
        ADAPTER_TESTS,
        "rounding stops the gradients of pairs",
    ),
    Mutant(
        PAIRS,
        "zip(a.value.cpu().bfloat16(), b.value.cpu().bfloat16(), strict=True)",
        "zip(a.value.cpu().bfloat16().flip(0), b.value.cpu().bfloat16(), strict=True)",
        ADAPTER_TESTS,
        "saved A of other matrices",
    ),
    Mutant(PAIRS, "torch.Generator().manual_seed(seed)", "torch.Generator()", ADAPTER_TESTS, "every seed begins alike"),
    Mutant(
        FEED, "        atexit.register(self.stop)", "        pass", ADAPTER_TESTS, "a run that cannot begin never ends"
    ),
    Mutant(PAIRS, "if rank > self.rank:", "if False:", ADAPTER_TESTS, "learning goes on from a larger rank"),
    Mutant(
        PAIRS,
        "if odd := sorted(names ^ adapter.modules.keys()):",
        "if False:",
        ADAPTER_TESTS,
        "learning goes on from another adapter",
    ),
    Mutant(
        PAIRS,
        "pair.scale * self.rank / self.alpha * pair",
        "pair",
        ADAPTER_TESTS,
        "learning goes on from half of a pair",
    ),
    Mutant(
        PAIRS,
        "used_R = pair.b_OR.any(dim=0)",
        "used_R = torch.arange(pair.b_OR.shape[1]) < self.rank",
        ADAPTER_TESTS,
        "of two matrices that share an A the second begins with the first's",
    ),
    Mutant(
        PLACES, "(2, PARTS, hidden_size), generator=source)", "(2, PARTS, hidden_size))", PLACE_TESTS, "names by chance"
    ),
]
