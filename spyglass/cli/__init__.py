"""The command line: argument parsing only. `main.py` finds the verb; each verb is a module of this room."""
