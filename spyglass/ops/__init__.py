"""The ops of the models, a folder each. `reference.py` is the definition, others are faster ways to its numbers."""
