"""Logits of a prompt given as token ids and an already cut picture; no tokenizer takes part.

The ids are those of the large vocabulary, which a random model has too: spyglass new-checkpoint demo-model

python examples/logits_from_ids.py demo-model
"""

import sys

import numpy as np

from spyglass import LLM, Patches

if len(sys.argv) != 2:
    sys.exit(__doc__)
llm = LLM(sys.argv[1], dtype="float32")
rows, columns = 6, 9  # patches; the text model sees a third of each, rounded up
pixels = np.random.default_rng(0).integers(0, 256, (rows * columns, 3, 14, 14), dtype=np.uint8)

# what a chat would send: begin, user | the picture | two line ends, "What", assistant
logits = llm.logits([[0, 128803], Patches(pixels, (rows, columns)), [201, 201, 3085, 128804]])  # float32 [T, V]
print(f"{logits.shape[0]} positions, the picture's block among them, x {logits.shape[1]} tokens")
best = logits[-1].topk(3)
for token, value in zip(best.indices.tolist(), best.values.tolist(), strict=True):
    print(f"    next token {token}: {value:.3f}")
