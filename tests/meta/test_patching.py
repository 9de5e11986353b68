"""Nothing in the package changes other modules, classes of others, or the `forward` of a user's model."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "clearhead").rglob("*.py"))

ALLOWED = {
    # Functions of other libraries that fail on tensors without data, restored after the block.
    "clearhead/_core/torch_compat.py": ["setattr(module, name, replacement)", "setattr(module, name, original)"],
    # The command line owns its process: closed streams, and the hook of `warnings`.
    "clearhead/cli/output.py": [
        "warnings.showwarning = show",
        "setattr(sys, name, open(os.devnull, 'w', encoding='utf-8'))",
    ],
    # A worker process that tokenizes owns its environment.
    "clearhead/data/shards.py": ["os.environ['TOKENIZERS_PARALLELISM'] = 'false'"],
    # Copies of a split and of a checked module.
    "clearhead/data/batch.py": ["setattr(other, name, getattr(self, name).to(device))"],
    "clearhead/analysis/checks/properties/invariance.py": ["setattr(part, name, 0.0)"],
    # Attributes of a layer, restored after the block.
    "clearhead/explorer/intervention_panel.py": ["stack.callback(setattr, layer, 'normalizer', layer.normalizer)"],
    "clearhead/nn/apply_mask.py": [
        "stack.callback(setattr, module, '_compiled_call_impl', module._compiled_call_impl)"
    ],
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
    while True:
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "vars" and node.args:
            node = node.args[0]
        else:
            break
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
    """Return the statements of a file that assign into imported names or their items, or replace a `forward`.

    `setattr` and `delattr` count with any object, because it may be a module."""
    tree = ast.parse(source)
    imported = imported_names(tree)
    statements = []
    for node in ast.walk(tree):
        for target in assigned_targets(node):
            if not isinstance(target, (ast.Attribute, ast.Subscript)):
                continue
            is_own = isinstance(target.value, ast.Name) and target.value.id == "self"
            is_forward = isinstance(target, ast.Attribute) and target.attr == "forward" and not is_own
            if root_name(target) in imported or is_forward:
                statements.append(ast.unparse(node))
        if isinstance(node, ast.Call):
            names = [ast.unparse(node.func), *(ast.unparse(argument) for argument in node.args[:1])]
            if any(name in ("setattr", "delattr") for name in names):  # also stack.callback(setattr, module, …)
                statements.append(ast.unparse(node))
    return statements


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_module_changes_no_imported_names(path):
    assert patches(path.read_text(encoding="utf-8")) == ALLOWED.get(str(path.relative_to(ROOT)), [])


@pytest.mark.parametrize(
    "source",
    [
        "import torch.nn.functional as F\nF.gelu = None",
        "import torch\ntorch.nn.Module.forward = None",
        "from a import B\ndel B.x",
        "from a import B\nB.count += 1",
        "import a\nx, a.b = 1, 2",
        "import sys\nsys.modules['a'] = None",
        "import a\nvars(a)['b'] = 1",
        "import a\na.__dict__['b'] = 1",
        "import a\nsetattr(a, 'name', 1)",
        "import a\nstack.callback(setattr, a, 'name', 1)",
        "block.forward = None",
        "del block.forward",
        "setattr(block, 'forward', None)",
        "for module in sys.modules.values(): setattr(module, name, None)",
        "delattr(block, 'x')",
    ],
)
def test_patches_finds_assignments_into_imported_names(source):
    assert len(patches(source)) == 1


@pytest.mark.parametrize("source", ["self.forward = None", "x = 1", "import a\nb = a.c\nself.a = a"])
def test_patches_ignores_assignments_to_own_names(source):
    assert patches(source) == []
