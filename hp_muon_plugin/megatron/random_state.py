"""Random states of one rank: Python's, numpy's, torch's, the device's, and Megatron's tracker."""

import random
from typing import Any

import numpy as np
import torch


def take_random_state(device: torch.device) -> dict[str, Any]:
    """Random state of this rank.

    Args:
        device: Where the model lives.

    Returns:
        Plain values and tensors.
    """
    from megatron.core import tensor_parallel

    kind, keys, position, has_gauss, gauss = np.random.get_state()
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": {
            "kind": str(kind),
            "keys": torch.from_numpy(np.asarray(keys, dtype=np.uint32).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(gauss),
        },
        "torch": torch.get_rng_state(),
        "tracker": {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in tensor_parallel.get_cuda_rng_tracker().get_states().items()
        },
    }
    if device.type != "cpu":
        state["device"] = getattr(torch, device.type).get_rng_state()
    return state


def put_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Go on from a random state. Nothing may draw before training does.

    Args:
        state: From :func:`take_random_state` of the same rank of an equal run.
        device: Where the model lives.
    """
    from megatron.core import tensor_parallel

    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    saved = state["numpy"]
    keys = saved["keys"].numpy().astype(np.uint32)
    np.random.set_state((saved["kind"], keys, saved["position"], saved["has_gauss"], saved["gauss"]))
    torch.set_rng_state(state["torch"])
    tracker = tensor_parallel.get_cuda_rng_tracker()
    tracker.set_states(dict(state["tracker"]))
    if device.type != "cpu" and "device" in state:
        getattr(torch, device.type).set_rng_state(state["device"])
