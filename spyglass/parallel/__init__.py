"""Several processes on one model: `group` runs a divided one, `fsdp` trains a whole one."""
