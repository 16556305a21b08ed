"""Finds 32-bit products that become addresses.

A program id or a loaded number times a stride can pass 2^31, and Triton multiplies in 32 bits unless one factor is
cast to int64 first. An index is taken as small where it is within a tile (`tl.arange`), a remainder, or compared with
constants known at compile time; a small index times a stride stays within one row, head or tile.
"""

from __future__ import annotations

import ast
import enum
from collections.abc import Iterator

Place = tuple[int, str]
# Parts of the names of constants that are sizes of tiles: an index times one of them is an index.
_TILE_SIZES = ("BLOCK", "GROUP", "TILE", "CHUNK")
_PASS_THROUGH = ("minimum", "maximum", "where", "broadcast_to", "expand_dims", "multiple_of", "max_contiguous", "cdiv")


class Width(enum.IntEnum):
    """What is known of a number; the larger one wins where two meet."""

    # No index, or one that stays small.
    SMALL = 0
    # An index in 32 bits without a bound in sight.
    OPEN = 1
    # An open index times a size, in 32 bits.
    PRODUCT = 2
    # 64 bits.
    WIDE = 3


def narrow_products(kernel: ast.FunctionDef, functions: dict[str, ast.FunctionDef]) -> list[Place]:
    """(line, what is wrong) of the products in a kernel; `functions` are all that it may call."""
    walk = _Walk(kernel, functions)
    walk.statements(kernel.body)
    return walk.found


class _Walk:
    """Follows the numbers of one function, in order."""

    def __init__(self, function: ast.FunctionDef, functions: dict[str, ast.FunctionDef], depth: int = 0) -> None:
        self.functions = functions
        self.depth = depth
        self.known: dict[str, Width] = {}
        self.returned = Width.SMALL
        self.found: list[Place] = []
        constants = {
            a.arg
            for a in (*function.args.args, *function.args.kwonlyargs)
            if a.annotation is not None and "constexpr" in ast.unparse(a.annotation)
        }
        self.bounded = set(_compared_with(function, constants))

    def statements(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                self._assign(target, node.value)
        elif isinstance(node, ast.AugAssign):
            self._assign(node.target, ast.copy_location(ast.BinOp(node.target, node.op, node.value), node))
        elif isinstance(node, ast.For):
            widths = [self.width(a) for a in node.iter.args] if isinstance(node.iter, ast.Call) else []
            self._set(node.target, min(max(widths, default=Width.SMALL), Width.OPEN))
            self.statements(node.body)
        elif isinstance(node, (ast.If, ast.While)):
            self.width(node.test)
            self.statements(node.body)
            self.statements(node.orelse)
        elif isinstance(node, ast.Return) and node.value is not None:
            self.returned = max(self.returned, self.width(node.value))
        elif isinstance(node, ast.Expr):
            self.width(node.value)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            widths = [self.width(v) for v in value.elts]
            for t, width in zip(target.elts, widths, strict=True):
                self._set(t, width)
        elif isinstance(target, ast.Tuple):
            width = self.width(value)
            for t in target.elts:
                self._set(t, width)
        else:
            self._set(target, self.width(value))

    def _set(self, target: ast.expr, width: Width) -> None:
        if isinstance(target, ast.Name):
            small = target.id in self.bounded and width < Width.WIDE
            self.known[target.id] = Width.SMALL if small else width

    def width(self, node: ast.expr) -> Width:
        """The width of an expression; what is wrong in it is noted on the way."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id, Width.SMALL)
        if isinstance(node, ast.BinOp):
            return self._binary(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Subscript):
            return self.width(node.value)
        parts = [self.width(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        if isinstance(node, (ast.Compare, ast.BoolOp, ast.Attribute)):
            return Width.SMALL
        return max(parts, default=Width.SMALL)

    def _binary(self, node: ast.BinOp) -> Width:
        left, right = self.width(node.left), self.width(node.right)
        width = max(left, right)
        if isinstance(node.op, ast.Mod):
            return Width.WIDE if width == Width.WIDE else Width.SMALL
        if isinstance(node.op, (ast.FloorDiv, ast.RShift)):
            return min(left, Width.OPEN) if left < Width.WIDE else left
        if isinstance(node.op, ast.Mult) and Width.OPEN <= width < Width.WIDE:
            other = node.right if left >= right else node.left
            if "stride" in ast.unparse(other).lower():
                return self._narrow(node, "a product")
            if not (isinstance(other, ast.Name) and other.id.startswith(_TILE_SIZES)):
                return Width.PRODUCT
        pointer = _is_pointer(node.left) or _is_pointer(node.right)
        if isinstance(node.op, ast.Add) and width == Width.PRODUCT and pointer:
            return self._narrow(node, "an offset")
        return width

    def _narrow(self, node: ast.BinOp, what: str) -> Width:
        """Note it once: what is made of it counts as small."""
        self.found.append((node.lineno, f"{ast.unparse(node)}: {what} in 32 bits; cast the index to int64"))
        return Width.SMALL

    def _call(self, node: ast.Call) -> Width:
        widths = [self.width(a) for a in (*node.args, *(k.value for k in node.keywords))]
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        if name == "to" and isinstance(node.func, ast.Attribute):
            widths.append(self.width(node.func.value))
        if name in ("to", "cast"):
            return Width.WIDE if "int64" in ast.unparse(node) else max(widths)
        if name in ("program_id", "load"):
            return Width.OPEN
        if name in self.functions and self.depth < 4:
            return self._inside(self.functions[name], node)
        return max(widths, default=Width.SMALL) if name in _PASS_THROUGH else Width.SMALL

    def _inside(self, function: ast.FunctionDef, call: ast.Call) -> Width:
        """The width of what a function returns for these arguments, and what is wrong in it for them."""
        walk = _Walk(function, self.functions, self.depth + 1)
        names = [a.arg for a in function.args.args]
        given = [*zip(names, call.args, strict=False), *((k.arg or "", k.value) for k in call.keywords)]
        walk.known = {name: self.width(value) for name, value in given}
        walk.statements(function.body)
        self.found += [(call.lineno, f"in {function.name}, called here: {what}") for _, what in walk.found]
        return walk.returned


def _is_pointer(node: ast.expr) -> bool:
    """Whether an expression has a name of a pointer as a term."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _is_pointer(node.left) or _is_pointer(node.right)
    return isinstance(node, ast.Name) and node.id.endswith(("_ptr", "_ptrs"))


def _compared_with(function: ast.FunctionDef, constants: set[str]) -> Iterator[str]:
    """Names that are compared with nothing but constants."""
    for node in ast.walk(function):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Lt, ast.LtE)):
            names = {n.id for n in ast.walk(node.comparators[0]) if isinstance(n, ast.Name)}
            if isinstance(node.left, ast.Name) and names and names <= constants:
                yield node.left.id
