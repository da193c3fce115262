"""Every rank needs a device of its own."""

import pytest
import torch

from hp_muon_plugin.errors import PlatformError
from hp_muon_plugin.platform.base import CudaPlatform


@pytest.mark.parametrize("local_rank", [0, 3])
def test_more_ranks_than_devices_are_refused_on_every_rank(local_rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 2 of 4 on two GPUs failed with 'invalid device ordinal' while the others waited for it."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # this machine has none
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(PlatformError, match="4 ranks on this machine and 2 devices") as caught:
        CudaPlatform().prepare(local_rank)
    assert "fix: start 2 ranks here (topology.ranks=2)" in str(caught.value)


def test_as_many_ranks_as_devices_get_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    CudaPlatform().prepare(1)
    assert chosen == [1]
