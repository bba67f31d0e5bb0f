"""Faults in the server: who gets in, what is read, whose answer it is, and who is left waiting."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

WORKER = "spyglass/engine/worker.py"
BODY = "spyglass/server/body.py"
JSON_TEXT = "spyglass/config/json_text.py"
GATE = "spyglass/server/gate.py"
APP = "spyglass/server/app.py"
FETCH = "spyglass/server/fetch.py"
STREAM = "spyglass/server/stream.py"
READY = "spyglass/server/readiness.py"
NUMBERS = "spyglass/server/metrics.py"
DESK = "spyglass/engine/adapters.py"
LOADING = "spyglass/server/adapters.py"
PARSING = "spyglass/server/parsing.py"
CONNECTION = "spyglass/server/connection.py"
ON_WORKER = "tests/unit/engine/test_worker.py"
ON_BODIES = "tests/server/test_bodies.py"
ON_GATE = "tests/server/test_gate.py"
ON_FLOW = "tests/server/test_flow.py"
ON_FETCH = "tests/server/test_fetch.py"
ON_READY = "tests/server/test_readiness.py"
ON_PARSING = "tests/server/test_parsing.py"
ON_SLOW = "tests/server/test_slow_connections.py"
ON_LOADING = "tests/server/test_adapter_loading.py"

SERVER_ROWS: list[Mutant] = [
    Mutant(CONNECTION, "        self._start()\n\n    def data_received", "\n    def data_received", ON_SLOW, "who says nothing stays"),
    Mutant(CONNECTION, "            self._has_begun = True\n", "            self._has_begun = True\n            self._stop()\n", ON_SLOW,
           "bytes wind the clock up"),
    Mutant(CONNECTION, "            self._is_first = False\n            self._stop()\n", "            self._is_first = False\n", ON_SLOW,
           "long answers are cut"),
    Mutant(DESK, "        if self._users[slot]:\n            return\n", "", ON_LOADING, "memory freed under an answer"),
    Mutant(DESK, "            self._free_if_unused(use.slot)\n\n    def unregister", "            pass\n\n    def unregister", ON_LOADING,
           "memory of an adapter that was in use stays"),
    Mutant(LOADING, "if not folder.is_relative_to(root):", "if False:", ON_LOADING, "adapters from anywhere"),
    Mutant(LOADING, "            if name in (*self._reserved, *self._llm.adapters):", "            if name in self._llm.adapters:",
           ON_LOADING, "an adapter takes the model's name"),
    Mutant("spyglass/server/readiness.py", "and llm.adapter_use(name).vision_digest:", "and False:", ON_LOADING,
           "adapters of pictures are tried without one"),
    Mutant(LOADING, "            self._readiness.forget_adapter(name)\n", "", ON_LOADING, "health tells of what is gone"),
    Mutant(APP, "    if not service.config.allow_adapter_loading:\n        return []\n", "", ON_LOADING,
           "adapters are loaded by anybody"),
    Mutant(WORKER, "self._live + answers > self._most_live", "self._live > self._most_live", ON_WORKER, "one too many"),
    Mutant(WORKER, 'text="".join(delta.text for delta in deltas)', "text=last.text", ON_WORKER, "a late reader loses text"),
    Mutant(WORKER, "            if self._failures % _GIVE_UP_AFTER == 0:\n                self._end_all(\"the engine failed\")\n", "",
           ON_WORKER, "an engine that only raises is never given up"),
    Mutant(WORKER, "                self._failures = 0\n", "                pass\n", ON_WORKER, "recovery does not show"),
    Mutant(BODY, "                    if reader.size > 2 * limit:", "                    if False:", ON_BODIES, "an endless body is read for ever"),
    Mutant(BODY, "        if self.size > self._limit:\n", "        if self.size > self._limit + 1:\n", ON_BODIES, "one byte too many"),
    Mutant(JSON_TEXT, 'parse_float=_finite, ', "", ON_BODIES, "1e999 is a number"),
    Mutant(JSON_TEXT, ', object_pairs_hook=_unique', "", ON_BODIES, "of a field written twice one is lost"),
    Mutant("spyglass/server/sampling.py", "return parse_json_text(value)", "return __import__('json').loads(value)",
           "tests/server/test_requests.py", "of a schema's key written twice one is lost"),
    Mutant("spyglass/server/openai_errors.py", 'if status == 404 and field == "model":', "if status == 404:",
           "tests/server/test_clients.py", "an unknown path is an unknown model"),
    Mutant(BODY, "        _check_surrogates(value, what)\n", "        pass\n", ON_BODIES, "half characters pass"),
    Mutant(BODY, "    _check_depth(value, what)\n", "", ON_BODIES, "depth without end"),
    Mutant(BODY, 'if media_type != "application/json":', 'if media_type and media_type != "application/json":', ON_BODIES,
           "no type is taken for JSON"),
    Mutant(GATE, 'if "transfer-encoding" in headers and "content-length" in headers:', "if False:", ON_BODIES,
           "what stands behind a body of two lengths is a request"),
    Mutant(GATE, 'raise HTTPException(400, told, {"connection": "close"})', "raise HTTPException(400, told)", ON_BODIES,
           "a connection goes on behind a body of two lengths"),
    Mutant(GATE, "        return any(matches)", "        return matches[0]", ON_GATE, "only the first key opens"),
    Mutant(GATE, 'if scheme.lower() == "bearer" else []', "", ON_GATE, "any scheme opens"),
    Mutant(GATE, "type(error).__name__  #", "fault.message  #", ON_GATE, "the log quotes requests"),
    Mutant(GATE, 'return scope["path"] if "endpoint" in scope and not scope.get("path_params") else "other"', 'return scope["path"]',
           ON_READY, "strangers make up series"),
    Mutant(APP, "            self._service.worker.cancel(submission)", "            pass", ON_FLOW, "who leaves holds the engine"),
    Mutant(APP, "            service.calls -= 1\n", "            pass\n", ON_FLOW, "places are never given back"),
    Mutant(APP, "if service.calls >= service.max_live:", "if False:", ON_FLOW, "bodies without end of number"),
    Mutant(BODY, "            self._held.take(len(chunk))\n", "            pass\n", ON_FLOW, "bodies that wait are not counted"),
    Mutant(BODY, "        undo.callback(held.release)\n", "", ON_FLOW, "what a cut body held is never given back"),
    Mutant(PARSING, "        parsing.add_done_callback(lambda _: held.release())\n", "        held.release()\n", ON_FLOW,
           "bodies that are being parsed are not counted"),
    Mutant(PARSING, "    places.release()\n", "    pass\n", ON_PARSING, "who waits for a picture keeps others from unpacking"),
    Mutant(PARSING, "threading.BoundedSemaphore(_UNPACKING)", "threading.BoundedSemaphore(16)", ON_PARSING, "sixteen unpack at once"),
    Mutant(PARSING, "self._fetchers.submit(", "self._pool.submit(", ON_PARSING,
           "who waits for a picture keeps others from being read"),
    Mutant(PARSING, "self._compilers.submit(", "self._pool.submit(", "tests/server/test_forms.py",
           "forms keep others from being read"),
    Mutant(PARSING, ", count=held.take)", ")", ON_PARSING, "what is fetched is not counted"),
    Mutant(APP, "            pictures.release()\n", "", ON_FLOW, "pictures are never given back"),
    Mutant(STREAM, "            await _send_body(_ALIVE, send)\n", "            pass\n", ON_FLOW, "silent streams stay silent"),
    Mutant(STREAM, "        last = b\"event: error\\ndata: \"", "        raise\n        last = b\"event: error\\ndata: \"", ON_FLOW,
           "a fault cuts a stream without a word"),
    Mutant(FETCH, "if not all(is_public(", "if not any(is_public(", ON_FETCH, "one public address vouches for all"),
    Mutant(FETCH, "        address = self._public_address(parts.hostname, port)\n", "        self._public_address(parts.hostname, port)\n        address = self.resolve(parts.hostname, port)[0]\n",
           ON_FETCH, "looked up again after the check"),
    Mutant(FETCH, "        if address.ipv4_mapped is not None:\n            return is_public(address.ipv4_mapped)\n", "", ON_FETCH,
           "mapped addresses pass or fail by themselves"),
    Mutant(FETCH, " and address not in _METADATA", "", ON_FETCH, "a cloud's own service is public"),
    Mutant(FETCH, "        self._left -= len(data)\n", "", ON_FETCH, "bytes counted for each picture only"),
    Mutant(FETCH, "        timer.start()\n", "", ON_FETCH, "a site that drips is waited for"),
    Mutant(FETCH, "_MOST_HOPS + 1)", "10**6)", ON_FETCH, "redirects without end"),
    Mutant(READY, '        elif self.starting:\n            state = "starting"\n', "", ON_READY,
           "ready before anything was tried"),
    Mutant(READY, "stats.failing or any(", "any(", ON_READY, "failing steps do not show"),
    Mutant(READY, "output.error or len(output.token_ids) != 1", "output.error", ON_READY, "a feature that draws nothing is fine"),
    Mutant(READY, "            except OverloadedError:", "            except FloatingPointError:", ON_READY,
           "full at the start is failing for good"),
    Mutant(READY, "            except Exception as error:  # a task's", "            except FloatingPointError as error:  # a task's",
           ON_READY, "a trial that breaks is silent"),
    Mutant(NUMBERS, "engine.prefix_bytes", "engine.image_bytes", ON_READY, "one cache's bytes told for the other's"),
    Mutant(NUMBERS, "        self._generated.inc(record.completion_tokens)\n", "", ON_READY, "answer tokens not counted"),
]  # fmt: skip
