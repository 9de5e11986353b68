"""Draw the layers of the package from its import graph, as a Mermaid diagram in ARCHITECTURE.md.

python tools/layers.py            # rewrite the diagram
python tools/layers.py --check    # exit with 1 if it is out of date
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "clearhead"
PAGE = ROOT / "ARCHITECTURE.md"
BLOCK = re.compile(r"(<!-- layers -->\n).*?(<!-- /layers -->)", re.DOTALL)


def package_of(path: Path) -> str:
    """Return the top-level package or module that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """Return the top-level packages that a file imports, at any depth of the file."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "clearhead":
            modules |= {f"clearhead.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    packages = {module.split(".")[1] for module in modules if module.startswith("clearhead.")}
    return {name for name in packages if (PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file()}


def import_graph() -> dict[str, set[str]]:
    """Return for each top-level package the packages that it imports."""
    graph: dict[str, set[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path != PACKAGE / "__init__.py":
            graph.setdefault(package_of(path), set()).update(imports_of(path) - {package_of(path)})
    graph.pop("_version", None)
    return {name: targets - {"_version"} for name, targets in graph.items()}


def without_implied_edges(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """Return the transitive reduction of an acyclic graph: edges that a longer path implies are left out."""

    def reachable(name: str) -> set[str]:
        targets = graph.get(name, set())
        return targets.union(*(reachable(target) for target in targets)) if targets else set()

    return {
        name: {target for target in targets if not any(target in reachable(other) for other in targets - {target})}
        for name, targets in graph.items()
    }


def mermaid(graph: dict[str, set[str]]) -> str:
    """Return the diagram; an arrow means "imports"."""
    edges = [f"    {name} --> {target}" for name in sorted(graph) for target in sorted(graph[name])]
    return "\n".join(["```mermaid", "flowchart TD", *edges, "```", ""])


def main() -> None:
    """Rewrite or check the diagram."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--check", action="store_true", help="only report whether the diagram is up to date")
    options = parser.parse_args()
    diagram = mermaid(without_implied_edges(import_graph()))
    text = PAGE.read_text(encoding="utf-8")
    updated = BLOCK.sub(lambda match: match[1] + diagram + match[2], text)
    if options.check:
        sys.exit(updated != text)
    PAGE.write_text(updated, encoding="utf-8")


if __name__ == "__main__":
    main()
