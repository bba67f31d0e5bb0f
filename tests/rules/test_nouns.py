"""`docs/nouns.md` names classes and fields that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def names_of(node: ast.ClassDef) -> set[str]:
    """Everything that an instance answers to: fields, properties, methods, what `__init__` sets."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.AnnAssign | ast.Assign):
            for target in part.targets if isinstance(part, ast.Assign) else [part.target]:
                for leaf in ast.walk(target):
                    found.add(leaf.attr if isinstance(leaf, ast.Attribute) else getattr(leaf, "id", ""))
        elif isinstance(part, ast.FunctionDef):
            found.add(part.name)
    return found


def test_every_class_and_field_exists() -> None:
    wrong = []
    for line in (ROOT / "docs" / "nouns.md").read_text(encoding="utf-8").splitlines():
        noun = re.match(r"\| ((?:`\w+`(?:, )?)+) \(`([\w/.]+)`\) \| (.*?) \| .* \|$", line)
        if noun is None:
            continue
        path = ROOT / "spyglass" / noun[2]
        tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
        for name in re.findall(r"`(\w+)`", noun[1]):
            if name not in classes:
                wrong.append(f"{name} is not in {noun[2]}")
            elif len(re.findall(r"`\w+`", noun[1])) == 1:
                listed = re.sub(r"\([^)]*\)|= `\w+`", "", noun[3])
                own = names_of(classes[name])
                wrong += [f"{name}.{field}" for field in re.findall(r"`(\w+)`", listed) if field not in own]
    assert not wrong
