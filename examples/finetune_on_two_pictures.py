"""Teach a model two pictures: chats to a file, a few steps of training, and the adapter at work.

python examples/finetune_on_two_pictures.py spyglass-tiny-v4 first.jpg second.jpg "A rocket." "A cat."
"""

import json
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from spyglass import LLM, SamplingParams, TrainConfig, finetune

if len(sys.argv) != 6:
    sys.exit(__doc__)
model, *rest = sys.argv[1:]
pictures, answers = rest[:2], rest[2:]
question = {"type": "text", "text": "What is this?"}
with TemporaryDirectory() as folder:
    data, output = Path(folder, "chats.jsonl"), Path(folder, "adapter")
    with data.open("w") as file:
        for picture, answer in zip(pictures, answers, strict=True):
            shown = {"type": "image_url", "image_url": {"url": str(Path(picture).resolve())}}  # or a data URL
            chat = [{"role": "user", "content": [shown, question]}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": chat}) + "\n")
    config = TrainConfig(
        model=Path(model),
        data=data,
        output=output,
        targets=("shared", "aligner"),
        steps=60,  # enough to learn two pictures by heart
        batch_tokens=1024,
        lr=5e-3,
    )
    finetune(config, tell=print)
    llm = LLM(model, adapters={"mine": output})
    for picture in pictures:
        shown = {"type": "image_url", "image_url": {"url": Path(picture)}}
        chat = [{"role": "user", "content": [shown, question]}]
        print(llm.chat(chat, SamplingParams(max_tokens=8, temperature=0), adapter="mine").text)
