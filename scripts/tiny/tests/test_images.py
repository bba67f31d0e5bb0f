"""What is drawn is what was said: the images are read back from their pixels, and questions answered from that."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import islice

import numpy as np
import pytest
from numpy.random import default_rng
from PIL import Image, ImageChops, ImageDraw, ImageFont

from scripts.tiny.tests.eyes import PALETTE, Seen, see
from spyglass.prompt.answers import parse_answer
from spyglass.prompt.plan import plan_image
from spyglass.tiny_world.asking import World
from spyglass.tiny_world.cases import Case, make_case
from spyglass.tiny_world.images import MUTED, PHOTOS, draw, invert, label_box, label_mask, shade, shape_mask
from spyglass.tiny_world.questions import IMAGE_LEFT_OUT, KINDS
from spyglass.tiny_world.scene import Label, Lettering, Scene, Thing, pick_size
from spyglass.tiny_world.words import COLOURS, COUNTS, ORDINALS, POSITIONS, PRINTED_WORDS, SHAPES, SIDES
from tests.released import V4_VISION, V41_VISION

GRID = {name: (row, column) for row, names in enumerate(POSITIONS) for column, name in enumerate(names)}


def cases(kind: str, count: int, form: str | None = None, split: str = "test") -> list[Case]:
    """Cases with images of at most 400 pixels a side, which are quick to read."""
    made = (make_case(11, index, split, kinds=(kind,)) for index in range(10_000))  # type: ignore[arg-type]
    small = (case for case in made if max(max(scene.size) for scene in case.scenes) <= 400)
    return list(islice((case for case in small if form in (None, case.words.form)), count))


def named(question: str, seen: Sequence[Seen]) -> list[Seen]:
    """The things that the first noun of a text can mean: a colour, a shape, or both in this order."""
    colour = re.search(rf"\b({'|'.join(COLOURS)})\b", question)
    shape = re.search(rf"\b({'|'.join(SHAPES)})(e?s)?\b", question)
    if colour and shape and shape.start() != colour.end() + 1:
        first = min(colour, shape, key=lambda match: match.start())
        colour, shape = (colour, None) if first is colour else (None, shape)
    return [
        thing
        for thing in seen
        if (colour is None or thing.colour == colour[1]) and (shape is None or thing.shape == shape[1])
    ]


def only(things: Sequence[Seen]) -> Seen:
    assert len(things) == 1, things
    return things[0]


def word_of(answer: str, words: Sequence[str]) -> str:
    return only([word for word in words if re.search(rf"\b{word}\b", answer.lower())])  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize("split", ["test", "unseen"])
def test_colour_answers_are_the_colours_in_the_picture(split: str) -> None:
    for case in cases("colour", 40, split=split):
        thing = only(named(case.question, see(case.images[0])))
        assert word_of(case.answer, tuple(COLOURS)) == thing.colour


def test_shape_answers_are_the_shapes_in_the_picture() -> None:
    for case in cases("shape", 40):
        thing = only(named(case.question, see(case.images[0])))
        assert word_of(case.answer, SHAPES) == thing.shape


@pytest.mark.parametrize("split", ["test", "unseen"])
def test_counts_are_those_of_the_picture(split: str) -> None:
    for case in cases("count", 60, split=split):
        question = case.question.removesuffix(" Answer in a sentence.").removesuffix(" Be brief.")
        number = len(named(question, see(case.images[0])))
        assert word_of(case.answer.split("There ")[-1].lower(), COUNTS) == COUNTS[number]


@pytest.mark.parametrize("split", ["train", "unseen"])
def test_counts_of_a_colour_and_shape_stand_beside_things_with_one_of_the_two(split: str) -> None:
    """Who counts by the colour alone, or by the shape alone, is wrong in many of them."""
    asked = [case for case in cases("count", 160, split=split) if " ".join(case.words.pair or ()) in case.question]
    assert len(asked) >= 20
    misled = 0
    for case in asked:
        colour, shape = case.words.pair or ("", "")
        things = case.scenes[0].things
        number = sum((thing.colour, thing.shape) == (colour, shape) for thing in things)
        alone = [sum(thing.colour == colour for thing in things), sum(thing.shape == shape for thing in things)]
        misled += max(alone) > number
    assert 0.3 < misled / len(asked) < 0.7


def test_positions_are_the_thirds_in_which_the_thing_lies() -> None:
    for case in cases("position", 60, "position"):
        thing = only(named(case.question, see(case.images[0])))
        place = max((name for name in GRID if name in case.answer.lower()), key=len)
        width, height = case.images[0].size
        assert GRID[place] == (int(thing.centre[1] / height * 3), int(thing.centre[0] / width * 3))


def test_sides_are_plain_to_see() -> None:
    """Along the asked direction the two are at least one and a third times as far apart as across it."""
    away: dict[str, Callable[[float, float], float]] = {
        "left of": lambda x, y: -x,
        "right of": lambda x, y: x,
        "above": lambda x, y: -y,
        "below": lambda x, y: y,
    }
    for case in cases("position", 60, "side"):
        seen = see(case.images[0])
        pair = case.words.pair
        thing = only([one for one in seen if (one.colour, one.shape) == pair])
        other = only([one for one in seen if one is not thing])
        x, y = (a - b for a, b in zip(thing.centre, other.centre, strict=True))
        side = word_of(case.answer, SIDES)
        assert away[side](x, y) > 1.33 * min(abs(x), abs(y)) > -1
        assert away[side](x, y) == max(abs(x), abs(y))


def test_boxes_are_those_of_the_pixels() -> None:
    """Within two pixels of rounding, since corners of boxes lie on steps of 50; a smooth tip loses one more."""
    for case in cases("grounding", 60):
        image = case.images[0]
        thing = only(named(case.question, see(image)))
        (box,) = parse_answer(case.answer).boxes
        for said, edge, side in zip(box, thing.box, (*image.size, *image.size), strict=True):
            most = 3.5 if thing.shape in ("triangle", "star") else 2.5
            assert abs(said / 999 * side - edge) <= most, (case.answer, thing)
            assert said % 50 == 0
        assert case.answer.startswith("<｜ref｜>") and thing.shape in case.answer + thing.shape


def test_which_picture_shows_a_thing_is_true() -> None:
    for case in cases("compare", 30, "which"):
        question = case.question.removesuffix(" Answer in a sentence.").removesuffix(" Be brief.")
        having = [number for number, image in enumerate(case.images) if named(question, see(image))]
        answer = case.answer.lower()
        if len(having) == 1:
            assert word_of(answer, ORDINALS) == ORDINALS[having[0]]
        else:
            assert answer.startswith("all" if having else ("no", "none")), (answer, having)
            assert len(having) in (0, len(case.images))


def test_the_picture_with_the_most_things_has_so_many() -> None:
    for case in cases("compare", 15, "most"):
        numbers = [len(see(image)) for image in case.images]
        assert numbers.count(max(numbers)) == 1
        assert word_of(case.answer, ORDINALS) == ORDINALS[numbers.index(max(numbers))]
        assert COUNTS[max(numbers)] in re.findall(r"\w+", case.answer.lower())


def test_exactly_one_shape_is_in_all_pictures() -> None:
    for case in cases("compare", 15, "shared"):
        shared = set.intersection(*({thing.shape for thing in see(image)} for image in case.images))
        assert shared == {word_of(case.answer, SHAPES)}


def test_the_colour_in_one_of_several_pictures_is_that_one() -> None:
    for case in cases("compare", 15, "colour in"):
        image = case.images[ORDINALS.index(word_of(case.question, ORDINALS))]
        shape = word_of(case.question, SHAPES)
        thing = only([one for one in see(image) if one.shape == shape])
        assert word_of(case.answer, tuple(COLOURS)) == thing.colour


def test_second_questions_of_a_chat_are_answered_from_the_picture() -> None:
    for case in cases("chat", 45):
        seen = see(case.images[0])
        thing = only([one for one in seen if (one.colour, one.shape) == case.words.pair])
        first, said, _ = case.words.turns
        about = only(named(first, seen))
        assert (about.colour in said) != (about.shape in said.lower() and about.colour not in said)
        if case.words.form == "then position":
            assert about == thing
            place = max((name for name in GRID if name in case.answer.lower()), key=len)
            width, height = case.images[0].size
            assert GRID[place] == (int(thing.centre[1] / height * 3), int(thing.centre[0] / width * 3))
        else:
            assert about != thing and only(named(case.question, seen)) == thing
            assert (thing.shape if case.words.form == "then shape" else thing.colour) in case.answer.lower()


def test_reasoning_lists_what_is_seen() -> None:
    told = [case for kind in ("colour", "count", "position") for case in cases(kind, 60) if case.reasoning is not None]
    assert len(told) > 15
    for case in told:
        assert case.reasoning is not None and case.words.form != "side"
        listed: Counter[tuple[str, str]] = Counter()
        for group in re.split(r", | and ", case.reasoning.split(".")[0].removeprefix("I see ")):
            count, colour, shape = group.split()
            assert (shape in SHAPES) == (count == "one"), group
            listed[colour, shape if shape in SHAPES else shape.removesuffix("es" if "oss" in shape else "s")] += (
                COUNTS.index(count)
            )
        assert listed == Counter((thing.colour, thing.shape) for thing in see(case.images[0])), case.reasoning


def test_inverted_pictures_have_the_answers_of_the_originals() -> None:
    for index in range(30):
        plain = make_case(4, index, kinds=("colour",))
        negative = make_case(4, index, kinds=("colour",), variant="negative")
        assert negative.question == plain.question and negative.answer == plain.answer
        assert ImageChops.difference(negative.images[0], ImageChops.invert(plain.images[0])).getbbox() is None
    image = Image.fromarray(default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8))
    assert invert(invert(image)).tobytes() == image.tobytes() != invert(image).tobytes()


def test_sizes_span_what_the_models_meet_and_are_mostly_small() -> None:
    rng = default_rng(0)
    sizes = np.array([pick_size(rng) for _ in range(20_000)])
    assert sizes.min() == 64 and sizes.max() == 2000
    aspect = sizes[:, 0] / sizes[:, 1]
    assert 3.8 < aspect.max() <= 4.1 and 3.8 < (1 / aspect).max() <= 4.1
    assert (sizes.prod(1) <= 384**2).mean() > 0.8 and 0.01 < (sizes.prod(1) > 900**2).mean() < 0.04


@pytest.mark.parametrize("vision", [V4_VISION, V41_VISION], ids=["v4", "v41"])
def test_things_and_letters_are_large_enough_after_the_models_resizing(vision: object) -> None:
    """At least one and a half cells of 42 pixels for a thing, 20 pixels for the lowest letter; pixels round."""
    for index in range(400):
        for scene in make_scenes(index):
            scale = plan_image(*scene.size, vision).resized[0] / scene.size[0]  # type: ignore[arg-type]
            for thing in scene.things:
                x1, y1, x2, y2 = thing.box
                assert min(x2 - x1, y2 - y1) * scale >= 63 - scale
                assert 0 <= x1 < x2 <= scene.size[0] and 0 <= y1 < y2 <= scene.size[1]
            if scene.label is not None:
                _, top, _, bottom = label_box(scene.label, scene.size)
                assert (bottom - top) * scale >= 20


def make_scenes(index: int) -> tuple[Scene, ...]:
    return make_case(6, index, kinds=("number", "word", "count", "position", "grounding", "compare")).scenes


@pytest.mark.parametrize("kind", ["number", "word"])
def test_letters_are_whole_inside_their_picture_and_differ_from_text_to_text(kind: str) -> None:
    inks = set()
    for case in cases(kind, 25):
        (scene,) = case.scenes
        assert scene.label is not None
        x1, y1, x2, y2 = label_box(scene.label, scene.size)
        assert 0 <= x1 < x2 <= scene.size[0] and 0 <= y1 < y2 <= scene.size[1]
        blank = draw(Scene(size=scene.size, background="plain"), default_rng(1))
        printed = draw(Scene(size=scene.size, background="plain", label=scene.label), default_rng(1))
        ink = ImageChops.difference(blank, printed).getbbox()
        assert ink is not None
        assert x1 <= ink[0] <= x1 + scene.label.letter / 3 and x2 - scene.label.letter / 3 <= ink[2] <= x2
        assert abs(ink[1] - y1) <= 1 and abs(ink[3] - y2) <= 1
        inks.add(printed.crop(ink).tobytes())
        assert scene.label.text.lower() in case.answer
    assert len(inks) >= 24
    assert len(set(PRINTED_WORDS)) == 60 and max(map(len, PRINTED_WORDS)) <= 5


@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("turn", [0.0, 12.0])
@pytest.mark.parametrize("size", [(14, 14), (15, 19), (66, 66), (300, 260)])
def test_every_shape_fills_its_box_and_no_other_is_like_it(size: tuple[int, int], turn: float, smooth: bool) -> None:
    masks = {}
    for shape in SHAPES:
        thing = Thing(shape=shape, colour="red", box=(0, 0, *size), turn=turn, outline="black")
        mask = np.asarray(shape_mask(thing, smooth=smooth)) / 255
        assert mask.shape == size[::-1]
        for edge in (mask[0], mask[-1], mask[:, 0], mask[:, -1]):
            assert edge.max() > 0.1
        masks[shape] = mask
        inside = np.asarray(shape_mask(thing, smooth=smooth, inside=True)) / 255
        assert (inside <= mask).all() and 0.02 < mask.mean() - inside.mean() < 0.35
    for one in SHAPES:
        for other in SHAPES:
            if one < other:
                assert np.abs(masks[one] - masks[other]).mean() > 0.08, (one, other)


def test_colours_mean_ranges_that_hold_the_pure_ones_and_stand_apart() -> None:
    """No two names come nearer than 40 in every channel, inverted or not."""
    pure = {
        "red": (255, 0, 0),
        "orange": (255, 165, 0),
        "yellow": (255, 255, 0),
        "green": (0, 255, 0),
        "blue": (0, 0, 255),
        "purple": (128, 0, 128),
        "black": (0, 0, 0),
        "white": (255, 255, 255),
    }
    rng = default_rng(0)
    assert set(pure) == set(COLOURS) == set(PALETTE)
    for name, value in pure.items():
        low, high = PALETTE[name]
        drawn = [shade(name, rng) for _ in range(400)]
        assert value in drawn and len(set(drawn)) > 200
        assert (np.array(drawn) >= low).all() and (np.array(drawn) <= high).all()
        for other in PALETTE:
            gaps = np.maximum(np.subtract(PALETTE[other][0], high), np.subtract(low, PALETTE[other][1]))
            assert other == name or gaps.max() >= 40, (name, other)


@pytest.mark.parametrize("kind", list(KINDS))
def test_nothing_has_the_colour_of_what_is_behind_it(kind: str) -> None:
    behind = Counter()
    for index in range(150):
        for scene in make_case(8, index, kinds=(kind,)).scenes:
            behind[scene.background] += 1
            for thing in scene.things:
                assert scene.background not in (thing.colour, thing.outline) and thing.colour != thing.outline
            assert scene.label is None or scene.label.colour != scene.background
    assert kind in IMAGE_LEFT_OUT or set(behind) == {*MUTED, "white", "black"}


def test_things_are_turned_and_outlined_only_where_it_stays_plain_what_they_are() -> None:
    world, things = World(rng=default_rng(0)), []
    for side in range(14, 60):
        for shape in SHAPES:
            things += [world.thing(("red", shape), (5, 9, 5 + side, 14 + side), "white") for _ in range(10)]
    turned = [thing for thing in things if thing.turn]
    outlined = [thing for thing in things if thing.outline is not None]
    assert {thing.shape for thing in turned} == {"square", "triangle", "star", "cross"}
    assert {thing.shape for thing in outlined} == set(SHAPES) - {"ring"}, "a ring has no room for one"
    assert min(thing.box[2] - thing.box[0] for thing in turned) == 22
    assert min(thing.box[2] - thing.box[0] for thing in outlined) == 28
    assert 0.05 < len(outlined) / len(things) < 0.2 < len(turned) / len(things) < 0.4
    assert {thing.outline for thing in outlined} == {"black"}, "on white"


def test_text_is_printed_in_the_fonts_own_way_in_others_and_in_its_bitmap() -> None:
    world = World(rng=default_rng(0))
    styles = [world.lettering() for _ in range(1000)]
    assert 0.3 < sum(style == Lettering() for style in styles) / 1000 < 0.4
    assert 0.1 < sum(style.bitmap for style in styles) / 1000 < 0.2
    for name in ("weight", "spacing", "slant", "turn"):
        assert 0.15 < sum(getattr(style, name) != 0 for style in styles) / 1000 < 0.5, name
    assert all(min(style.weight, style.spacing, style.slant) >= 0 for style in styles)


def test_what_people_draw_with_pillow_is_drawn_pixel_for_pixel() -> None:
    """A square with an outline and a circle without one on white, and text as it comes."""
    drawn = Image.new("RGB", (200, 120), (255, 255, 255))
    pen = ImageDraw.Draw(drawn)
    pen.rectangle((20, 10, 79, 69), fill=(0, 0, 255), outline=(0, 0, 0), width=2)
    pen.ellipse((100, 30, 169, 99), fill=(0, 255, 0))
    things = (
        Thing(shape="square", colour="blue", box=(20, 10, 80, 70), outline="black"),
        Thing(shape="circle", colour="green", box=(100, 30, 170, 100)),
    )
    scene = Scene(size=(200, 120), background="white", things=things)
    assert any(draw(scene, default_rng(seed)).tobytes() == drawn.tobytes() for seed in range(4000))
    text = Image.new("RGB", (200, 120), (255, 255, 255))
    ImageDraw.Draw(text).text((20, 10), "4719", (0, 0, 0), ImageFont.load_default(60))
    ink = ImageChops.invert(text).getbbox()
    assert ink is not None
    x, y = (first / (room - last + first) for first, last, room in zip(ink[:2], ink[2:], text.size, strict=True))
    label = Label(text="4719", colour="black", letter=42.0, place=(x, y))
    scene = Scene(size=(200, 120), background="white", label=label)
    assert any(draw(scene, default_rng(seed)).tobytes() == text.tobytes() for seed in range(100))


def test_every_way_of_printing_changes_the_letters_and_keeps_their_height() -> None:
    styles = (
        Lettering(),
        Lettering(bitmap=True),
        Lettering(weight=0.1),
        Lettering(spacing=0.2),
        Lettering(stretch=1.2),
        Lettering(slant=0.25),
        Lettering(turn=5.0),
        Lettering(bitmap=True, spacing=0.2),
    )
    masks = [label_mask(Label(text="HAT", colour="red", letter=70.0, place=(0, 0), style=style)) for style in styles]
    assert len({mask.tobytes() for mask in masks}) == len(masks)
    assert all(mask.getbbox() == (0, 0, *mask.size) for mask in masks)
    assert [mask.height for mask in masks[3:6]] == pytest.approx([masks[0].height] * 3, abs=2)
    assert [masks[0].height, masks[1].height, masks[7].height] == pytest.approx([70] * 3, abs=2)
    assert masks[2].height == masks[0].height + 14
    assert masks[4].width == pytest.approx(1.2 * masks[0].width, abs=2)
    assert masks[3].width == pytest.approx(masks[0].width + 2 * 14, abs=2)
    assert masks[5].width == pytest.approx(masks[0].width + 0.25 * 70, abs=3)
    assert masks[6].height == pytest.approx(70 + masks[0].width * np.sin(np.radians(5)), abs=3)
    top, bottom = (np.nonzero(np.asarray(masks[5])[row])[0].min() for row in (2, -3))
    assert top > bottom + 10


@pytest.mark.parametrize("kind", MUTED)
def test_backgrounds_leave_room_for_black_white_and_bright_colours(kind: str) -> None:
    low, high = np.array(list(PALETTE.values())).swapaxes(0, 1)
    looks = set()
    for seed in range(12):
        image = draw(Scene(size=(90, 60), background=kind), default_rng(seed))
        pixels = np.asarray(image).reshape(-1, 3).astype(int)
        assert 62 <= pixels.min() and pixels.max() <= 205
        off = np.maximum(low - pixels[:, None], pixels[:, None] - high).max(-1).min(1)
        assert (off >= 12).mean() > 0.995
        looks.add(image.tobytes())
    assert len(looks) == 12
    assert len(PHOTOS) >= 4
