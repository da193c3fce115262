"""Random states as Megatron keeps them, put back and drawn from."""

import random
from typing import Any

import numpy as np
import torch


def set_random(states: dict[str, Any]) -> None:
    from megatron.core import tensor_parallel

    random.setstate(states["random_rng_state"])
    np.random.set_state(states["np_rng_state"])
    torch.set_rng_state(states["torch_rng_state"])
    torch.cuda.set_rng_state(states["cuda_rng_state"])
    assert states["rng_tracker_states"]
    tensor_parallel.get_cuda_rng_tracker().set_states(states["rng_tracker_states"])


def draws() -> dict[str, list[float]]:
    return {
        "random": [random.random(), random.random()],
        "numpy": [float(item) for item in np.random.rand(2)],
        "torch": torch.rand(2).tolist(),
    }
