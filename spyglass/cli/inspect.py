"""`spyglass inspect PHOTO`: what a model gets of an image, as numbers and as a PNG; no checkpoint, no torch."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from spyglass.cli.inspection_sheet import Inspection, draw_inspection
from spyglass.cli.options import MODEL_FORMS, model_folder
from spyglass.config import ModelConfig, VisionConfig, read_model_config
from spyglass.config.fields import integer
from spyglass.config.presets import config_of
from spyglass.config.shipped import default_model
from spyglass.errors import PromptError
from spyglass.families import FAMILIES
from spyglass.prompt import (
    CHAT_RULES,
    REFERENCE_RULES,
    ImagePlan,
    ImageSpan,
    TokenKind,
    contained_size,
    layout_block,
    open_image,
    oriented_size,
    plan_image,
    resize,
    to_rgb,
)

HELP = "Show what a model gets of an image: resized size, patches, cells, token order, visibility (writes a PNG)."
_FAMILIES = {family.short_name: family for family in FAMILIES.values()}
_FIRST_CHAT_POSITION = 2  # after BOS and the user tag


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's options."""
    parser.add_argument("photo", type=Path, metavar="PHOTO", help="image file (JPEG, PNG, WebP, GIF, BMP, TIFF, AVIF)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--family", choices=tuple(_FAMILIES), help="plan for the released model of this family")
    which.add_argument(
        "-m", "--model", metavar="MODEL", help=f"plan for this one: {MODEL_FORMS} (default: {default_model()})"
    )
    parser.add_argument(
        "--start",
        type=integer,
        default=_FIRST_CHAT_POSITION,
        metavar="N",
        help="prompt position of the block; V4 pads depend on it (default 2, the first of a chat)",
    )
    parser.add_argument(
        "--rules",
        choices=("chat", "reference"),
        default="chat",
        help="turn photos upright and scale 16-bit samples, or exactly as the reference (default chat)",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="PNG", help="where to draw (default PHOTO.inspect.png)")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON; draws only with --output")


def run(args: argparse.Namespace) -> int:
    """Print the numbers and draw the sheet; the result is the exit code."""
    if args.start < 0:
        raise PromptError(f"--start is {args.start}; a prompt position is 0 or more")
    config = _config(args)
    vision = config.vision
    if vision is None:
        raise PromptError(f"{args.model} takes no images; use a vision checkpoint")
    seen = _look(args.photo, vision, args.start, args.rules)
    output = args.output
    if output is None and not args.json:
        output = args.photo.with_name(args.photo.name + ".inspect.png")
    if args.json:
        print(json.dumps(_numbers(seen), indent=2))
    else:
        width = max(len(name) for name, _ in _facts(seen))
        print("\n".join(f"{name:<{width}}  {value}" for name, value in _facts(seen)))
    if output is not None:
        _write(_sheet(seen, vision, config, args.photo.name), output)
        if not args.json:
            print(f"drawn to {output}")
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """An image as the model gets it."""

    stored: tuple[int, int]
    size: tuple[int, int]
    form: str
    resized: Image.Image
    plan: ImagePlan
    span: ImageSpan


def _config(args: argparse.Namespace) -> ModelConfig:
    if args.family:
        return config_of(_FAMILIES[args.family].presets[-1])
    return read_model_config(model_folder(args.model))


def _look(photo: Path, vision: VisionConfig, start: int, rules_name: str) -> _Seen:
    rules = CHAT_RULES if rules_name == "chat" else REFERENCE_RULES
    image = open_image(photo, name=str(photo))
    form = f"{image.format} {image.mode}"
    stored, size = image.size, oriented_size(image, rules)
    plan = plan_image(*size, vision)
    resized = resize(to_rgb(image, rules, name=str(photo)), plan, name=str(photo))
    return _Seen(
        stored=stored, size=size, form=form, resized=resized, plan=plan, span=layout_block(plan, start, vision)
    )


def _roles(span: ImageSpan) -> dict[str, int]:
    counts = {kind.name: int((span.kinds == kind).sum()) for kind in TokenKind if kind is not TokenKind.TEXT}
    return {name: count for name, count in counts.items() if count}


def _numbers(seen: _Seen) -> dict[str, Any]:
    plan, span = seen.plan, seen.span
    return {
        "stored": list(seen.stored),
        "size": list(seen.size),
        "resized": list(plan.resized),
        "stretch": plan.stretch,
        "patch_size": plan.patch_size,
        "vit_grid": list(plan.vit_grid),
        "llm_grid": list(plan.llm_grid),
        "num_tokens": plan.num_tokens,
        "start": span.start,
        "lead": span.lead,
        "length": span.length,
        "roles": _roles(span),
    }


def _facts(seen: _Seen) -> tuple[tuple[str, str], ...]:
    plan, span = seen.plan, seen.span
    turned = "" if seen.stored == seen.size else f", turned upright from {seen.stored[0]} x {seen.stored[1]}"
    (rows, columns), (cell_rows, cell_columns) = plan.vit_grid, plan.llm_grid
    inner = contained_size(seen.size, plan.resized)
    if plan.stretch:
        how = "stretched"
    else:
        how = "filled" if inner == plan.resized else f"the image as {inner[0]} x {inner[1]} on grey"
    return (
        ("image", f"{seen.size[0]} x {seen.size[1]} pixels, {seen.form}{turned}"),
        ("resized", f"{plan.resized[0]} x {plan.resized[1]}, {how}"),
        ("patches", f"{rows} rows x {columns} = {rows * columns} of {plan.patch_size} pixels"),
        ("cells", f"{cell_rows} rows x {cell_columns} = {cell_rows * cell_columns}"),
        (
            "tokens",
            f"{plan.num_tokens}, and {span.lead} leading pad{'' if span.lead == 1 else 's'} at position {span.start}",
        ),
        ("positions", f"{span.start} to {span.start + span.length - 1}"),
        ("roles", ", ".join(f"{name} {count}" for name, count in _roles(span).items())),
    )


def _sheet(seen: _Seen, vision: VisionConfig, config: ModelConfig, name: str) -> Image.Image:
    return draw_inspection(
        Inspection(
            title=f"{name} as {FAMILIES[config.family].title} sees it",
            facts=_facts(seen),
            resized=seen.resized,
            plan=seen.plan,
            span=seen.span,
            merge=vision.downsample_ratio,
            max_tokens=vision.max_tokens,
            window=config.text.sliding_window,
            mutual=vision.layout == "paired",
        )
    )


def _write(sheet: Image.Image, output: Path) -> None:
    try:
        sheet.save(output, "PNG")
    except OSError as error:
        raise PromptError(f"{output} cannot be written: {error.strerror or error}") from error
