"""N-gram memory: from token ids to the rows of its tables (spec v41 5). Numpy only; the gate lives in `text`.

Addresses depend on ids alone, so a driver fetches the rows of every engram layer before the model runs.
"""

from spyglass.engram.hashing import HashConstants, hash_constants, row_ids, table_primes
from spyglass.engram.store import EngramStore, Placement, TableRows, open_engram, open_tables
from spyglass.engram.vocabulary import TOKEN_MAP_NAME, TOKENIZER_NAME, classes_of_tokenizer, read_classes

__all__ = [
    "TOKENIZER_NAME",
    "TOKEN_MAP_NAME",
    "EngramStore",
    "HashConstants",
    "Placement",
    "TableRows",
    "classes_of_tokenizer",
    "hash_constants",
    "open_engram",
    "open_tables",
    "read_classes",
    "row_ids",
    "table_primes",
]
