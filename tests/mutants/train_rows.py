"""Faults in training: the loop, its state, the data, and the ops that have a backward of their own."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_LOOP, _DATA, _OPS = "tests/unit/train/test_loop.py", "tests/unit/train/test_data.py", "tests/ops/test_training_ops.py"
_ATTENTION = "spyglass/ops/sparse_attention/training.py"
_EXPERTS = "spyglass/ops/experts_grouped/training.py"

TRAIN_ROWS: list[Mutant] = [
    Mutant("spyglass/train/loop.py", "scale = 1 / targets", "scale = 1 / targets.clamp(max=10)", _LOOP, "gradients are not divided by all targets"),
    Mutant("spyglass/train/loop.py", "(step + 1) / (options.warmup + 1)", "step / (options.warmup + 1)", _LOOP, "the first step of the rise does nothing"),
    Mutant("spyglass/train/loop.py", "return options.final + (1 - options.final) * share", "return share", _LOOP, "the last rate is ignored"),
    Mutant("spyglass/train/loop.py", 'group["lr"] = peak * factor', 'group["lr"] = self._peaks[0] * factor', _LOOP, "all groups get the first one's rate"),
    Mutant("spyglass/train/loop.py", "torch.manual_seed(_seed(self._options.seed, number))", "pass", _LOOP, "random numbers depend on what came before"),
    Mutant("spyglass/train/loop.py", 'f"{seed} {number}"', 'f"{number}"', _LOOP, "the seed of random numbers is ignored"),
    Mutant("spyglass/train/loop.py", "            self._flush()\n                    self._save(done)", "            self._save(done)\n                    self._flush()", _LOOP, "a state is saved before its loss is known to be a number"),
    Mutant("spyglass/train/state.py", "os.replace(partial, target)", "shutil.copytree(partial, target)", "tests/unit/train/test_state.py", "a state gets its name before it is whole"),
    Mutant("spyglass/train/data.py", "learn_T[0] = False", "pass", _DATA, "the first token counts as a target"),
    Mutant("spyglass/train/data.py", "answering and not starts", "answering", _DATA, "the mark that begins an answer is learnt"),
    Mutant("spyglass/train/data.py", "np.random.default_rng([self._seed, self._epochs])", "np.random.default_rng([self._seed])", _DATA, "every epoch has the same order"),
    Mutant("spyglass/ops/fake_quant/training.py", "return grads[0], None", "return grads[0] * 0.5, None", _OPS, "the gradient of rounding is not 1"),
    Mutant(_ATTENTION, "dp = multiply(grad, keys_MKD.mT) - delta_TH[block.rows_MQ].flatten(1, 2)[..., None]", "dp = multiply(grad, keys_MKD.mT)", _OPS, "attention: the softmax's own gradient is dropped"),
    Mutant(_ATTENTION, " + multiply(p.to(dtype).mT, grad)", "", _OPS, "attention: the gradient of values is dropped"),
    Mutant(_ATTENTION, "dsink_H = -(delta_TH", "dsink_H = (delta_TH", _OPS, "attention: the sink's gradient has the wrong sign"),
    Mutant(_ATTENTION, "(p * dp * ctx.scale)", "(p * dp)", _OPS, "attention: the scale is missing in the gradient"),
    Mutant(_ATTENTION, " & (block.write_MQ >= 0)[..., None]", "", _OPS, "attention: rows of padding count in the gradient of keys"),
    Mutant(_ATTENTION, "for at_once in zip_longest(*each):", "for at_once in [sum(each, [])]:", _OPS, "attention: parts of one sequence share a block"),
    Mutant(_EXPERTS, "(u_GHR.mT @ grads[0])", "(u_GHR.mT @ grads[0]) * scale_GR[:, :, None]", _OPS, "experts: the scale counts twice in the gradient of B"),
    Mutant(_EXPERTS, "du_GHR = (grads[0] @ b_GRO.float().mT) * scale_GR[:, None]", "du_GHR = grads[0] @ b_GRO.float().mT", _OPS, "experts: the scale is missing in the gradient of A and x"),
    Mutant(_EXPERTS, "_product(chunk, \"w2\", w2, base, z, low)", "_product(chunk, \"w2\", w2, base, base, low)", _OPS, "experts: the pair of w2 sees the rounded activation"),
    Mutant(_EXPERTS, "torch.cat([x_NC, x_NC.new_zeros(1, x_NC.shape[1])])", "torch.cat([x_NC, x_NC[:1]])", _OPS, "experts: padding is a row of its own"),
    Mutant(_EXPERTS, "chosen.masked_fill_((place_N == len(y_MC))[:, None], 0.0)", "chosen", _OPS, "experts: a row that chose nobody gets the last row's answer"),
    Mutant(_EXPERTS, "max(_ROWS_AT_ONCE // height, 1)", "num_experts", _OPS, "experts: a chunk may have any number of rows"),
]  # fmt: skip
