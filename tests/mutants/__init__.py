"""One-line faults, each of which some test must notice: `make mutants`, or `python -m tests.mutants FILTER`.

A fault that no test notices means a rule without a test. Rows stand in `<room>_rows.py`, `rows.py` joins them.
"""
