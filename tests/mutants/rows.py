"""Every mutant written by hand: faults in equations. Changed lines of any file get theirs from `syntax.py`."""

from __future__ import annotations

from tests.mutants.format_rows import FORMAT_ROWS
from tests.mutants.kernel_rows import KERNEL_ROWS
from tests.mutants.model_rows import MODEL_ROWS
from tests.mutants.mutant import Mutant
from tests.mutants.op_rows import OP_ROWS

ROWS: list[Mutant] = [*FORMAT_ROWS, *KERNEL_ROWS, *MODEL_ROWS, *OP_ROWS]
