"""The places of a Jinja template where its work is counted (template_limits.py): filters that count are added
to its syntax tree."""

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

COUNT, JOIN, NESTED, SEARCHED = "count iteration", "join texts", "count nested", "count searched"
"""Names of filters that no template can write."""

CALL = 16
"""Number of iterations that a macro call counts as: it takes as long."""


class CountingNodes(NodeTransformer):
    """Makes loops and macros count against the limits, the texts that `~` joins, and nested values that are
    compared or are names in a mapping."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_counting(1, node.lineno), lineno=node.lineno))
        if node.test is not None:  # items that the test leaves out count too
            node.test = nodes.And(_counting(1, node.lineno), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_counting(CALL, node.lineno), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        values = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(values, JOIN, [], [], None, None, lineno=node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        values = [node.expr, *(operand.expr for operand in node.ops)]
        if len(values) > 2 or not any(map(_is_constant, values)):
            node.expr = _counting_value(node.expr)
            for operand in node.ops:
                operand.expr = _counting_value(operand.expr, SEARCHED)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _counting_value(node.key)
        return node


def _counting(iterations: int, line: int) -> nodes.Filter:
    """Return a call that counts iterations, as a filter: Jinja calls filters faster than functions."""
    return nodes.Filter(nodes.Const(iterations), COUNT, [], [], None, None, lineno=line)


def _is_constant(value: nodes.Expr) -> bool:
    """Return whether a comparison with a value takes little time, whatever the other value is."""
    items = value.items if isinstance(value, nodes.List | nodes.Tuple) else [value]
    return all(isinstance(item, nodes.Const) for item in items)


def _counting_value(value: nodes.Expr, by: str = NESTED) -> nodes.Expr:
    """Return an expression with the same value that counts it if it is nested."""
    return nodes.Filter(value, by, [], [], None, None, lineno=value.lineno)
