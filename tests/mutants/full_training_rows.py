"""Faults in fine-tuning: every weight of a checkpoint, runs that are resumed, several processes."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

DIGEST = "spyglass/checkpoint/digest.py"
FINETUNE = "spyglass/train/finetune.py"
FULL = "spyglass/train/full.py"
LOOP = "spyglass/train/loop.py"
MIX = "spyglass/ops/hyper_mix/reference.py"
PARALLEL = "spyglass/parallel.py"
LOSS = "spyglass/train/loss.py"
SHARDING = "spyglass/train/sharding.py"
ON_DIGEST = "tests/unit/checkpoint/test_digest.py"
ON_FINETUNE = "tests/unit/train/test_finetune.py -k 'arithmetic or another_base or shipped'"
ON_FULL = "tests/unit/train/test_full.py"
ON_ORIENTATION = "tests/laws/test_stream_orientation.py"
ON_PROCESSES = "tests/unit/train/test_processes.py"

FULL_TRAINING_ROWS: list[Mutant] = [
    Mutant(FULL, "        balance(self.masters.fixed, loads, self.config.text, BALANCE_RATE)\n", "", ON_FULL,
           "experts are not balanced"),
    Mutant(FULL, "self.config.text, BALANCE_RATE)", "self.config.text, -BALANCE_RATE)", ON_FULL, "busy experts get busier"),
    Mutant(FULL, "leaf.grad if value.grad is None or leaf.grad is None else value.grad + leaf.grad", "leaf.grad", ON_FULL,
           "only the last micro-batch is learnt"),
    Mutant(FULL, "[a + b for a, b in zip(self._loads, counted, strict=True)] if self._loads else counted", "counted", ON_FULL,
           "only the last micro-batch's use of experts counts"),
    Mutant(FULL, "BALANCE_RATE)\n        self._loads = []\n", "BALANCE_RATE)\n", ON_FULL, "the use of experts is never forgotten"),
    Mutant(FULL, "        self._state.loads = []  # layers that are computed again count for nothing\n", "", ON_FULL,
           "layers that are computed again count twice"),
    Mutant(FINETUNE, '        "base model": checkpoint_digest(config.model),\n', "", ON_FINETUNE, "resumed on another base"),
    Mutant(FINETUNE, '        "dtype": str(model.options.build.dtype).removeprefix("torch."),  # "auto" and its meaning are the same run\n',
           "", ON_FINETUNE, "resumed in another dtype"),
    Mutant(FINETUNE, '        "numerics": model.options.numerics,\n', "", ON_FINETUNE, "resumed with other rounding"),
    Mutant(FINETUNE, '"numerics": model.options.numerics', '"numerics": config.numerics', ON_FINETUNE,
           '"auto" and what it stands for are different runs'),
    Mutant(FINETUNE, ", replace(config, model=find_model(config.model))\n", ", config\n", ON_FINETUNE,
           "shipped names are not found"),
    Mutant(LOOP, "name in asked if held[name] != asked[name]]", "name in asked if held[name] != asked[name]][:1]", ON_FINETUNE,
           "only one difference is named"),
    Mutant(DIGEST, "        digest.update(samples[tensor.name])\n", "", ON_DIGEST, "values do not count"),
    Mutant(DIGEST, "{tensor.name} {tensor.dtype} {tensor.shape} ", "{tensor.name} {tensor.nbytes} ", ON_DIGEST,
           "dtype and shape do not count"),
    Mutant(DIGEST, "sorted(tensors, key=lambda tensor: tensor.name)", "tensors", ON_DIGEST, "the order in files counts"),
    Mutant(MIX, ".unflatten(-1, (streams, streams)).softmax", ".unflatten(-1, (streams, streams)).mT.softmax", ON_ORIENTATION,
           "the mix is read target by target"),
    Mutant(PARALLEL, "                _local(leaf.grad).mul_(self.count)", "                pass", ON_PROCESSES,
           "gradients of sharded layers are means"),
    Mutant(PARALLEL, "                leaf.grad = torch.zeros_like(leaf)\n", "                continue\n", ON_PROCESSES,
           "a tower that one process's pictures reach moves apart"),
    Mutant(LOSS, "if image_rows is None and of_pictures:", "if False:", "tests/unit/train/test_finetune.py -k tower",
           "a tower alone has no gradient without pictures"),
    Mutant(LOOP, "    if apart:\n", "    if False:\n", ON_PROCESSES + " -k share", "processes without the state begin anew"),
    Mutant(FULL, "names=spelling_of(base)", "names=\"native\"", ON_FULL, "a model comes back in other names"),
    Mutant(FINETUNE, "base_model=named", "base_model=str(config.model)", ON_FINETUNE, "a machine's path in an adapter"),
    Mutant(PARALLEL, "            dist.all_reduce(value)\n", "            pass\n", ON_PROCESSES, "each process sees its own sums"),
    Mutant(SHARDING, "if _MEMORY in module.name:", "if False:", ON_PROCESSES, "what reads memories is gone when it runs"),
    Mutant(FULL, "[self._processes.total(load) for load in self._loads]", "self._loads", ON_PROCESSES,
           "each process balances by its own use of experts"),
    Mutant(FULL, "items + self._others(base)", "items", "tests/unit/train/test_finetune.py -k 'whole_model and v41'",
           "a checkpoint without its memories"),
    Mutant(SHARDING, 'tensors[name], tensors[f"{place}.lora_B"])', 'tensors[name], tensors[f"{place}.lora_B"].detach())',
           ON_PROCESSES, "B of sharded layers is not learnt"),
    Mutant(SHARDING, "processes.whole(leaf.detach())", "leaf.detach()", ON_PROCESSES, "each process keeps its part"),
]  # fmt: skip
