"""Faults in the tiny world's pictures, questions and answers, and in finding shipped models."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

ASKING = "spyglass/tiny_world/asking.py"
CASES = "spyglass/tiny_world/cases.py"
SCENE = "spyglass/tiny_world/scene.py"
WORDS = "spyglass/tiny_world/words.py"
PICTURES = "spyglass/tiny_world/pictures.py"
PHRASING = "spyglass/tiny_world/phrasing.py"
FRENCH = "spyglass/tiny_world/french.py"
ANSWERS = "spyglass/tiny_world/answers.py"
EVALUATE = "spyglass/tiny_world/evaluate.py"
SHIPPED = "spyglass/config/shipped.py"
CASE_TESTS = "tests/unit/tiny_world/test_cases.py"
PICTURE_TESTS = "tests/unit/tiny_world/test_pictures.py"
PHRASE_TESTS = "tests/unit/tiny_world/test_phrasing.py"
EVALUATE_TESTS = "tests/unit/tiny_world/test_evaluate.py"
SHIPPED_TESTS = "tests/unit/config/test_shipped.py"

TINY_WORLD_ROWS: list[Mutant] = [
    Mutant(CASES, "SeedSequence([SPLITS.index(split), seed, index])", "SeedSequence([seed, index])", CASE_TESTS,
           "splits share their cases"),
    Mutant(ASKING, "for shape in SHAPES if (colour, shape) not in UNSEEN", "for shape in SHAPES", CASE_TESTS,
           "unseen pairs are trained on"),
    Mutant(ASKING, "self.one(sorted(UNSEEN)) if self.unseen else self.one(self.allowed)", "self.one(self.allowed)",
           CASE_TESTS, "the unseen split asks about seen pairs"),
    Mutant(CASES, "thinks = rng.random() < _THINKING and variant is None and", "thinks = variant is None and rng.random() < _THINKING and",
           PICTURE_TESTS, "an inverted picture is another picture"),
    Mutant(CASES, 'if variant == "negative":', "if False:", PICTURE_TESTS, "negatives are not inverted"),
    Mutant(ASKING, "lambda pair: not matches(pair, noun)) if noun !=", "lambda pair: True) if noun !=", PICTURE_TESTS,
           "what must not be counted is counted"),
    Mutant(ASKING, "position=cells[0])\n    return Draft(form=\"position\"", "position=cells[-1])\n    return Draft(form=\"position\"",
           PICTURE_TESTS, "the position of another thing"),
    Mutant(ASKING, "shown = choice in (number, pictures)", "shown = choice == number", PICTURE_TESTS,
           "all pictures are said to show what one shows"),
    Mutant(ASKING, "world.number(1, most - 1)", "world.number(1, most)", PICTURE_TESTS, "two pictures with the most"),
    Mutant(ASKING, "most, winner = world.number(2, 5)", "most, winner = world.number(5, 5)", EVALUATE_TESTS,
           "an answer that can be guessed"),
    Mutant(ASKING, "side = world.number(0, 3)", "side = world.number(0, 0)", EVALUATE_TESTS, "always on the left"),
    Mutant(SCENE, "return (first, second) if side % 2 == 0", "return (first, second) if side % 2", PICTURE_TESTS,
           "left and right swapped"),
    Mutant(SCENE, "max(LEAST_THING / scale_of(size), LEAST_DRAWN_THING)", "LEAST_DRAWN_THING", PICTURE_TESTS,
           "things too small after resizing"),
    Mutant(SCENE, "max(LEAST_LETTER / scale_of(size), LEAST_DRAWN_LETTER)", "LEAST_DRAWN_LETTER", PICTURE_TESTS,
           "letters too small after resizing"),
    Mutant(SCENE, "zip(box, (*size, *size), strict=True)", "zip(box, (*size[::-1], *size[::-1]), strict=True)", PICTURE_TESTS,
           "width and height swapped in boxes"),
    Mutant(PICTURES, "value for value in range(256)", "value // 2 for value in range(256)", PICTURE_TESTS,
           "a negative of half the contrast"),
    Mutant(PICTURES, "np.clip(pixels.round(), _DARKEST, _LIGHTEST)", "np.clip(pixels.round(), 0, 255)", PICTURE_TESTS,
           "backgrounds as dark and light as things"),
    Mutant(PICTURES, "mask.crop(mask.getbbox())", "mask", PICTURE_TESTS, "letters beside their place"),
    Mutant(PICTURES, "-style.slant], [0.0, 1.0]", "style.slant], [0.0, 1.0]", PICTURE_TESTS, "letters lean to the left"),
    Mutant(PICTURES, "label.style.weight * label.letter)", "0 * label.letter)", PICTURE_TESTS, "no bold letters"),
    Mutant(PICTURES, "thing.box, shape_mask(thing, smooth=smooth, inside=True))", "thing.box, shape_mask(thing, smooth=smooth))",
           PICTURE_TESTS, "outlines are painted over"),
    Mutant(PICTURES, "rng.random() < _PURE:\n        return", "rng.random() < 0:\n        return", PICTURE_TESTS, "nothing is pure red"),
    Mutant(PICTURES, "(x - min(xs)) / wide", "x", PICTURE_TESTS, "turned shapes leave their box"),
    Mutant(ASKING, "for kind in _BACKGROUNDS if kind not in colours", "for kind in _BACKGROUNDS", PICTURE_TESTS,
           "white on white"),
    Mutant(WORDS, "low=(238, 112, 0), high=(255, 168, 45)", "low=(238, 50, 0), high=(255, 168, 45)", PICTURE_TESTS,
           "some red is called orange"),
    Mutant("spyglass/train/bins.py", "    patches_U[len(row_U) :] = 0\n", "", "tests/unit/train/test_tiny_script.py",
           "patches of another step are left in the memory"),
    Mutant(PHRASING, '"is" if count == 1 else "are"', '"are"', PHRASE_TESTS, "there are one"),
    Mutant(PHRASING, 'roman=variant == "roman"', "roman=False", PHRASE_TESTS, "no Roman numerals"),
    Mutant(FRENCH, '"du " + with_the.removeprefix("le ")', '"de " + with_the', PHRASE_TESTS, "de le carré"),
    Mutant(FRENCH, 'adjective != "orange"', "True", PHRASE_TESTS, "oranges"),
    Mutant(ANSWERS, "said.words == right.words", "right.words in said.words", EVALUATE_TESTS,
           "an answer with something added is right"),
    Mutant(ANSWERS, "text.rpartition(_END_OF_REASONING)[2]", "text", EVALUATE_TESTS, "reasoning counts as answer"),
    Mutant(ANSWERS, "(b[3] - b[1]) - shared)", "(b[3] - b[1]))", EVALUATE_TESTS, "overlap over the sum of areas"),
    Mutant(EVALUATE, 'if control == "grey":', 'if control == "gray":', EVALUATE_TESTS, "grey pictures are shown as they are"),
    Mutant(EVALUATE, "donor = make_case(seed, other,", "donor = make_case(seed, number,", EVALUATE_TESTS,
           "shuffled pictures are the right ones"),
    Mutant(EVALUATE, "thinking=thinks,", "thinking=False,", EVALUATE_TESTS, "no case is thought about"),
    Mutant(SHIPPED, "not os.path.isdir(name_or_path) and os.fspath", "os.fspath", SHIPPED_TESTS,
           "a shipped name hides a folder"),
]  # fmt: skip
