"""Every mutant. A room's rows stand in a file of their own beside this one."""

from __future__ import annotations

from tests.mutants.config_rows import CONFIG_ROWS
from tests.mutants.mutant import Mutant
from tests.mutants.prompt_rows import PROMPT_ROWS
from tests.mutants.vision_rows import VISION_ROWS

ROWS: list[Mutant] = [*CONFIG_ROWS, *PROMPT_ROWS, *VISION_ROWS]
