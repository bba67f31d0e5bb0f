"""A small data set to fine-tune on: one-word answers to questions that the small models answer in
sentences, unless they are told to be brief.

    python -m scripts.short_answers FOLDER

writes `train.jsonl` (100 chats), `held.jsonl` (24) and `test.jsonl` (60) with their images; no image is in two of them.
Then, for example, with the defaults of `spyglass finetune`:

    spyglass finetune spyglass-tiny-v4 --data FOLDER/train.jsonl --output FOLDER/adapter
    spyglass eval spyglass-tiny-v4 --data FOLDER/test.jsonl --lora FOLDER/adapter
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from spyglass.tiny_world.cases import Case, make_case

SETS = {"train": 100, "held": 24, "test": 60}
LARGEST = 300  # pixels a side, so that a step is quick


def short_answers(folder: Path) -> None:
    """Write the sets."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    index = 0
    for name, count in SETS.items():
        lines = list[str]()
        while len(lines) < count:
            case = make_case(7, index, "train" if name == "train" else "test", kinds=("colour", "shape"))
            index += 1
            if max(case.images[0].size) <= LARGEST and case.reasoning is None and len(case.words.turns) == 1:
                lines.append(json.dumps(_line(folder, index, case)))
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _line(folder: Path, index: int, case: Case) -> dict[str, object]:
    image = f"images/{index}.png"
    case.images[0].save(folder / image)
    question = [
        {"type": "image_url", "image_url": {"url": image}},
        {"type": "text", "text": case.question.removesuffix(" Answer in a sentence.").removesuffix(" Be brief.")},
    ]
    assert case.words.pair is not None
    answer = case.words.pair[("colour", "shape").index(case.kind)].capitalize() + "."
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"task": case.kind, "messages": messages}


if __name__ == "__main__":
    short_answers(Path(sys.argv[1]))
