"""Conditions on rows: parsed, rendered as parameterised SQL for the snapshot, and evaluated on every change.

Invariant: the rendered SQL and the evaluator agree on every row, and no text of a request becomes SQL.
"""

from headwater.shapes.where.evaluator import Predicate, compile_condition
from headwater.shapes.where.parser import UnsupportedError, parse_condition, parse_order
from headwater.shapes.where.rendering import Rendered, render_condition, render_order
from headwater.shapes.where.resolver import Condition, WhereColumn, resolve_condition, resolve_order

__all__ = [
    "Condition",
    "Predicate",
    "Rendered",
    "UnsupportedError",
    "WhereColumn",
    "compile_condition",
    "parse_condition",
    "parse_order",
    "render_condition",
    "render_order",
    "resolve_condition",
    "resolve_order",
]
