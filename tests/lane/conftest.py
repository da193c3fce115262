import pytest


@pytest.fixture(autouse=True)
def _megatron(megatron_on_cpu: str) -> None:
    """Every test of this folder runs against real megatron-core on CPU."""
