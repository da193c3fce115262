"""The schemas in Hydra's ConfigStore."""

from typing import Any

import pytest
from hydra.core.config_store import ConfigStore

from hp_muon_plugin.config.store import register_schemas


def test_a_second_registration_stores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra's plugin registers, and the command too: Hydra 1.4 warned nine times at every start."""
    stored: list[str] = []
    store = ConfigStore.store

    def counted(self: ConfigStore, **options: Any) -> None:
        stored.append(options["name"])
        store(self, **options)

    monkeypatch.setattr(ConfigStore, "store", counted)
    monkeypatch.setattr(ConfigStore.instance(), "repo", {})
    register_schemas()
    assert len(stored) == len(set(stored)) > 5
    register_schemas()
    assert len(stored) == len(set(stored))
    assert ConfigStore.instance().load("optimizer/hp_muon_schema.yaml").provider == "hp_muon_plugin"
