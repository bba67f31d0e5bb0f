"""A general mutator: small faults in the syntax tree of any Python file, limited to given lines."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Set
from dataclasses import dataclass

_COMPARED: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
}  # fmt: skip
_COMPUTED: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "/"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"), ast.BitAnd: ("&", "|"), ast.BitOr: ("|", "&"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Edit:
    """Bytes `start` to `stop` of a source become `text`; `line` and `fault` say what that is."""

    line: int
    fault: str
    start: int
    stop: int
    text: str

    def apply(self, source: str) -> str:
        """The changed source."""
        data = source.encode()
        return (data[: self.start] + self.text.encode() + data[self.stop :]).decode()


class _Faults(ast.NodeVisitor):
    def __init__(self, source: str) -> None:
        self._data = source.encode()
        self._line_start = [0]
        for line in self._data.splitlines(keepends=True):
            self._line_start.append(self._line_start[-1] + len(line))
        self.edits: list[Edit] = []

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        start = self._line_start[node.lineno - 1] + node.col_offset
        return start, self._line_start[node.end_lineno - 1] + node.end_col_offset

    def _text(self, node: ast.expr) -> str:
        start, stop = self._span(node)
        return self._data[start:stop].decode()

    def _replace(self, node: ast.expr | ast.stmt, text: str, fault: str) -> None:
        self.edits.append(Edit(node.lineno, fault, *self._span(node), text))

    def _swap(self, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        """Another operator between two operands; parentheses and line ends between them stay."""
        start, stop = self._span(left)[1], self._span(right)[0]
        between = self._data[start:stop].decode()
        if between.count(old) == 1:
            text = between.replace(old, new)
            self.edits.append(Edit(left.end_lineno or left.lineno, f"{old} becomes {new}", start, stop, text))

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, operator, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            self._swap(left, right, *_COMPARED[type(operator)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        known = _COMPUTED.get(type(node.op))
        text = isinstance(node.left, ast.Constant | ast.JoinedStr) and not isinstance(node.op, ast.Mult | ast.Add)
        if known and not text:
            self._swap(node.left, node.right, *known)
            if known[0] in "+-*":
                self._replace(node, f"({self._text(node.left)})", f"the right side of {known[0]} is dropped")
                self._replace(node, f"({self._text(node.right)})", f"the left side of {known[0]} is dropped")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._swap(left, right, *words)
        self.generic_visit(node)

    def _negate(self, node: ast.If | ast.While | ast.IfExp) -> None:
        if ast.unparse(node.test) != "TYPE_CHECKING":
            self._replace(node.test, f"(not ({self._text(node.test)}))", "the condition is negated")
            self.generic_visit(node)

    visit_If = visit_While = visit_IfExp = _negate

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            self._replace(node, f"({node.value} + 1)", f"{node.value} is one more")
        elif type(node.value) is bool:
            self._replace(node, str(not node.value), f"{node.value} becomes {not node.value}")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call | ast.Await):
            self._replace(node, "pass", "the statement is dropped")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._replace(node, "pass", "the statement is dropped")
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._replace(node, "pass", "nothing is raised")  # and the message stays as it is

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        inner = [inner for statement in node.body for inner in ast.walk(statement)]
        procedure = not any(isinstance(n, ast.Return | ast.Yield | ast.YieldFrom) and n.value for n in inner)
        first = next(
            (s for s in node.body if not isinstance(s, ast.Expr) or not isinstance(s.value, ast.Constant)), None
        )
        if procedure and first is not None and not isinstance(first, ast.Pass | ast.Raise):
            start = self._span(first)[0]
            self.edits.append(Edit(first.lineno, "the function returns at once", start, start, "return; "))
        for statement in node.body:
            self.visit(statement)
        for default in [*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)]:
            self.visit(default)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:  # decorators say how a class is made: a fault there is rarely a rule's
            self.visit(statement)

    visit_FunctionDef = visit_AsyncFunctionDef = _function


def edits(source: str, lines: Set[int] | None = None) -> Iterator[Edit]:
    """Faults that can be planted on these lines (all if None), in the order of the file; every result can be parsed."""
    faults = _Faults(source)
    faults.visit(ast.parse(source))
    for edit in sorted(faults.edits, key=lambda edit: (edit.line, edit.start, edit.stop, edit.text)):
        if lines is None or edit.line in lines:
            try:
                ast.parse(edit.apply(source))
            except SyntaxError:  # such as `return; ` before a compound statement
                continue
            yield edit
