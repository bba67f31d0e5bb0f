"""A program that tries a tokenizer.json in a process of its own, since the library panics or aborts over some files.

`tokenizer` starts this file with the text of a tokenizer.json as its input. What comes out is what the library says is
wrong, nothing if the file can be used; whoever ends otherwise has ended over the file. It imports nothing of ours,
since the process is to start in tenths of a second.
"""

from __future__ import annotations

import resource
import signal
import sys

from tokenizers import Tokenizer

_CPU_SECONDS, _WALL_SECONDS = 60, 300
_MEMORY = 8 << 30  # bytes of address space; a file of 20 MB takes some 300 MB
# Letters, digits, blanks, what is no letter of any script, what has marks, a control character: through every step.
_PROBE = "Hello, wörld! 12345  ab\r\n\t漢字かな e\u0301 \U0001f600 \u200b\x07 <x> ｜"


def main() -> None:
    """Build the tokenizer, and tokenise and spell a text with all of it and with what text alone goes through."""
    for kind, value in ((resource.RLIMIT_AS, _MEMORY), (resource.RLIMIT_CPU, _CPU_SECONDS)):
        most = resource.getrlimit(kind)[1]  # which nobody may raise
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(kind, (value, value))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(_WALL_SECONDS)
    text = sys.stdin.buffer.read().decode("utf-8")
    try:
        full = Tokenizer.from_str(text)
        plain = Tokenizer(full.model)
        if full.normalizer is not None:
            plain.normalizer = full.normalizer
        if full.pre_tokenizer is not None:
            plain.pre_tokenizer = full.pre_tokenizer
        for tokenizer in (full, plain):
            for probe in ("", "a", _PROBE):
                tokenizer.decode(tokenizer.encode(probe, add_special_tokens=False).ids, skip_special_tokens=False)
            tokenizer.get_vocab(with_added_tokens=False)
    except Exception as error:  # the library raises bare Exception; a panic is none, and ends this process
        sys.stdout.buffer.write(f"{error or type(error).__name__}"[:2000].encode("utf-8", "replace"))


if __name__ == "__main__":
    main()
