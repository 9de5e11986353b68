"""The package declares what it imports, and `import clearhead` needs little."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
# Names of modules that differ from those of their packages.
PACKAGES = {"sklearn": "scikit-learn", "PIL": "pillow", "markdown_it": "markdown-it-py"}
OPTIONAL_IN_TESTS = {"jaxtyping", "triton", "transformers"}  # of the extras dev and peers


def package_names(requirements):
    return {re.split(r"[^\w-]", requirement)[0].replace("_", "-") for requirement in requirements} - {"clearhead"}


def imported_modules():
    """Return the top-level modules that the package imports, with a file of each."""
    modules = {}
    for file in sorted((ROOT / "clearhead").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names = [node.module]
            modules |= {name.split(".")[0]: file for name in names}
    return modules


def test_core_dependencies_are_torch_numpy_and_safetensors():
    assert package_names(PROJECT["dependencies"]) == {"torch", "numpy", "safetensors"}


def test_every_import_is_declared():
    declared = package_names(PROJECT["dependencies"])
    for name, requirements in PROJECT["optional-dependencies"].items():
        if name not in ("dev", "peers", "docs", "browser"):
            declared |= package_names(requirements)
    modules = {name: file for name, file in imported_modules().items() if name not in sys.stdlib_module_names}
    undeclared = {
        name: str(file.relative_to(ROOT))
        for name, file in modules.items()
        if PACKAGES.get(name, name).replace("_", "-") not in declared | OPTIONAL_IN_TESTS | {"clearhead"}
    }
    assert undeclared == {}


def test_extra_all_contains_the_extras_of_users():
    extras = PROJECT["optional-dependencies"]
    (requirement,) = extras["all"]
    names = set(re.search(r"\[(.+)]", requirement)[1].split(","))
    assert names == set(extras) - {"all", "dev", "docs", "browser", "peers", "tensorboard"}
    messages = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "clearhead").rglob("*.py"))
    assert set(re.findall(r"clearhead\[(\w+)]\'", messages)) <= set(extras)


def test_description_on_pypi_has_urls_for_images_and_links():
    hook = PYPROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    assert [fragment["path"] for fragment in hook["fragments"]] == ["README.md"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    paths = re.findall(r"\]\(([^)#]+)\)", text)
    for substitution in hook["substitutions"]:
        text = re.sub(substitution["pattern"], substitution["replacement"], text)
    source = PROJECT["urls"]["Source"]
    raw = source.replace("github.com", "raw.githubusercontent.com")
    images, links = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text), re.findall(r"(?<!!)\[[^\]]*\]\(([^)]+)\)", text)
    assert len(images) > 1
    assert len(images) + len(links) == len(paths)
    images += re.findall(r'src(?:set)?="([^"]+)"', text)
    assert all(image.startswith(f"{raw}/main/") for image in images)
    assert all(link.startswith(f"{source}/blob/main/") for link in links)
    assert all((ROOT / url.partition("/main/")[2]).is_file() for url in images)
    assert all(url.startswith(source) for url in PROJECT["urls"].values())
