"""See `reference.py`: the definition of this op. Other files here are faster ways to the same numbers."""
