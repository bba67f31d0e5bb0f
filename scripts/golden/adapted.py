"""Stored questions for the adapters that come with the models, for `tests/laws/test_shipped_adapters.py`.

`python -m scripts.golden.adapted` rewrites `data/adapted/`: JPEG pictures and `questions.json`. Of each kind of an
adapter's task it takes the first cases of a seed that stay small, that every model with this adapter answers right to
the letter and without a near tie, and that none answers right without it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from scripts.golden.seeing import MOST_TRIED, PARAMS, SEED, fits, jpeg, says
from spyglass import LLM
from spyglass.config.shipped import find_model, shipped_adapters, shipped_models
from spyglass.prompt.answers import is_right
from spyglass.tiny_world.cases import Case, make_case, with_images
from spyglass.tiny_world.words import Variant

FOLDER = Path(__file__).resolve().parents[2] / "tests" / "golden" / "data" / "adapted"
PLAN: Mapping[Variant, tuple[str, ...]] = {
    "roman": ("count", "count", "count", "number", "number", "number"),
    "negative": ("colour", "colour", "colour", "colour", "shape", "shape"),
    "french": ("colour", "shape", "count", "position", "word", "grounding"),
}


def main() -> None:
    llms = []
    for model in shipped_models():
        names = shipped_adapters(find_model(model))
        llms.append(LLM(model, device="cpu", adapters={name: name for name in names}))
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.jpg"):
        old.unlink()
    questions: list[dict[str, Any]] = []
    for variant, case, data in chosen(llms):
        name = f"{variant}-{len(questions):02d}.jpg"
        (FOLDER / name).write_bytes(data)
        about = {"adapter": variant, "kind": case.kind, "picture": name}
        questions.append(about | {"question": case.question, "answer": case.answer})
    lines = ",\n".join(json.dumps(question, ensure_ascii=False) for question in questions)
    (FOLDER / "questions.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def chosen(llms: list[LLM]) -> Iterator[tuple[Variant, Case, bytes]]:
    """The variant, the case and its picture."""
    for variant, kinds in PLAN.items():
        asked = [llm for llm in llms if variant in llm.adapters]
        index = 0
        for kind in kinds:
            while True:
                assert index < MOST_TRIED * len(kinds), f"{variant}: too few cases of kind {kind!r} are answered right"
                case = make_case(SEED, index, "test", kinds=(kind,), variant=variant)
                index += 1
                files = [jpeg(picture) for picture in case.images]
                if (
                    fits(case, files, 0)
                    and len(files) == 1
                    and all(only_adapted(llm, variant, case, files[0]) for llm in asked)
                ):
                    yield variant, case, files[0]
                    break


def only_adapted(llm: LLM, adapter: str, case: Case, data: bytes) -> bool:
    """Whether the model is right with the adapter and wrong without it."""
    stored = with_images(case, [Image.open(io.BytesIO(data)).convert("RGB")])
    adapted, plain = llm.chat([stored.messages] * 2, PARAMS, adapter=[adapter, None])
    return says(adapted, case.answer) and not is_right(case.answer, plain.text)


if __name__ == "__main__":
    main()
