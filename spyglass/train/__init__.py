"""The serving model, driven by a loss."""
