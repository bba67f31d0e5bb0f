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
CORPUS = "spyglass/tiny_world/corpus.py"
SHEET = "spyglass/tiny_world/sheet.py"
UNTAUGHT = "scripts/tiny/untaught.py"
TRAIN = "scripts/tiny/train.py"
KEPT = "scripts/tiny/kept.py"
PLACES = "spyglass/train/places.py"
SHIPPED = "spyglass/config/shipped.py"
CASE_TESTS = "tests/unit/tiny_world/test_cases.py"
PICTURE_TESTS = "tests/unit/tiny_world/test_pictures.py"
PHRASE_TESTS = "tests/unit/tiny_world/test_phrasing.py"
EVALUATE_TESTS = "tests/unit/tiny_world/test_evaluate.py"
ON_UNTAUGHT = "tests/unit/train/test_untaught.py"
ON_SCRIPT = "tests/unit/train/test_tiny_script.py"
ON_CASES = "tests/unit/tiny_world/test_cases.py"
ON_RUN = "tests/unit/train/test_tiny_run.py"
ON_PLACES = "tests/unit/train/test_places.py"
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
    Mutant(ASKING, "lambda pair: not matches(pair, noun) and (not near", "lambda pair: (not near", PICTURE_TESTS,
           "what must not be counted is counted"),
    Mutant(ASKING, "(not near or bool({*pair} & {*target}))", "True", PICTURE_TESTS,
           "who counts every blue thing is right about blue squares"),
    Mutant(ASKING, 'names: tuple[Noun, ...] = (target, (None, shape)', 'names: tuple[Noun, ...] = ((None, shape)',
           PICTURE_TESTS, "a count never asks for a colour and a shape"),
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
    Mutant(ANSWERS, "text.rpartition(_END_OF_REASONING)[0] == expected", "expected in text", EVALUATE_TESTS,
           "thoughts without an end are right"),
    Mutant(EVALUATE, "None if case.reasoning is None else is_thought(case.reasoning, said)", "is_thought(case.reasoning or str(), said)",
           EVALUATE_TESTS, "answers without thinking count as thoughts"),
    Mutant(EVALUATE, "{sum(thoughts)} of", "{len(thoughts)} of", EVALUATE_TESTS, "all thoughts are right"),
    Mutant(EVALUATE, "thinking=thinks,", "thinking=False,", EVALUATE_TESTS, "no case is thought about"),
    Mutant(SHIPPED, "not os.path.isdir(name_or_path) and os.fspath", "os.fspath", SHIPPED_TESTS,
           "a shipped name hides a folder"),
    Mutant(ASKING, "if name not in (colour, background)]", "if name != colour]", PICTURE_TESTS, "outlines nobody sees"),
    Mutant(ASKING, " and side >= _LEAST_TURNED else 0.0", " else 0.0", PICTURE_TESTS, "small things are turned"),
    Mutant(ASKING, ' and side >= _LEAST_OUTLINED\n', "\n", PICTURE_TESTS, "small things are outlined"),
    Mutant(ASKING, ' and shape != "ring"', "", PICTURE_TESTS, "rings with an outline"),
    Mutant(ASKING, "0.95 * largest_letter(", "1.2 * largest_letter(", PICTURE_TESTS, "letters leave their picture"),
    Mutant(ASKING, "bitmap=bool(look > 0.85)", "bitmap=False", PICTURE_TESTS, "no bitmap font"),
    Mutant(ASKING, "if look < 0.35:", "if look < 0:", PICTURE_TESTS, "no font as it comes"),
    Mutant(CASES, ' and draft.form != "side"', "", PICTURE_TESTS, "sides are thought about"),
    Mutant(CASES, '"negative": ("colour", "colour", "colour", "shape"),', '"negative": ("count", "count"),', CASE_TESTS,
           "negatives of what colours do not decide"),
    Mutant(CASES, " if kind not in WITHOUT_PAIRS)\n", ")\n", CASE_TESTS, "unseen pairs in kinds that have none"),
    Mutant(CASES, "roles[number % 2]", "roles[1 - number % 2]", CASE_TESTS, "the model asks and the person answers"),
    Mutant(PHRASING, "shape if count == 1 else words.plural(shape)", "shape", PICTURE_TESTS, "two circle"),
    Mutant(FRENCH, '"une" if count == 1 and gender else', '"un" if count == 1 and gender else', PHRASE_TESTS, "un étoile"),
    Mutant(FRENCH, '"" if count == 1 else "many"', '"many"', PHRASE_TESTS, "one étoiles"),
    Mutant(FRENCH, 'words.FRENCH_COLOURS[colour][gender]\n', "words.FRENCH_COLOURS[colour][0]\n", PHRASE_TESTS, "étoile vert"),
    Mutant(CORPUS, "for variant in VARIANTS for index", "for variant in () for index", CASE_TESTS, "words of variants are unknown"),
    Mutant(CORPUS, "    yield from (str(coordinate) for coordinate in range(0, 1000, STEP))\n", "", CASE_TESTS, "coordinates are unknown"),
    Mutant(SHEET, "max(most // 2, most - len(right))", "most // 2", EVALUATE_TESTS, "a sheet with room left for wrong ones"),
    Mutant(SHEET, "sorted(box[::2]), sorted(box[1::2])", "box[::2], box[1::2]", EVALUATE_TESTS, "boxes with exchanged corners"),
    Mutant(SHEET, "_RIGHT if verdict.right else _WRONG, width=3", "_RIGHT, width=3", EVALUATE_TESTS, "all frames green"),
    Mutant(UNTAUGHT, "rows_UD = head_VD[~taught_V]", "rows_UD = head_VD", ON_UNTAUGHT, "the mean of all rows"),
    Mutant(UNTAUGHT, "mean_D + APART *", "mean_D +", ON_UNTAUGHT, "rows at another distance"),
    Mutant(UNTAUGHT, "= mean_D + APART", "= APART", ON_UNTAUGHT, "rows leave their mean"),
    Mutant(UNTAUGHT, " / away_UD.norm(dim=1, keepdim=True).clamp(min=1e-6)", "", ON_UNTAUGHT, "rows as near as they were"),
    Mutant(UNTAUGHT, ".clamp(min=1e-6)", "", ON_UNTAUGHT, "rows that are one become NaN"),
    Mutant(UNTAUGHT, "head_VD.clone()", "head_VD", ON_UNTAUGHT, "the head that was handed in changes"),
    Mutant(TRAIN, "set_apart(decode(head, torch.float32), taught_V)", "set_apart(decode(head, torch.float32), ~taught_V)", ON_UNTAUGHT,
           "the rows that were taught are moved"),
    Mutant(TRAIN, "decode(head, torch.float32)", "decode(head, torch.bfloat16)", ON_UNTAUGHT, "rows set apart in bf16"),
    Mutant(TRAIN, "        old.unlink()\n", "        pass\n", ON_UNTAUGHT, "weights of another run are left"),
    Mutant(TRAIN, "        return progress / WARM_UP\n", "        return 1.0\n", ON_SCRIPT, "no warm-up"),
    Mutant(TRAIN, "(1 - progress) / 0.6", "(1 - progress) / 0.5 + 0.1", ON_SCRIPT, "the rate does not end at 0"),
    Mutant(KEPT, "        self.uses[place] = 0\n", "", ON_SCRIPT, "fresh steps count as used"),
    Mutant(KEPT, "if uses == least])", "if uses <= MOST_USES])", ON_SCRIPT, "some steps more often than others"),
    Mutant(KEPT, "if least >= MOST_USES:", "if least > MOST_USES:", ON_SCRIPT, "steps once too often"),
    Mutant(TRAIN, "first=drawn,", "first=0,", ON_RUN, "a run that goes on learns the first cases again"),
    Mutant(TRAIN, "            self.trainer.restore(state.tensors)\n", "            pass\n", ON_RUN, "a run goes on with drawn weights"),
    Mutant(TRAIN, 'float(facts["elapsed"]), 0 if', "0.0, 0 if", ON_RUN, "a run that goes on has its whole horizon before it"),
    Mutant(PLACES, "rms_norm(rows_IC.float(), rows_IC.shape[-1:], eps=1e-6)", "rms_norm(rows_IC.float(), rows_IC.shape[-1:], eps=0.0)", ON_PLACES,
           "rows of zeros are NaN"),
    Mutant(PLACES, "rms_norm(rows_IC.float(), rows", "rms_norm(rows_IC, rows", ON_PLACES, "norm of a place's row in bf16"),
    Mutant(PLACES, "flatten(0, 1), targets_N", "transpose(0, 1).flatten(0, 1), targets_N", ON_PLACES, "columns of one cell are lines of another"),
    Mutant(PLACES, "centre * PARTS / length", "centre * PARTS / (length + 1)", ON_PLACES, "parts of a larger picture"),
    Mutant(SCENE, "(x1, y1, x2 + 1, y2 + 1)", "(x1, y1, x2, y2)", ON_CASES, "neighbours that touch"),
    Mutant(SCENE, "max(first[across], second[across]) <", "0 <", ON_CASES, "things a corner apart"),
]  # fmt: skip
