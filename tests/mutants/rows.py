"""Every mutant. A room's rows stand in a file of their own beside this one."""

from __future__ import annotations

from tests.mutants.config_rows import CONFIG_ROWS
from tests.mutants.mutant import Mutant

ROWS: list[Mutant] = [*CONFIG_ROWS]
