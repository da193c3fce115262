"""Ways of tensor-parallel matrices, over shards: training gives the weights of one process."""

from typing import Any

import pytest
import torch
from dist_pool import run_ranks

from hp_muon_plugin.config.choices import TensorParallelMode
from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import Topology
from hp_muon_plugin.train.setup import Launch
from lane.harness import build, dense, train, train_config, whole_weights
from lane.test_layout_parity import STEPS, TOLERANCE, reference, relative

pytestmark = pytest.mark.once


def _run(launch: Launch, mode: TensorParallelMode) -> dict[str, Any]:
    optimizer = HpMuon(lr=5e-3, weight_decay=0.1, tp_mode=mode)
    topology = Topology(tp=2, sequence_parallel=True)
    ready = train(build(launch, train_config(dense(), topology, dp=HpFsdp(), optimizer=optimizer)), STEPS)
    return {"weights": whole_weights(ready), "losses": ready.losses}


@pytest.mark.parametrize("mode", [TensorParallelMode.distributed, TensorParallelMode.owner])
def test_weights_after_20_steps_equal_the_float64_reference(mode: TensorParallelMode) -> None:
    wanted, got = reference("dense"), run_ranks(4, _run, mode)[0]
    torch.testing.assert_close(torch.tensor(got["losses"]), torch.tensor(wanted["losses"]), rtol=1e-5, atol=1e-5)
    worst = max((relative(got["weights"][n], wanted["weights"][n]), n) for n in wanted["weights"])
    assert worst[0] < TOLERANCE, worst
