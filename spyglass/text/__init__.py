"""The backbone, one file per mechanism; `v4.py` is the order in which they act."""
