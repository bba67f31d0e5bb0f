"""Faults in forms of answers: compiling them, trying them where they can be ended, what is kept of them."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

COMPILING = "spyglass/engine/structured/compile.py"
TRIALS = "spyglass/engine/structured/sandbox.py"
GRAMMAR = "spyglass/engine/structured/grammar.py"
ON_TRIALS = "tests/unit/engine/test_sandbox.py"
ON_COMPILING = "tests/unit/engine/test_compile_grammar.py"
ON_FORMS = "tests/unit/engine/test_grammar.py"

FORM_ROWS: list[Mutant] = [
    Mutant(TRIALS, "self._waiting.pop() if self._waiting else None", "None", ON_TRIALS, "what waits is never asked"),
    Mutant(TRIALS, "seconds < _LONG and len(self", "len(self", ON_TRIALS, "large processes are kept"),
    Mutant(TRIALS, "        if not keeps:\n            process.end()\n", "", ON_TRIALS, "what is not kept runs on"),
    Mutant(TRIALS, "        if wrong is not None:\n            raise PromptError(wrong)\n", "", ON_TRIALS,
           "a form that means nothing passes its trial"),
    Mutant(TRIALS, '[sys.executable, "-P", str(', "[sys.executable, str(", ON_TRIALS, "our files hide the library's"),
    Mutant(TRIALS, "                process_group=0,", "                process_group=None,", ON_TRIALS, "Ctrl+C ends trials"),
    Mutant(TRIALS, "        except BrokenPipeError:\n", "        except ZeroDivisionError:\n", ON_TRIALS,
           "a process that ends is a traceback"),
    Mutant(TRIALS, "        except OSError as error:\n", "        except ZeroDivisionError as error:\n", ON_TRIALS,
           "no process is a traceback"),
    Mutant(TRIALS, "if ended == signal.SIGPROF else", "if ended != signal.SIGPROF else", ON_TRIALS,
           "memory told as time"),
    Mutant(COMPILING, "    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)\n", "", ON_TRIALS, "no limit of the processor"),
    Mutant(COMPILING, "    signal.setitimer(signal.ITIMER_REAL, wall_seconds)\n", "", ON_TRIALS, "no limit of the clock"),
    Mutant(COMPILING, "signal.signal(number, signal.SIG_DFL)", "pass", ON_TRIALS, "limits that are ignored"),
    Mutant(COMPILING, "    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPROF, signal.SIGALRM))\n", "", ON_TRIALS,
           "limits that are blocked"),
    Mutant(COMPILING, "tell([wrong, time.process_time() - began])", "tell([wrong, 0.0])", ON_TRIALS, "no time is told"),
    Mutant(COMPILING, 'b"<|%d|>" % token', 'b"a"', ON_COMPILING, "silent tokens spell text"),
    Mutant(COMPILING, "            return self._encode(text)\n", "            pass\n", ON_COMPILING,
           "what a form leaves no choice about in single bytes"),
    Mutant(COMPILING, "takewhile(self._of_byte.__contains__, text.encode())", "text.encode()", ON_COMPILING,
           "a byte without a token is a traceback"),
    Mutant(COMPILING, "except (ValueError, TypeError, RecursionError) as error:", "except ValueError as error:", ON_COMPILING,
           "a form of another type is a traceback"),
    Mutant(COMPILING, 'bitorder="little"', 'bitorder="big"', ON_COMPILING, "a token that the form forbids is tried"),
    Mutant(COMPILING, "            threading.stack_size(before)\n", "", ON_COMPILING, "all threads get a deep stack"),
    Mutant(COMPILING, r'''re.compile(r"[\\.+*?()|\[\]{}^$]")''', r'''re.compile(r"[\\.+*?()|\[\]{}]")''', ON_COMPILING,
           "ends of lines in a choice"),
    Mutant(COMPILING, r'''re.compile(r"[\\.+*?()|\[\]{}^$]")''', r'''re.compile(r"[\\+*?()|\[\]{}^$]")''', ON_COMPILING,
           "a point in a choice is any character"),
    Mutant(COMPILING, '_ANY_OBJECT = {"type": "object"}', "_ANY_OBJECT: dict[str, str] = {}", ON_COMPILING,
           "JSON that is no object"),
    Mutant(COMPILING, '"regex" if kind == "regex" else "grammar"', '"grammar"', ON_COMPILING, "a pattern read as a grammar"),
    Mutant(COMPILING, "{wrong[:500]}", "{wrong}", ON_COMPILING, "a refusal of any length"),
    Mutant(GRAMMAR, "while len(self._compiled) > 1 and (", "while self._compiled and (", ON_FORMS, "the form asked for is forgotten"),
    Mutant(GRAMMAR, "len(self._compiled) > _KEPT or ", "", ON_FORMS, "forms are kept without number"),
    Mutant(GRAMMAR, "            self._compiled.move_to_end(request)\n", "", ON_FORMS, "what is asked for often is forgotten"),
    Mutant(GRAMMAR, "                allowed_SV[row] = True\n", "", ON_FORMS, "a failed form leaves nothing to draw"),
]  # fmt: skip
