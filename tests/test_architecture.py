"""Imports point one way, and the package imports fast."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "paceline"

MAY_IMPORT: dict[str, set[str]] = {
    "sampling": set(),
    "models": {"kernels"},
    "kernels": set(),
    "checkpoints": {"models", "kernels"},
    "proposers": {"sampling", "models"},
    "decoding": {"sampling", "models", "proposers"},
    "engine": {"sampling", "models", "checkpoints", "proposers", "decoding"},
    "evaluation": {"sampling", "models", "checkpoints", "proposers", "decoding", "engine"},
    "training": {"sampling", "models", "kernels", "checkpoints", "proposers", "decoding", "engine"},
}
"""What each part may import of its siblings; the command line may import everything, lazily."""

FORBIDDEN = {
    "paceline/checkpoints/resolve.py": {"torch", "transformers"},
    "paceline/checkpoints/tokenizer.py": {"torch", "transformers"},
    "paceline/decoding/stats.py": {"torch"},
    "paceline/sampling/params.py": {"torch"},
    "paceline/cli.py": {"torch", "transformers"},
}
"""What a module may not import when it is imported itself (inside functions it may)."""


def imports(path: Path, *, top_level: bool = False) -> set[str]:
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("path", sorted(ROOT.glob("*/**/*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_part_imports_only_what_lies_below_it(path: Path) -> None:
    part = path.relative_to(ROOT).parts[0]
    for name in imports(path):
        if name == "paceline" or name.startswith("paceline."):
            sibling = name.split(".")[1] if "." in name else ""
            assert sibling == part or sibling in MAY_IMPORT[part], f"{path} imports {name}"


@pytest.mark.parametrize("path", FORBIDDEN)
def test_light_modules_import_nothing_heavy(path: str) -> None:
    roots = {name.split(".")[0] for name in imports(ROOT.parent / path, top_level=True)}
    assert not roots & FORBIDDEN[path]


@pytest.mark.parametrize(
    "statement",
    [
        "import paceline",
        "from paceline import SamplingParams",
        "import paceline.cli",
        "import paceline.checkpoints.resolve",
        "import paceline.checkpoints.tokenizer",
    ],
)
def test_importing_brings_neither_torch_nor_transformers(statement: str) -> None:
    code = f"import sys; {statement}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_every_public_name_can_be_had() -> None:
    import paceline

    for name in paceline.__all__:
        assert getattr(paceline, name) is not None
    with pytest.raises(AttributeError):
        paceline.nothing  # noqa: B018
