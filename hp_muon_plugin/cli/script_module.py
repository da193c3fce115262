"""Finding the module of ``-m`` without importing anything of it."""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec

from hp_muon_plugin.errors import ConfigError


def find_module(name: str) -> ModuleSpec:
    """Find a module without importing its packages, which must not happen before the hooks are in place.

    Args:
        name: Dotted name.

    Returns:
        What would run: of a package its ``__main__``.

    Raises:
        ConfigError: If there is none.
    """
    places: Sequence[str] | None = None
    found = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        found = _spec(".".join(parts[:count]), places)
        if found is None or (found.submodule_search_locations is None and count < len(parts)):
            raise ConfigError("-m", name, "there is no such module", "give a module that Python finds from here")
        places = found.submodule_search_locations
    if places is not None:
        found = _spec(f"{name}.__main__", places)
    if found is None:
        raise ConfigError("-m", name, "is a package without __main__", f"name a module in it, as {name}.train")
    return found


def _spec(name: str, places: Sequence[str] | None) -> ModuleSpec | None:
    """As ``importlib.util.find_spec``, which would import the packages above. Not only from paths."""
    specs = (finder.find_spec(name, places) for finder in sys.meta_path)
    return next((spec for spec in specs if spec is not None), None)
