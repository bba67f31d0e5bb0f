"""Stored questions about stored pictures, for `tests/laws/test_shipped_models_see.py`.

`python -m scripts.golden.seeing` rewrites `data/seeing/`: JPEG pictures and `questions.json`. Of each kind it takes
the first cases of a seed that stay small and that every model shipped with the package answers right to the letter,
thought and boxes included, greedily and without a near tie, so that all of them must go on doing so on any machine.
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
from spyglass.engine.request import RequestOutput, SamplingParams
from spyglass.tiny_world.cases import EFFORT, Case, Split, make_case, with_images

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "golden" / "data" / "seeing"
SEED = 20_261_130
# kind, split, cases, at least so many pixels a side, with a thought before the answer
PLAN: tuple[tuple[str, Split, int, int, bool], ...] = (
    ("colour", "test", 3, 0, False),
    ("colour", "test", 1, 0, True),
    ("colour", "unseen", 1, 0, False),
    ("shape", "test", 2, 0, False),
    ("shape", "test", 1, 0, True),
    ("shape", "unseen", 1, 0, False),
    ("count", "test", 3, 0, False),
    ("count", "test", 1, 0, True),
    ("count", "unseen", 1, 0, False),
    ("position", "test", 3, 0, False),
    ("position", "test", 1, 0, True),
    ("position", "test", 1, 1000, False),
    ("number", "test", 5, 0, False),
    ("word", "test", 4, 0, False),
    ("word", "test", 1, 1200, False),
    ("grounding", "test", 3, 0, False),
    ("grounding", "unseen", 1, 0, False),
    ("chat", "test", 3, 0, False),
    ("compare", "test", 2, 0, False),  # of two pictures each, which makes 40
)
PARAMS = SamplingParams(temperature=0, max_tokens=128, logprobs=2)
LEAD = 1.0  # nats of every token on the next one at least: far more than sums of another order can change
MOST_TRIED = 1000  # cases of a kind; where none of more is right, the models do not know it
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
                "reasoning": case.reasoning,
                "answer": case.answer,
            }
        )
    lines = ",\n".join(json.dumps(question, ensure_ascii=False) for question in questions)
    (FOLDER / "questions.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def chosen(llms: list[LLM]) -> Iterator[tuple[Case, list[bytes]]]:
    for number, (kind, split, wanted, side, thought) in enumerate(PLAN):
        found = 0
        index = 0
        while found < wanted:
            assert index < MOST_TRIED, f"too few of {MOST_TRIED} cases of kind {kind!r} are answered right"
            case = make_case(SEED + number, index, split, kinds=(kind,))
            index += 1
            files = [jpeg(picture) for picture in case.images]
            if (case.reasoning is not None) != thought or not fits(case, files, side):
                continue
            if all(answers_right(llm, case, files) for llm in llms):
                found += 1
                yield case, files


def fits(case: Case, files: list[bytes], side: int) -> bool:
    longest = max(max(picture.size) for picture in case.images)
    most = MOST_BYTES * (4 if side else 1)
    return max(map(len, files)) <= most and len(files) <= 2 and longest >= side


def jpeg(picture: Image.Image) -> bytes:
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=88, subsampling=0)
    return out.getvalue()


def answers_right(llm: LLM, case: Case, files: list[bytes]) -> bool:
    stored = with_images(case, [Image.open(io.BytesIO(data)).convert("RGB") for data in files])
    thinks = case.reasoning is not None
    (output,) = llm.chat([stored.messages], PARAMS, thinking=thinks, effort=EFFORT if thinks else None)
    return output.reasoning == case.reasoning and says(output, case.answer)


def says(output: RequestOutput, text: str) -> bool:
    """Whether this is the whole answer, and no token of it or of a thought was nearly another."""
    assert output.logprobs is not None
    tops = [token.top for token in output.logprobs]
    return output.text == text and min(first[1] - second[1] for first, second in tops) >= LEAD


if __name__ == "__main__":
    main()
