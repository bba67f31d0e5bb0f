"""Ask one question about one picture; the answer streams.

python examples/ask_about_a_picture.py spyglass-tiny-v4 examples/shapes.jpg "What shape is the red thing?"
"""

import sys
from pathlib import Path

from spyglass import LLM, SamplingParams

if len(sys.argv) != 4:
    sys.exit(__doc__)
model, picture, question = sys.argv[1:]
llm = LLM(model)
message = {
    "role": "user",
    "content": [
        {"type": "image_url", "image_url": {"url": Path(picture)}},  # a data URL, bytes or a PIL picture do as well
        {"type": "text", "text": question},
    ],
}
for delta in llm.stream([message], SamplingParams(max_tokens=32, temperature=0)):
    print(delta.text, end="", flush=True)
print()
