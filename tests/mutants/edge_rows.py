"""Faults at the edges: what callers hand over, batches, held memory, refusals, logs, counts, listening, warming up."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

BATCH = "spyglass/server/batch.py"
CLI_RUN = "spyglass/cli/run.py"
COUNT = "spyglass/server/count.py"
FAULTS = "spyglass/server/faults.py"
FIT = "spyglass/engine/fit.py"
HELD = "spyglass/server/held.py"
INPUTS = "spyglass/engine/inputs.py"
LOG = "spyglass/server/log.py"
PAGE = "spyglass/server/page.py"
REASONING = "spyglass/cli/reasoning.py"
REQUEST = "spyglass/engine/request.py"
RUN = "spyglass/server/run.py"
TRAIN_LOG = "spyglass/train/log.py"
WARM_UP = "spyglass/engine/warm_up.py"
ON_BATCH = "tests/server/test_batch.py"
ON_COUNTS = "tests/server/test_counts.py"
ON_FAULTS = "tests/server/test_faults.py"
ON_FIT = "tests/unit/engine/test_fit.py"
ON_FLOW = "tests/server/test_flow.py"
ON_HELD = "tests/server/test_held.py"
ON_LLM = "tests/unit/engine/test_llm.py"
ON_LOG = "tests/server/test_log.py"
ON_PAGE = "tests/server/test_playground.py -k plan"
ON_PARAMS = "tests/unit/engine/test_request.py"
ON_REASONING = "tests/unit/cli/test_reasoning.py"
ON_TRAINING = "tests/unit/train/test_loop.py tests/unit/train/test_state.py"
ON_WARM_UP = "tests/unit/engine/test_warm_up.py"

EDGE_ROWS: list[Mutant] = [
    Mutant(REASONING, "len(reasoned) - _begun(reasoned)", "len(reasoned)", ON_REASONING, "half an end tag is shown as reasoning"),
    Mutant(REASONING, "        shown = reasoned[:known].rstrip()\n", "        shown = reasoned[:known]\n", ON_REASONING, "space around reasoning stays"),
    Mutant(REASONING, "(self._closing if self._reasoned else \"\")", "self._closing", ON_REASONING, "empty reasoning has an end line"),
    Mutant(REASONING, "if self._reasoned and not self._begun:", "if False:", ON_REASONING, "the answer begins with empty lines"),
    Mutant(REASONING, "return text.partition(_END)[2].lstrip()", "return text", ON_REASONING, "reasoning goes into the next prompt"),
    Mutant(CLI_RUN, "+ unfolded.finish(), flush", "+ \"\", flush", ON_REASONING, "the end of reasoning that was cut is not shown"),
    Mutant(CLI_RUN, "answer_of(output.text) if self._thinking else output.text", "output.text", ON_REASONING, "reasoning goes into the next prompt"),
    Mutant(CLI_RUN, "        elif unfolded.unanswered:\n", "        elif False:\n", ON_REASONING, "nobody is told that no answer came"),
    Mutant(BATCH, "and found.custom_id in seen:", "and False:", ON_BATCH, "two requests of one name"),
    Mutant(BATCH, "        os.truncate(path, end)\n", "        pass\n", ON_BATCH, "half an answer stays in the file"),
    Mutant(BATCH, "            if not text.endswith(b\"\\n\"):\n                break\n", "", ON_BATCH, "half an answer counts"),
    Mutant(BATCH, "                self._engine.abort(number)\n", "", ON_BATCH, "other answers of a refused line go on"),
    Mutant(BATCH, 'if line.body.get("stream"):', "if False:", ON_BATCH, "lines that stream"),
    Mutant(BATCH, 'sorted(set(value) - {"custom_id"', 'sorted(set() - {"custom_id"', ON_BATCH, "unknown fields of a line"),
    Mutant(BATCH, "fine = status < _REFUSED", "fine = True", ON_BATCH, "refused lines count as answered"),
    Mutant(BATCH, '["status_code"] < _REFUSED', '["status_code"] > 0', ON_BATCH, "refusals of an earlier run count as answered"),
    Mutant(BATCH, "= (open_call, index)", "= (open_call, 0)", ON_BATCH, "every answer of a line is its first"),
    Mutant(BATCH, "            if not open_call.missing:\n", "            if True:\n", ON_BATCH, "lines written before all answers are there"),
    Mutant(BATCH, "            traceback.print_exc()\n            return\n", "            raise\n", ON_BATCH, "a failing step ends the batch"),
    Mutant(BATCH, "< most and (line", "< 10**9 and (line", ON_BATCH, "a file is in memory before its first answer"),
    Mutant(HELD, "held.total > self._mine and ", "", ON_HELD, "one alone may not have what its limits allow"),
    Mutant(HELD, "held.total + nbytes > held.most", "held.total > held.most", ON_HELD, "one more than memory has"),
    Mutant(HELD, "self._mine += nbytes", "self._mine = nbytes", ON_HELD, "only what came last is given back"),
    Mutant(HELD, "            self._mine = 0\n", "", ON_HELD, "what is held is given back twice"),
    Mutant(FAULTS, "math.ceil(error.retry_after_s)", "int(error.retry_after_s)", ON_FAULTS, "retry after no time"),
    Mutant(FAULTS, "PromptError | CapacityError | AdapterError", "PromptError | AdapterError", ON_FAULTS,
           "what does not fit is a fault of ours"),
    Mutant(FAULTS, "status=500, message=NEUTRAL", "status=500, message=str(error)", ON_FAULTS, "strangers read what broke"),
    Mutant(LOG, "logging.ERROR if record.status == 500 else logging.INFO", "logging.INFO", ON_LOG, "faults logged as news"),
    Mutant(LOG, ' if value not in (None, 0, False, (), "")'[1:], "if True", ON_LOG, "log lines full of nothing"),
    Mutant(LOG, '            fields["traceback"] = self.formatException(record.exc_info)\n', "            pass\n", ON_LOG,
           "faults without their traceback"),
    Mutant(COUNT, 'start=flag_field(stated, "add_special_tokens", default=True)', "start=True", ON_COUNTS, "always with a start"),
    Mutant(COUNT, "not 0 <= token < size", "not 0 <= token", ON_COUNTS, "ids outside the vocabulary have a text"),
    Mutant(COUNT, "MESSAGES_FIELDS)\n        choose_model(self.served, stated)\n", "MESSAGES_FIELDS)\n", ON_COUNTS,
           "counts for a model that is not served"),
    Mutant(COUNT, "_IDS)\n        choose_model(self.served, stated)\n", "_IDS)\n", ON_COUNTS, "texts for a model that is not served"),
    Mutant(COUNT, "isinstance(token, bool) or ", "", ON_COUNTS, "true is an id"),
    Mutant(PAGE, "(full_width - wide) * 0.5", "(full_width - wide) * 0.0", ON_PAGE, "the picture drawn at the edge"),
    Mutant(PAGE, "found.resized if found.stretch else contained", "found.resized if True else contained", ON_PAGE,
           "no bars beside the picture"),
    Mutant(RUN, "    await app.state.service.drain()\n", "    pass\n", ON_FLOW, "streams are cut without their last words"),
    Mutant(RUN, "socket.SO_KEEPALIVE, 1)", "socket.SO_KEEPALIVE, 0)", ON_FLOW, "a machine that went is waited for"),
    Mutant(WARM_UP, "[longest] if longest is widest else [longest, widest]", "[longest]", ON_WARM_UP, "the most patches never tried"),
    Mutant(WARM_UP, "    sizes = (\n        lines\n", "    sizes = (\n        lines[:1]\n", ON_WARM_UP, "no narrow pictures"),
    Mutant(WARM_UP, "max(1, tokens - block)", "max(1, tokens)", ON_WARM_UP, "a prompt larger than was asked for"),
    Mutant(INPUTS, 'raise type(error)(f"request {number}: {error}") from error', "raise", ON_LLM, "an error that does not say whose"),
    Mutant(INPUTS, "if len(params) != count:", "if False:", ON_LLM, "prompts without parameters"),
    Mutant(INPUTS, "    except RuntimeError as error:", "    except ZeroDivisionError as error:", ON_LLM, "logits larger than memory"),
    Mutant(FIT, "free // 8", "free", ON_FIT, "the prefix cache may take all memory"),
    Mutant(REQUEST, "0.01 <= x <= 100", "0 <= x", ON_PARAMS, "a repetition penalty that divides by nothing"),
    Mutant(REQUEST, "isinstance(value, int) and not isinstance(value, bool)", "isinstance(value, int)", ON_PARAMS, "True is a number"),
    Mutant(REQUEST, "0 < x <= 1)", "0 <= x <= 1)", ON_PARAMS, "top_p of nothing"),
    Mutant(REQUEST, "value.bit_length() > 4096", "False", ON_PARAMS, "a number too long to be told"),
    Mutant(TRAIN_LOG, "if row.step <= done]", "]", ON_TRAINING, "steps that come again stand twice in the log"),
]  # fmt: skip
