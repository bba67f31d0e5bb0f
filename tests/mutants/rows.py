"""Every mutant. A room's rows stand in a file of their own beside this one."""

from __future__ import annotations

from tests.mutants.checkpoint_rows import CHECKPOINT_ROWS
from tests.mutants.config_rows import CONFIG_ROWS
from tests.mutants.edge_rows import EDGE_ROWS
from tests.mutants.engine_rows import ENGINE_ROWS
from tests.mutants.form_rows import FORM_ROWS
from tests.mutants.full_training_rows import FULL_TRAINING_ROWS
from tests.mutants.kernel_rows import KERNEL_ROWS
from tests.mutants.lora_rows import LORA_ROWS
from tests.mutants.mutant import Mutant
from tests.mutants.op_rows import OP_ROWS
from tests.mutants.prompt_rows import PROMPT_ROWS
from tests.mutants.quant_rows import QUANT_ROWS
from tests.mutants.server_protocol_rows import SERVER_PROTOCOL_ROWS
from tests.mutants.server_rows import SERVER_ROWS
from tests.mutants.text_rows import TEXT_ROWS
from tests.mutants.tiny_world_rows import TINY_WORLD_ROWS
from tests.mutants.train_rows import TRAIN_ROWS
from tests.mutants.v41_rows import V41_ROWS
from tests.mutants.vision_rows import VISION_ROWS
from tests.mutants.whole_training_rows import WHOLE_TRAINING_ROWS

ROWS: list[Mutant] = [
    *CHECKPOINT_ROWS,
    *CONFIG_ROWS,
    *EDGE_ROWS,
    *ENGINE_ROWS,
    *FORM_ROWS,
    *FULL_TRAINING_ROWS,
    *KERNEL_ROWS,
    *LORA_ROWS,
    *OP_ROWS,
    *PROMPT_ROWS,
    *QUANT_ROWS,
    *SERVER_PROTOCOL_ROWS,
    *SERVER_ROWS,
    *TEXT_ROWS,
    *TINY_WORLD_ROWS,
    *TRAIN_ROWS,
    *V41_ROWS,
    *VISION_ROWS,
    *WHOLE_TRAINING_ROWS,
]
