"""A rank of ``hp-muon bench optimizer`` in an interpreter that this package is not installed in.

Run as a file. The package is found where this file lies, and nothing else of its environment is: the peer's
own torch and libraries are used.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    sys.path.pop(0)  # this file's folder: its neighbours are no top-level modules
    spec = importlib.util.spec_from_file_location(
        "hp_muon_plugin", root / "__init__.py", submodule_search_locations=[str(root)]
    )
    assert spec is not None
    assert spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["hp_muon_plugin"] = package
    spec.loader.exec_module(package)
    importlib.import_module("hp_muon_plugin.bench.opt_rank").main()
