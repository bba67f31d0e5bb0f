"""Tests of Spyglass; `tests.tolerance` and `tests.mutants` are imported by name."""
