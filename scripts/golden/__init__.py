"""Makers of the golden data of the tests, each from what `tests/golden/PROVENANCE.md` names."""
