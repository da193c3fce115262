"""The fixtures' model under megatron-core's own Megatron-FSDP, loaded by ``megatron.training`` of 0.19."""

from typing import Any

import torch

from hp_muon_plugin.config.data_parallel import MegatronFsdp
from hp_muon_plugin.config.trainer import Topology
from hp_muon_plugin.train.setup import Launch
from lane import upstream_runs
from lane.harness import dense, start, train_config
from lane.upstream_model import model_of, optimizer_of, schedule_of
from lane.upstream_runs import MICRO_BATCH, Load, Outcome, Run, arguments, sha256


class FsdpRun(Run):
    """Megatron's objects of a rank; its optimizer is torch's, as that of the fixtures.

    Args:
        launch: This rank.
        body: Describes the run.
    """

    def __init__(self, launch: Launch, body: dict[str, Any]) -> None:
        from megatron.core import parallel_state
        from megatron.core.transformer.module import Float16Module

        from hp_muon_plugin.megatron.megatron_fsdp import wrap_in_megatron_fsdp

        start(launch, train_config(dense(), Topology(ep=body["ep"])))
        self.body, self.mpu = {**body, "distributed_optimizer": True}, parallel_state
        self.inner = model_of(self.body)
        module = Float16Module(self.inner.config, self.inner)
        self.model = wrap_in_megatron_fsdp(self.inner.config, module, MegatronFsdp())
        self.optimizer = optimizer_of(self.body, self.model, 1.0)
        self.schedule = schedule_of(self.body, self.optimizer)
        self.increment = MICRO_BATCH * launch.world_size

    def complete(self) -> None:
        """State where a rank has nothing of a parameter: torch makes none, and the loader asks all ranks for it."""
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for group in part.optimizer.param_groups:
                for param in group["params"]:
                    state = part.optimizer.state[param]
                    if not state:
                        state["step"] = torch.tensor(1.0)
                        state |= {kind: torch.zeros_like(param) for kind in ("exp_avg", "exp_avg_sq")}

    def load(self, load: Load) -> None:
        """``load_checkpoint`` itself."""
        self.schedule.num_steps = 0
        upstream_runs._load_by_training(self, load)

    def weights(self) -> dict[str, Any]:
        """None: they lie in buffers that are given up after use. The masters are in the state."""
        return {}

    def state(self) -> list[Any]:
        """What the optimizers hold of this rank."""
        found: list[Any] = []
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for group in part.optimizer.param_groups:
                found.append({key: value for key, value in group.items() if key != "params"})
                for param in group["params"]:
                    kinds = part.optimizer.state[param].items()
                    found.append({"main": sha256(_local(param)), **{key: sha256(_local(one)) for key, one in kinds}})
        return found


def _local(tensor: Any) -> Any:
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor.detach() if isinstance(tensor, torch.Tensor) else tensor


def fsdp_outcome(launch: Launch, body: dict[str, Any], load: Load) -> Outcome:
    """Load a checkpoint and train on; a process loads once, as Megatron-FSDP does not free twice what it loaded into.

    Args:
        launch: This rank.
        body: Describes the run.
        load: What to load.
    """
    run = FsdpRun(launch, body)
    upstream_runs.arguments = _arguments
    run.step(0)  # makes state, which is not what any checkpoint has
    run.complete()
    return run.outcome(load)


def _arguments(body: dict[str, Any], load: Load) -> Any:
    args = arguments(body, load)
    values = {"ckpt_format": "fsdp_dtensor", "use_megatron_fsdp": True, "use_dist_ckpt": False, "swiglu": True}
    values |= {"num_experts": 4 if body["arch"].startswith("moe") else None}
    values |= {"data_parallel_sharding_strategy": "optim_grads_params", "ckpt_assume_constant_structure": False}
    vars(args).update(values)
    return args
