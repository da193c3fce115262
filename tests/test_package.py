"""Rules that hold for the whole package."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "hp_muon_plugin"
SOURCES = [path for path in sorted(PACKAGE.rglob("*.py")) if "conf" not in path.relative_to(PACKAGE).parts]


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "module",
    ["hp_muon_plugin", "hp_muon_plugin.megatron", "hp_muon_plugin.muon", "hp_muon_plugin.config.searchpath"],
)
def test_importing_imports_neither_torch_nor_megatron(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'megatron', 'numpy') if m in sys.modules])"
    assert run_python(code) == "[]"


def test_what_hydra_imports_in_every_application_is_cheap() -> None:
    code = (
        "import sys, hydra_plugins.hp_muon_plugin.searchpath as s; "
        "print(s.HpMuonSearchPath.__module__, 'torch' in sys.modules)"
    )
    assert run_python(code) == "hp_muon_plugin.config.searchpath False"
    assert not (PACKAGE.parent / "hydra_plugins" / "__init__.py").exists()


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_source_is_short_ascii_and_prints_only_where_it_may(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.isascii()
    assert len(text.splitlines()) <= 400
    allowed = path.parent.name == "cli"
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    prints = [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
    assert allowed or not prints, prints


def test_version_is_the_one_of_the_distribution() -> None:
    from importlib import metadata

    import hp_muon_plugin

    assert metadata.version("hp_muon_plugin") == hp_muon_plugin.__version__
