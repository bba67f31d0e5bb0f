"""Faults on the way from messages and pictures to ids, kinds and patches."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

PLAN = "spyglass/prompt/plan.py"
SPAN = "spyglass/prompt/span_v4.py"
SPAN41 = "spyglass/prompt/span_v41.py"
VISIBILITY = "spyglass/prompt/visibility.py"
IMAGE = "spyglass/prompt/image.py"
DECODE = "spyglass/prompt/decode.py"
SAMPLES = "spyglass/prompt/samples.py"
DATA_URL = "spyglass/prompt/data_url.py"
BUILD = "spyglass/prompt/build.py"
PLACEHOLDER = "spyglass/prompt/placeholder.py"
TOKENIZER = "spyglass/prompt/tokenizer.py"
CHAT = "spyglass/prompt/chat.py"
DIGEST = "spyglass/prompt/digest.py"
INTEROP = "spyglass/prompt/interop.py"
TESTS = "tests/unit/prompt"
PLAN_TESTS = f"{TESTS}/test_plan.py"
SPAN_TESTS = f"{TESTS}/test_spans.py"
VISIBILITY_TESTS = f"{TESTS}/test_visibility.py"
IMAGE_TESTS = f"{TESTS}/test_patchify.py"
DECODE_TESTS = f"{TESTS}/test_decode.py"
SAMPLES_TESTS = f"{TESTS}/test_decode.py"
DATA_URL_TESTS = f"{TESTS}/test_data_url.py"
PLACEHOLDER_TESTS = f"{TESTS}/test_placeholder.py"
TOKENIZER_TESTS = f"{TESTS}/test_tokenizer.py"
CHAT_TESTS = f"{TESTS}/test_chat.py"

PROMPT_ROWS: list[Mutant] = [
    Mutant(PLAN, "w > h * vision.max_wh_ratio", "w >= 2 * h * vision.max_wh_ratio", PLAN_TESTS, "wide pictures not clamped"),
    Mutant(PLAN, "w, h = int(w * scale), int(h * scale)", "w, h = math.ceil(w * scale), math.ceil(h * scale)", PLAN_TESTS,
           "up-scaling rounds up"),
    Mutant(PLAN, "math.ceil(w / patch) * patch", "math.floor(w / patch) * patch", PLAN_TESTS, "widths rounded down"),
    Mutant(PLAN, "width >= height * vision.max_wh_ratio", "width > height * vision.max_wh_ratio", PLAN_TESTS,
           "no stretch at exactly the limit"),
    Mutant(PLAN, "        budget -= 1\n", "        budget -= 2\n", PLAN_TESTS, "the budget falls too fast"),
    Mutant(PLAN, "_even(math.floor(rows)) * cell", "math.floor(rows) * cell", PLAN_TESTS, "odd rows in the solver"),
    Mutant(PLAN, "/ aspect + 0.25) - 0.5\n    rows = columns * aspect\n    if columns < 1:\n        return cell, _even(",
           "/ aspect)\n    rows = columns * aspect\n    if columns < 1:\n        return cell, _even(", PLAN_TESTS,
           "the solver forgets the newline column"),
    Mutant(PLAN, "reserve=span_v4.MAX_LEAD", "reserve=0", PLAN_TESTS, "leading pads not reserved"),
    Mutant(PLAN, "if not stretch and 0 in contained_size((width, height), box):", "if False:", PLAN_TESTS,
           "a picture that vanishes passes"),
    Mutant(SPAN, "return MAX_LEAD - start % GROUP", "return MAX_LEAD", SPAN_TESTS, "leading pads ignore the position"),
    Mutant(SPAN, "    return body + body // 2 % 2 * 2 + 2", "    return body + 2", SPAN_TESTS, "the two spare pads uncounted"),
    Mutant(SPAN, "transpose(0, 2, 1)", "transpose(0, 1, 2)", SPAN_TESTS, "cells in reading order"),
    Mutant(SPAN, "kinds[:rows, columns] = TokenKind.NEWLINE", "kinds[:, columns] = TokenKind.NEWLINE", SPAN_TESTS,
           "a newline in the pad row"),
    Mutant(SPAN, "spare = body.size // 2 % 2 * 2", "spare = 0", SPAN_TESTS, "no spare pads"),
    Mutant(SPAN, "order=order[order >= 0]", "order=np.sort(order[order >= 0])", SPAN_TESTS, "aligner rows not permuted"),
    Mutant(VISIBILITY, "(position_T <= first_end_T)", "(position_T < first_end_T)", VISIBILITY_TESTS, "END outside the span"),
    Mutant(VISIBILITY, "max_tokens - 1)", "max_tokens)", VISIBILITY_TESTS, "the left cap is off by one"),
    Mutant(VISIBILITY, "reach = window - 1", "reach = window", VISIBILITY_TESTS, "the window does not count the query"),
    Mutant(VISIBILITY, "position_T + right_T\n", "position_T\n", VISIBILITY_TESTS, "no look to the right inside a span"),
    Mutant(VISIBILITY, "cuts[1:] = prompt.visible_T2[:, 1] == 0", "cuts[:-1] = prompt.visible_T2[:, 1] == 0", VISIBILITY_TESTS,
           "cuts judged by the wrong side"),
    Mutant(VISIBILITY, "if (kinds_T[open_at:position] == TokenKind.TEXT).any():", "if False:", VISIBILITY_TESTS, "text in a span"),
    Mutant(IMAGE, "Image.Resampling.BICUBIC", "Image.Resampling.LANCZOS", IMAGE_TESTS, "another filter"),
    Mutant(IMAGE, "PAD_COLOUR = (127, 127, 127)", "PAD_COLOUR = (128, 128, 128)", IMAGE_TESTS, "another grey"),
    Mutant(IMAGE, "round((box[0] - size[0]) * 0.5)", "(box[0] - size[0] + 1) // 2", IMAGE_TESTS, "centred to the other side"),
    Mutant(IMAGE, "size = box if plan.stretch else", "size =", IMAGE_TESTS, "never stretched"),
    Mutant(IMAGE, "+ 0x7FFF + (bits >> 16 & 1)) >> 16", ") >> 16", IMAGE_TESTS, "pixel values truncated to bf16"),
    Mutant(IMAGE, "/ np.float32(255) - np.float32(0.5)", "/ np.float32(256) - np.float32(0.5)", IMAGE_TESTS, "pixels over 256"),
    Mutant(DECODE, 'CHAT_RULES = PictureRules(exif="upright", samples="scale")', "CHAT_RULES = PictureRules()", DECODE_TESTS,
           "chat pictures are not turned upright"),
    Mutant(DECODE, "    6: Image.Transpose.ROTATE_270,", "    6: Image.Transpose.ROTATE_90,", DECODE_TESTS, "turned the wrong way"),
    Mutant(DECODE, "_SIDEWAYS = (5, 6, 7, 8)", "_SIDEWAYS = ()", DECODE_TESTS, "planned before turning"),
    Mutant(DECODE, "if width * height > limits.pixels:", "if False:", DECODE_TESTS, "decompression bombs pass"),
    Mutant(DECODE, "if max(width, height) > limits.side:", "if False:", DECODE_TESTS, "absurd sides pass"),
    Mutant(DECODE, ", formats=FORMATS)", ")", DECODE_TESTS, "any format that Pillow knows is opened"),
    Mutant(DECODE, "if not stat.S_ISREG(status.st_mode):", "if False:", DECODE_TESTS, "a pipe is waited for"),
    Mutant(SAMPLES, "(wide + _STEP // 2) // _STEP", "wide // _STEP", SAMPLES_TESTS, "16-bit samples truncated"),
    Mutant(SAMPLES, "if not finite.all():", "if False:", SAMPLES_TESTS, "NaN pixels pass"),
    Mutant(DATA_URL, 'b"-_", b"+/"', 'b"+/", b"+/"', DATA_URL_TESTS, "URL-safe base64 refused"),
    Mutant(DATA_URL, ", validate=True", "", DATA_URL_TESTS, "damaged base64 passes"),
    Mutant(DATA_URL, "if len(data) > most_bytes:", "if False:", DATA_URL_TESTS, "data URLs of any size"),
    Mutant(BUILD, "self.num_cells += plan.llm_grid[0] * plan.llm_grid[1]", "self.num_cells += span.length", TESTS,
           "rows of the second picture shifted"),
    Mutant(BUILD, "span.order + self.num_cells", "span.order", TESTS, "every picture shows the first one's rows"),
    Mutant(BUILD, "if not np.isfinite(values).all():", "if False:", TESTS, "patches that are not finite pass"),
    Mutant(BUILD, "if pixels.shape != expected:", "if False:", TESTS, "patches of any shape pass"),
    Mutant(PLACEHOLDER, "if spelled is not None and spelled != token:", "if False:", PLACEHOLDER_TESTS,
           "config and tokenizer may disagree"),
    Mutant(PLACEHOLDER, "if spelled != RELEASED_ID:\n            raise", "if spelled is None:\n            raise", PLACEHOLDER_TESTS,
           "a text-only spelling at any id"),
    Mutant(TOKENIZER, "plain = Tokenizer(full.model)", "plain = full", TOKENIZER_TESTS, "text may spell special tokens"),
    Mutant(TOKENIZER, 'all(step.get("behavior") != "Removed" for step in steps)', "True", TOKENIZER_TESTS, "what a tokenizer drops counts"),
    Mutant(TOKENIZER, 'normalizer.get("normalizers") != []', "False", TOKENIZER_TESTS, "what a normalizer shortens counts"),
    Mutant(TOKENIZER, "if vocabulary.keys() >= set(ByteLevel.alphabet()) else None", "", TOKENIZER_TESTS, "what no token spells counts"),
    Mutant(TOKENIZER, "if text.isascii() else len(text.encode(errors=\"replace\"))", "", TOKENIZER_TESTS, "characters for bytes"),
    Mutant(TOKENIZER, "if self._full.token_to_id(spelling) != token:", "if False:", TOKENIZER_TESTS, "added tokens elsewhere"),
    Mutant(CHAT, "pieces.append(next(pictures) if token == SPELLING else", "pieces.append(next(pictures) if False else",
           CHAT_TESTS, "pictures rendered as text tokens"),
    Mutant(CHAT, "pictures[_stub_number(source)] for source in rendered.image_sources", "picture for picture in pictures[::-1]",
           CHAT_TESTS, "pictures in another order"),
    Mutant(CHAT, "if role not in PICTURE_ROLES:", "if False:", CHAT_TESTS, "pictures in assistant messages"),
    Mutant(CHAT, "if isinstance(source, str) and not is_data_url(source):", "if False:", CHAT_TESTS, "strings read files"),
    Mutant(BUILD, "config.image_token_id\n    draft", "None\n    draft", TESTS, "an unexpanded placeholder passes as text"),
    Mutant(BUILD, "(ids < 0) | (ids >= vocab_size)", "ids >= vocab_size", TESTS, "negative ids pass"),
    Mutant(CHAT, "        if self._blind:", "        if False:", CHAT_TESTS, "pictures for a model without a tower"),
    Mutant(CHAT, '"type": "enabled" if options.thinking', '"type": "enabled" if True', CHAT_TESTS, "always thinking"),
    Mutant(DIGEST, '    digest.update(struct.pack(f"<{len(facts)}q", *facts))\n', "", TESTS, "digests forget the plan"),
    Mutant(DIGEST, "{pixels.dtype.str} ", "", TESTS, "digests forget the dtype"),
    Mutant(INTEROP, "VLLM_FIRST_ID = 129257", "VLLM_FIRST_ID = 129258", TESTS, "another engine's ids shifted"),
    Mutant(INTEROP, "[0, -1, 1, 2, 3]", "[0, -1, 2, 3, 4]", TESTS, "V4.1 types numbered as V4's"),
]  # fmt: skip
