"""Faults in the protocols: fields, pictures, markup, usage, forms."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MARKUP = "spyglass/server/markup.py"
TAGS = "spyglass/server/tags.py"
FIELDS = "spyglass/server/fields.py"
ANSWER = "spyglass/server/answer.py"
CHAT = "spyglass/server/chat.py"
MESSAGES = "spyglass/server/messages.py"
RESPONSES = "spyglass/server/responses.py"
COMPLETIONS = "spyglass/server/completions.py"
CONVERSATION = "spyglass/server/conversation.py"
SAMPLING = "spyglass/server/sampling.py"
GRAMMAR = "spyglass/server/tool_grammar.py"
ON_REPLIES = "tests/server/test_replies.py"
ON_REQUESTS = "tests/server/test_requests.py"
ON_FORCED = "tests/server/test_forced_calls.py"
ON_TOLD = "tests/server/test_told.py"
ON_CLIENTS = "tests/server/test_clients.py"
ON_GRAMMAR = "tests/server/test_tool_grammar.py"

SERVER_PROTOCOL_ROWS: list[Mutant] = [
    Mutant(MARKUP, "if begun > 0 or (isinstance(closed, ClosedCall) and self._is_sound(closed)):", "if begun > 0:", ON_REPLIES,
           "orphan calls are lost"),
    Mutant(MARKUP, "call.tool in tools and call", "call.tool in tools or call", ON_REPLIES, "orphan calls of unknown tools"),
    Mutant(MARKUP, 'issuperset(_listed(tools[call.tool], "required"))', "issuperset(())", ON_REPLIES, "parameters not required"),
    Mutant(MARKUP, "end > 0 and not self._buffer[end:].strip()", "end > 0", ON_REPLIES, "quoted calls held to the end"),
    Mutant(MARKUP, "rest if cut or not answer.strip() else", "rest if True else", ON_REPLIES, "an answer lost in reasoning"),
    Mutant(MARKUP, "        if half <= len(MARK):\n", "        if half <= 0:\n", ON_REPLIES, "data taken for a closing tag"),
    Mutant(MARKUP, "return whole if cut else whole +", "return whole +", ON_REPLIES, "a call cut off is made whole"),
    Mutant(MARKUP, "self._is_text or _parsed(value) is _BROKEN", "self._is_text", ON_REPLIES, "broken JSON as arguments"),
    Mutant(MARKUP, "and self._parameter not in properties", "", ON_REPLIES, "a real parameter unwrapped"),
    Mutant(MARKUP, "parsed if set(parsed) <= set(properties) else None", "parsed", ON_REPLIES, "unknown parameters unwrapped"),
    Mutant(MARKUP, "if self._expected.one_call and self.num_calls:", "if False:", ON_REPLIES, "parallel calls that were not allowed"),
    Mutant(MARKUP, "if self._expected.tools else -1\n        if mark != 0:\n            return", "if True else -1\n        if mark != 0:\n            return",
           ON_REPLIES, "markup searched without tools"),
    Mutant(TAGS, '(" ", "calls") if family', '("", "tool_calls") if family', ON_REPLIES, "V4 markup for V4.1"),
    Mutant(FIELDS, "raise PromptError(_unknown(str(name), path, fields))", "continue", ON_REQUESTS, "unknown fields lost"),
    Mutant(FIELDS, "    if not any(value == one", "    if not any(True", ON_REQUESTS, "fixed fields take any value"),
    Mutant(ANSWER, "self.prompt - self.cached", "self.prompt", ON_TOLD, "cached tokens counted twice"),
    Mutant(ANSWER, "ids.index(self._think_end) + 1", "ids.index(self._think_end)", ON_TOLD, "the end of reasoning not counted"),
    Mutant(ANSWER, "output.error or CUT_OFF", "CUT_OFF", ON_TOLD, "an engine's error lost"),
    Mutant(CHAT, 'if role == "developer":', "if False:", ON_REQUESTS, "no role developer"),
    Mutant(CHAT, '"reasoning_effort", "none")\n', '"effort", "none")\n', ON_REQUESTS, "an effort dropped beside disabled thinking"),
    Mutant(CHAT, "if index:\n            text = text.replace", "if False:\n            text = text.replace", ON_CLIENTS,
           "every answer streams as the first"),
    Mutant(MESSAGES, 'changed["tool_choice"] = "required"', "pass", ON_CLIENTS, "any means auto"),
    Mutant(MESSAGES, 'return {"stop_reason": "stop_sequence", "stop_sequence": self._output.stopped_by}', "return {}", ON_TOLD,
           "stop sequences not told"),
    Mutant(RESPONSES, "self._number += 1", "self._number += 2", ON_TOLD, "error events numbered apart"),
    Mutant(COMPLETIONS, "self._offsets[index] += len(self._dec", "self._offsets[index] += 1 + len(self._dec", ON_CLIENTS,
           "text offsets drift"),
    Mutant(CONVERSATION, "    tokenizer.refuse_unless_fits(", "    max(", ON_REQUESTS, "hopeless chats are tokenised"),
    Mutant(COMPLETIONS, "            tokenizer.refuse_unless_fits([prompt], served.max_length)\n", "            pass\n", ON_REQUESTS,
           "hopeless texts are tokenised"),
    Mutant(SAMPLING, "and len(values) > most:", "and False:", ON_FORCED, "any number of stop strings"),
    Mutant(SAMPLING, "and len(text) > STOP_CHARS:", "and False:", ON_FORCED, "stop strings of any length"),
    Mutant(CONVERSATION, "None, THINK_END if conversed.must_call else None", "None, None", ON_FORCED, "forced calls forbid reasoning"),
    Mutant(CONVERSATION, "if named in (None, _name(tool))]", "]", ON_FORCED, "tools that may not be called are shown"),
    Mutant(GRAMMAR, "    if not schema_is_finite(schema):", "    if False:", ON_REQUESTS, "parameters without end"),
    Mutant("spyglass/server/stream.py", "                if prompt not in self._cached:\n", "                if True:\n", ON_CLIENTS,
           "a prompt counts once for each answer"),
    Mutant(COMPLETIONS, "[prompt for prompt in prompts for _ in many]", "[prompt for _ in many for prompt in prompts]", ON_CLIENTS,
           "answers of several prompts in another order"),
    Mutant(COMPLETIONS, "sum(more, start=first).chat()", "first.chat()", ON_CLIENTS, "usage of the first prompt only"),
    Mutant(COMPLETIONS, "self._echoes[index] + output.text", "self._echoes[0] + output.text", ON_CLIENTS, "the first prompt for all"),
    Mutant("spyglass/server/sampling.py", "        if token in biases:\n", "        if False:\n", ON_REQUESTS,
           "one of two biases of a token is lost"),
    Mutant(CONVERSATION, "if self._fetch is None:", "if False:", ON_REQUESTS, "remote pictures without permission"),
    Mutant(CONVERSATION, "if len(value) > self._limits.url_chars:", "if False:", ON_REQUESTS, "addresses of any length"),
    Mutant(CONVERSATION, "if stated.kind not in _JSON or must_call:", "if False:", ON_REQUESTS, "forms forbid calls in silence"),
    Mutant(SAMPLING, "params.seed + number", "params.seed", ON_REQUESTS, "the same answer n times"),
    Mutant(SAMPLING, "after=THINK_END) if thinking", "after=None) if thinking", ON_REQUESTS, "reasoning squeezed into a form"),
    Mutant(ANSWER, "or output.stopped_by is not None", "", ON_REPLIES, "a call cut by a stop string is run"),
    Mutant(ANSWER, "400 if output.grammar_violation else 500", "500", ON_REPLIES, "a form that cannot be had is a fault of ours"),
    Mutant(MARKUP, '        if cut and (self._state == "call"', '        if False and (self._state == "call"', ON_REPLIES,
           "half a call is closed"),
    Mutant(GRAMMAR, "{'' if required else '?'}", "?", ON_GRAMMAR, "required parameters left out"),
    Mutant(GRAMMAR, "            left = _left_after(parameters[-1], left)\n", "", "tests/server/test_forms.py",
           "a grammar of tools without bound"),
    Mutant(GRAMMAR, "    _left_after(text, MAX_GRAMMAR_CHARS)\n", "", "tests/server/test_forms.py", "a long schema is read before it is refused"),
    Mutant(GRAMMAR, "'call' if one_call else 'call+'", "'call+'", ON_GRAMMAR, "several calls where one is asked for"),
    Mutant(GRAMMAR, "{name: root[name] for name", "{name: {} for name", ON_GRAMMAR, "definitions of a schema lost"),
    Mutant(GRAMMAR, "if types is None and not set(schema) - _SAYS_NOTHING", "if types is None and True", ON_GRAMMAR,
           "text for whatever a reference asks for"),
    Mutant(GRAMMAR, r" & ~/(?s:.*)<\/{DSML}(?s:.*)/", "", ON_GRAMMAR, "a text spells the mark that would end it"),
]  # fmt: skip
