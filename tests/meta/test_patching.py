"""Nothing in the package changes other modules, classes of others, or the `forward` of a user's model."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "clearhead").rglob("*.py"))

ALLOWED = {
    "clearhead/_core/torch_compat.py": "functions of other libraries that fail on tensors without data, restored",
    "clearhead/cli/output.py": "the command line owns its process: closed streams, and the hook of `warnings`",
}


def imported_names(tree: ast.Module) -> set[str]:
    """Return the names that import statements bind, at any depth."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return names


def root_name(node: ast.expr) -> str:
    """Return the first name of a dotted expression, such as "torch" of torch.nn.functional."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def assigned_targets(node: ast.AST) -> list[ast.expr]:
    """Return the targets of an assignment or deletion, with the items of tuples."""
    targets: list[ast.expr] = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        targets = list(node.targets)
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        targets = [node.target]
    flat: list[ast.expr] = []
    while targets:
        target = targets.pop()
        if isinstance(target, (ast.Tuple, ast.List)):
            targets += target.elts
        else:
            flat.append(target)
    return flat


def patches(source: str) -> list[str]:
    """Return the statements of a file that assign into imported names, or replace a `forward`."""
    tree = ast.parse(source)
    imported = imported_names(tree)
    statements = []
    for node in ast.walk(tree):
        for target in assigned_targets(node):
            if not isinstance(target, ast.Attribute):
                continue
            is_own_forward = isinstance(target.value, ast.Name) and target.value.id == "self"
            if root_name(target) in imported or (target.attr == "forward" and not is_own_forward):
                statements.append(f"line {target.lineno}: {ast.unparse(node)}")
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("setattr", "delattr"):
            is_forward = isinstance(node.args[1], ast.Constant) and node.args[1].value == "forward"
            if is_forward or root_name(node.args[0]) in imported:
                statements.append(f"line {node.lineno}: {ast.unparse(node)}")
        if isinstance(node, ast.Call) and len(node.args) > 1:  # stack.callback(setattr, module, …)
            is_deferred = root_name(node.args[0]) in ("setattr", "delattr")
            if is_deferred and root_name(node.args[1]) in imported:
                statements.append(f"line {node.lineno}: {ast.unparse(node)}")
    return statements


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_changes_no_imported_names(path):
    if str(path.relative_to(ROOT)) not in ALLOWED:
        assert patches(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch.nn.functional as F\nF.gelu = None",
        "import torch\ntorch.nn.Module.forward = None",
        "from a import B\ndel B.x",
        "from a import B\nB.count += 1",
        "import a\nx, a.b = 1, 2",
        "import a\nsetattr(a, 'name', 1)",
        "import a\nstack.callback(setattr, a, 'name', 1)",
        "block.forward = None",
        "del block.forward",
        "setattr(block, 'forward', None)",
    ],
)
def test_patches_finds_assignments_into_imported_names(source):
    assert len(patches(source)) == 1


@pytest.mark.parametrize("source", ["self.forward = None", "x = 1", "import a\nb = a.c\nself.a = a"])
def test_patches_ignores_assignments_to_own_names(source):
    assert patches(source) == []
