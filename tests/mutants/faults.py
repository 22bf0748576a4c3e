"""Faults of one syntax tree: small changes of its source, each of one expression or statement."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}


@dataclass(frozen=True)
class Fault:
    """Replaces `source[start:end]`, in characters; `line` is the first line replaced, from 1 on."""

    start: int
    end: int
    line: int
    kind: str
    replacement: str

    def applied(self, source: str) -> str:
        return source[: self.start] + self.replacement + source[self.end :]


class _Finder(ast.NodeVisitor):
    """Collects faults of statements that run when the product runs: no annotations, types, names or messages."""

    def __init__(self, source: str) -> None:
        self.faults: list[Fault] = []
        self._source = source
        self._line_starts = [0]
        for line in source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))
        self._lines = source.splitlines()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for child in (*node.args.defaults, *node.args.kw_defaults, *node.body):
            if child is not None:
                self.visit(child)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for child in node.body:
            self.visit(child)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Messages are not mutated."""

    def visit_Raise(self, node: ast.Raise) -> None:
        self._add(node, "raise removed", "pass")

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        self._negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._negate(condition)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        changed = _COMPARISONS[type(node.ops[0])]()
        self._change(node, "comparison", ast.Compare(node.left, [changed, *node.ops[1:]], node.comparators))
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        operator = _OPERATORS.get(type(node.op))
        if operator is not None:
            self._change(node, "operator", ast.BinOp(node.left, operator(), node.right))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        operator = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._change(node, "and, or", ast.BoolOp(operator, node.values))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, "constant", str(not node.value))
        elif isinstance(node.value, int):
            self._add(node, "constant", str(node.value + 1))

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not (isinstance(node.value, ast.Constant) and node.value.value is None):
            self._add(node, "return None", "return None")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not isinstance(node.value, ast.Constant):
            self._add(node, "statement removed", "pass")
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add(node, "assignment removed", "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if isinstance(node.targets[0], ast.Attribute | ast.Subscript):
            self._add(node, "assignment removed", "pass")
        self.generic_visit(node)

    def visit_Break(self, node: ast.Break) -> None:
        self._add(node, "break", "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add(node, "continue", "break")

    def _negate(self, test: ast.expr) -> None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self._change(test, "condition negated", test.operand)
        elif not isinstance(test, ast.Compare):  # a comparison is turned round by its operator
            self._change(test, "condition negated", ast.UnaryOp(ast.Not(), test))

    def _change(self, node: ast.expr, kind: str, changed: ast.expr) -> None:
        self._add(node, kind, f"({ast.unparse(changed)})")

    def _add(self, node: ast.expr | ast.stmt, kind: str, replacement: str) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._position(node.lineno, node.col_offset)
        end = self._position(node.end_lineno, node.end_col_offset)
        self.faults.append(Fault(start, end, node.lineno, kind, replacement))

    def _position(self, line: int, utf8_column: int) -> int:
        text = self._lines[line - 1].encode()[:utf8_column].decode()
        return self._line_starts[line - 1] + len(text)


def faults_of(source: str) -> Iterator[Fault]:
    """Yield the faults of a module's source, in the order of their places."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    yield from sorted(finder.faults, key=lambda fault: (fault.start, fault.end, fault.kind))
