"""Prompts of different lengths, with and without a picture, answered together: the model reads its weights once a step.

python examples/batch_of_prompts.py spyglass-tiny-v4 examples/shapes.jpg
"""

import sys
from pathlib import Path

from spyglass import LLM, SamplingParams

if len(sys.argv) != 3:
    sys.exit(__doc__)
model, picture = sys.argv[1:]
llm = LLM(model)
photo = {"type": "image_url", "image_url": {"url": Path(picture)}}
questions = [
    "Hello!",
    [photo, {"type": "text", "text": "What colour is the circle?"}],
    [photo, {"type": "text", "text": "How many things are there?"}],
]
chats = [[{"role": "user", "content": question}] for question in questions]
params = [
    SamplingParams(max_tokens=12, temperature=0.8, seed=1),
    SamplingParams(max_tokens=16, temperature=0),
    SamplingParams(max_tokens=8, temperature=0, logprobs=2),
]
for output in llm.chat(chats, params):
    print(f"[{output.finish_reason}, {output.usage.completion_tokens} tokens] {output.text!r}")
    for entry in output.logprobs or ():
        print(f"    token {entry.token_id} log-probability {entry.logprob:.3f}, likeliest {entry.top}")
