"""Structured output: grammars compiled, followed token by token, and tried in a process of their own."""
