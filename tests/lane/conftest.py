from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _megatron(megatron_on_cpu: str) -> Iterator[None]:
    """Every test of this folder runs against real megatron-core on CPU, and begins without hooks."""
    from hp_muon_plugin.megatron import uninstall

    uninstall()
    yield
    uninstall()
