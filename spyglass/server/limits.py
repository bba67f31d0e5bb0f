"""What one request may cost beyond the options of `ServerConfig`: every limit with its reason and how it is refused."""

from __future__ import annotations

from dataclasses import dataclass

MAX_VALUES = 2_000_000
MAX_DEPTH = 100
MAX_ANSWERS = 128
MAX_LOGPROBS = 500_000
MAX_STOPS, MAX_STOP_CHARS, MAX_STOP_IDS = 16, 1000, 128  # the first is the model makers' own, four times OpenAI's
MAX_BIASES = 4096
MAX_READING = 1024
SMALL_BODY = 32 << 10  # bytes; a larger one is read in another process
BODY_SECONDS, BODY_PAUSE_SECONDS, BODY_BYTES_PER_SECOND = 120.0, 10.0, 1024
UNREAD_SECONDS = 300.0
READING_CPU_SECONDS, READING_SECONDS, READING_BYTES = 10.0, 60.0, 4 << 30


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit: what it counts, its value, the answer beyond it and why it is there."""

    what: str
    value: str
    status: int
    why: str


LIMITS = (
    Limit("values in a body (numbers, texts, lists, objects)", f"{MAX_VALUES:,}", 400, "each takes memory and time"),
    Limit("levels of nesting in a body", f"{MAX_DEPTH}", 400, "readers recurse"),
    Limit("answers to a request", f"{MAX_ANSWERS}", 400, "each is a sequence of its own"),
    Limit(
        "log-probabilities: answers x tokens x (1 + alternatives), of echoed prompts too",
        f"{MAX_LOGPROBS:,}",
        400,
        "a hundred bytes could ask for gigabytes; a length that is not given is made to fit",
    ),
    Limit("stop texts, each of at most 1,000 characters", f"{MAX_STOPS}", 400, "every token is held against each"),
    Limit("`stop_token_ids`", f"{MAX_STOP_IDS}", 400, "the same"),
    Limit("tokens of `logit_bias`", f"{MAX_BIASES:,}", 400, "they are added at every step"),
    Limit("bodies that are being read", f"{MAX_READING:,}", 429, "half bodies take no places of whole requests"),
    Limit(
        "time of a body",
        f"{BODY_SECONDS:.0f} s, pauses {BODY_PAUSE_SECONDS:.0f} s, {BODY_BYTES_PER_SECOND:,} bytes a second",
        408,
        "connections are not for keeping",
    ),
    Limit("time in which an answer is not read", f"{UNREAD_SECONDS:.0f} s", 0, "the connection is closed"),
    Limit(
        f"reading a body of more than {SMALL_BODY >> 10} KiB, unpacking an image: in a process of its own",
        f"{READING_CPU_SECONDS:.0f} s of a processor, {READING_SECONDS:.0f} s, {READING_BYTES >> 30} GiB of addresses",
        400,
        "decoders and tokenizers are loops that nobody else can end",
    ),
    Limit(
        "parts of a pattern that may be left out or repeated (`a?`, `b*`, `c{2}`)",
        "4,096",
        400,
        "n of them one behind another are n x n of work; told by the text, before a process tries it",
    ),
    Limit(
        "parts of the patterns of a grammar, as `llguidance` counts them", "200,000", 400, "counted before it builds"
    ),
    Limit("patterns of an adapter's ranks, or alphas, that are no names", "512", 400, "each is compiled"),
    Limit("scans of a JPEG times its pixels", "1,000,000,000", 400, "a scan of 80 bytes can cost a tenth of a second"),
    Limit("pixels of a tile or strip of a TIFF", "4,194,304, or those of the image", 400, "it is unpacked whole"),
)


def limits_table() -> str:
    """The limits as a Markdown table."""
    rows = [f"| {limit.what} | {limit.value} | {limit.status or 'none'} | {limit.why} |" for limit in LIMITS]
    return "\n".join(["| what | limit | status | why |", "|---|---|---|---|", *rows])
