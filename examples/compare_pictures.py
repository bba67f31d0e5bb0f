"""Several pictures in one conversation, over two turns.

python examples/compare_pictures.py spyglass-tiny-v4 first.jpg second.jpg
"""

import sys
from pathlib import Path

from spyglass import LLM, SamplingParams

if len(sys.argv) < 4:
    sys.exit(__doc__)
model, *pictures = sys.argv[1:]
llm = LLM(model, images=len(pictures))  # at most so many pictures in a conversation
content = []
for number, picture in enumerate(pictures, start=1):
    content += [
        {"type": "text", "text": f"Picture {number}:"},
        {"type": "image_url", "image_url": {"url": Path(picture)}},
    ]
chat = [{"role": "user", "content": [*content, {"type": "text", "text": "What is different?"}]}]

first = llm.chat(chat, SamplingParams(max_tokens=16, temperature=0))
print(first.text)
chat += [
    {"role": "assistant", "content": first.text},
    {"role": "user", "content": "Say it in one word."},
]
second = llm.chat(chat, SamplingParams(max_tokens=4, temperature=0))
print(second.text)
print(f"{second.usage.image_tokens} of {second.usage.prompt_tokens} prompt tokens are pictures")
