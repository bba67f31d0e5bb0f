"""Stored questions about stored pictures, for `tests/laws/test_shipped_models_see.py`.

`python -m tests.golden.make_seeing` rewrites `data/seeing/`: JPEG pictures and `questions.json`. Of each kind it takes
the first cases of a seed that stay small and that every model shipped with the package answers right, greedily, so that
all of them must go on doing so.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

from spyglass import LLM
from spyglass.config.shipped import shipped_models
from spyglass.tiny_world.answers import is_right
from spyglass.tiny_world.cases import Case, Split, make_case, with_pictures
from spyglass.tiny_world.evaluate import ask_all

FOLDER = Path(__file__).resolve().parent / "data" / "seeing"
SEED = 20_261_130
# kind, split, cases, at least so many pixels a side
PLAN: tuple[tuple[str, Split, int, int], ...] = (
    ("colour", "test", 4, 0),
    ("colour", "unseen", 1, 0),
    ("shape", "test", 3, 0),
    ("shape", "unseen", 1, 0),
    ("count", "test", 4, 0),
    ("count", "unseen", 1, 0),
    ("position", "test", 4, 0),
    ("position", "test", 1, 1000),
    ("number", "test", 5, 0),
    ("word", "test", 4, 0),
    ("word", "test", 1, 1200),
    ("grounding", "test", 3, 0),
    ("grounding", "unseen", 1, 0),
    ("chat", "test", 3, 0),
    ("compare", "test", 2, 0),  # of two pictures each, which makes 40
)
MOST_BYTES = 12_000  # of a picture; four times as many where it must be large


def main() -> None:
    llms = [LLM(name, device="cpu") for name in shipped_models()]
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.jpg"):
        old.unlink()
    questions: list[dict[str, Any]] = []
    stored = 0
    for case, files in chosen(llms):
        names = [f"{stored + number:02d}.jpg" for number in range(len(files))]
        for name, data in zip(names, files, strict=True):
            (FOLDER / name).write_bytes(data)
        stored += len(files)
        questions.append(
            {
                "kind": case.kind,
                "pair": case.words.pair,
                "pictures": names,
                "turns": case.words.turns,
                "thinking": case.reasoning is not None,
                "answer": case.answer,
            }
        )
    lines = ",\n".join(json.dumps(question, ensure_ascii=False) for question in questions)
    (FOLDER / "questions.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def chosen(llms: list[LLM]) -> Iterator[tuple[Case, list[bytes]]]:
    for number, (kind, split, wanted, side) in enumerate(PLAN):
        found = 0
        index = 0
        while found < wanted:
            case = make_case(SEED + number, index, split, kinds=(kind,))
            index += 1
            files = [jpeg(picture) for picture in case.pictures]
            if fits(case, files, side) and all(answers_right(llm, case, files) for llm in llms):
                found += 1
                yield case, files


def fits(case: Case, files: list[bytes], side: int) -> bool:
    longest = max(max(picture.size) for picture in case.pictures)
    most = MOST_BYTES * (4 if side else 1)
    return max(map(len, files)) <= most and len(files) <= 2 and longest >= side


def jpeg(picture: Image.Image) -> bytes:
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=88, subsampling=0)
    return out.getvalue()


def answers_right(llm: LLM, case: Case, files: list[bytes]) -> bool:
    stored = with_pictures(case, [Image.open(io.BytesIO(data)).convert("RGB") for data in files])
    (said,) = ask_all(llm, [stored.messages], [case.reasoning is not None])
    return is_right(case.answer, said)


if __name__ == "__main__":
    main()
