"""How the tiny models that ship with the package were made: `make train-tiny`."""
