"""Megatron's own model, wrapper, optimizer and loading code for the fixtures' model, on forked ranks.

Nothing of the plugin takes part: megatron-core builds, loads and trains. Where its package has ``megatron.training``
(0.19), that loads; elsewhere the few lines below do what its ``load_checkpoint`` of that version does.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hp_muon_plugin.config.choices import PlatformName
from hp_muon_plugin.config.trainer import Topology
from hp_muon_plugin.megatron.versions import core_version
from hp_muon_plugin.platform.base import choose
from hp_muon_plugin.train import setup
from hp_muon_plugin.train.setup import Launch
from lane.fused_adam import FusedAdam, use_fused_adam
from lane.upstream_model import SEQ, VOCAB, model_of, optimizer_of, schedule_of, wrapped_of
from lane.upstream_random import draws, set_random

STEPS = 2
MICRO_BATCH = 2


@dataclass(frozen=True, slots=True)
class Load:
    """A checkpoint to load.

    Attributes:
        folder: With the tracker file and ``iter_*``.
        is_legacy: Whether it is ``mp_rank_*`` folders.
        random: Whether random states are loaded too.
    """

    folder: Path
    is_legacy: bool
    random: bool = True


@dataclass(slots=True)
class Outcome:
    """What one rank had after loading and after training on. Tensors are SHA-256 of their bytes.

    Attributes:
        weights: Weights and buffers by canonical name, as loaded.
        state: Masters, moments, steps and values of groups, as loaded.
        draws: Next numbers of each generator, where random states were loaded.
        losses: Of the steps that followed.
        later: Weights, buffers and state after them.
    """

    weights: dict[str, str]
    state: list[Any]
    draws: dict[str, list[float]]
    losses: list[float]
    later: list[Any]


def outcomes(launch: Launch, body: dict[str, Any], loads: list[Load], clip: float = 1.0) -> list[Outcome]:
    """Load one checkpoint after the other into the same model, and train on from each.

    Args:
        launch: This rank.
        body: ``truth.json`` of the fixture, which describes the run.
        loads: What to load.
        clip: Norm to clip gradients by.
    """
    run = Run(launch, body, clip)
    if core_version().lane < (0, 14) and body["arch"].startswith("moe"):
        run.step(0)  # until a forward pass the router's bias is of the weights' dtype, and loading rounds it
    return [run.outcome(load) for load in loads]


class Run:
    """Megatron's objects of a rank.

    Args:
        launch: This rank.
        body: Describes the run.
        clip: Norm to clip gradients by.
        adam: Its class; a fused one for distributed optimizers and else torch's if it is not given.
    """

    def __init__(
        self, launch: Launch, body: dict[str, Any], clip: float = 1.0, adam: type[torch.optim.Optimizer] | None = None
    ) -> None:
        from megatron.core import parallel_state

        setup.start_ranks(choose(PlatformName.cpu), Topology(ep=body["ep"], timeout_s=30.0), launch)
        setup.seed_everything(1)
        self.body = body
        self.mpu = parallel_state
        if adam is None and (body["distributed_optimizer"] or body.get("lw_layout")):
            adam = FusedAdam
        if adam is not None:
            use_fused_adam(adam)
        self.inner = model_of(body)
        self.model = wrapped_of(body, self.inner)
        self.optimizer = optimizer_of(body, self.model, clip)
        if body["layer_wise"] and not body.get("lw_layout"):  # its own, without the uneven lists that gloo refuses
            self.optimizer.allgather_params = self.optimizer.broadcast_params
        self.schedule, self.increment = schedule_of(body, self.optimizer), MICRO_BATCH * dist.get_world_size()

    def outcome(self, load: Load) -> Outcome:
        """Load, and train on."""
        self.load(load)
        return self.trained(draws() if load.random else {})

    def trained(self, drawn: dict[str, list[float]] | None = None) -> Outcome:
        """Train on from what is there."""
        weights, state = self.weights(), self.state()
        losses = [self.step(number) for number in range(STEPS)]
        return Outcome(weights, state, drawn or {}, losses, [self.weights(), self.state()])

    def load(self, load: Load) -> None:
        """Load as Megatron's trainer does."""
        self.schedule.num_steps = 0
        if core_version().lane >= (0, 19):
            _load_by_training(self, load)
        else:
            _load(self, load)

    def weights(self) -> dict[str, str]:
        """Hashes of weights and buffers by canonical name."""
        return {name: sha256(tensor) for name, tensor in self.held()}

    def held(self) -> list[tuple[str, torch.Tensor]]:
        """Weights and buffers of this rank with their canonical names."""
        held = {**dict(self.inner.named_parameters()), **dict(self.inner.named_buffers())}
        return [(self._name(name), tensor) for name, tensor in held.items() if "local_tokens" not in name]

    def _name(self, name: str) -> str:
        head, found, tail = name.partition(".local_experts.")
        if not found:
            return name
        number, _, rest = tail.partition(".")
        first = self.mpu.get_expert_model_parallel_rank() * 4 // self.body["ep"]
        return f"{head}{found}{first + int(number)}.{rest}"

    def state(self) -> list[Any]:
        """What the optimizers hold of this rank."""
        found: list[Any] = []
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            inner = part.optimizer
            for group in inner.param_groups:
                found.append({key: value for key, value in group.items() if key not in ("params", "bias_correction")})
                for param in group["params"]:
                    found.append(sha256(param))
                    found.append({key: sha256(value) for key, value in inner.state[param].items()})
        return found

    def step(self, number: int) -> float:
        """One optimizer step on random tokens, of which each data rank has its own."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        seed = 100 * number + self.mpu.get_data_parallel_rank()
        tokens = torch.randint(0, VOCAB, (MICRO_BATCH, SEQ + 1), generator=torch.Generator().manual_seed(seed))
        positions = torch.arange(SEQ).expand(MICRO_BATCH, -1)
        mask = torch.triu(torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool), 1)

        def loss_func(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss = output.float().mean()
            return loss, {"loss": loss.detach()}

        def forward(_: Any, model: Any) -> Any:
            return model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]), loss_func

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        (found,) = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=None,
            model=self.model,
            num_microbatches=1,
            seq_length=SEQ,
            micro_batch_size=MICRO_BATCH,
            forward_only=False,
        )
        self.optimizer.step()
        self.schedule.step(increment=self.increment)
        return float(found["loss"])


def sha256(value: Any) -> Any:
    """Hash of a tensor as the fixtures' truth has it; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    tensor = value.detach().contiguous()
    data = tensor.view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype}{tuple(tensor.shape)}".encode() + data).hexdigest()


def _iteration(folder: Path) -> Path:
    return folder / f"iter_{int((folder / 'latest_checkpointed_iteration.txt').read_text()):07d}"


def _load(run: Run, load: Load) -> None:
    """As ``megatron.training.checkpointing`` of 0.12 and 0.16, whose wheels lack it."""
    folder = _iteration(load.folder)
    if load.is_legacy:
        expert = f"_{run.mpu.get_expert_model_parallel_rank():03d}" if run.body["ep"] > 1 else ""
        file = folder / f"mp_rank_00{expert}" / "model_optim_rng.pt"
        saved = torch.load(file, map_location="cpu", weights_only=False)
    else:
        saved = _loaded_shards(run, folder, load.random)
    run.model.load_state_dict(saved["model"], strict=True)
    run.optimizer.load_state_dict(saved["optimizer"])
    if load.is_legacy and run.body["distributed_optimizer"]:
        run.optimizer.load_parameter_state(str(file.with_name("distrib_optim.pt")))
    run.schedule.load_state_dict(saved["opt_param_scheduler"])
    if load.random:
        set_random(saved["rng_state"][0])


def _loaded_shards(run: Run, folder: Path, with_random: bool) -> dict[str, Any]:
    from megatron.core import dist_checkpointing

    state: dict[str, Any] = {}
    if core_version().lane < (0, 14):
        state["model"] = run.inner.sharded_state_dict()
        kind = {"sharding_type": "fully_sharded_model_space"} if run.body["distributed_optimizer"] else {}
        state["optimizer"] = run.optimizer.sharded_state_dict(state, is_loading=True, **kind)
    else:
        common = dist_checkpointing.load_common_state_dict(str(folder))
        metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
        state["model"] = run.inner.sharded_state_dict(metadata=metadata)
        state["optimizer"] = run.optimizer.sharded_state_dict(state, is_loading=True, metadata=metadata)
    if with_random:
        state["rng_state"] = _random_shard(run)
    return dist_checkpointing.load(state, str(folder), strict="assume_ok_unexpected")


def _random_shard(run: Run) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    rank, size = run.mpu.get_data_parallel_rank(), run.mpu.get_data_parallel_world_size()
    if core_version().lane >= (0, 14) and run.body["ep"] > 1:  # 0.16: of every data rank its own
        return ShardedObject("rng_state", [], (1, 1, size), (0, 0, rank), replica_id=0)
    return ShardedObject("rng_state", [], (1, 1), (0, 0), replica_id=rank)


def _load_by_training(run: Run, load: Load) -> None:
    """``megatron.training.checkpointing.load_checkpoint`` itself."""
    from megatron.core.num_microbatches_calculator import (
        init_num_microbatches_calculator,
        unset_num_microbatches_calculator,
    )
    from megatron.training import checkpointing, global_vars

    args = arguments(run.body, load)
    unset_num_microbatches_calculator()
    init_num_microbatches_calculator(0, None, args.global_batch_size, args.micro_batch_size, args.data_parallel_size)
    global_vars.set_args(args)
    checkpointing.set_checkpoint_version.__globals__["_CHECKPOINT_VERSION"] = None
    iteration, _ = checkpointing.load_checkpoint([run.model], run.optimizer, run.schedule)
    assert iteration == run.body["iteration"]


def arguments(body: dict[str, Any], load: Load) -> Any:
    """Megatron's arguments of a run that goes on from a checkpoint."""
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    args = add_megatron_arguments(parser).parse_args([])
    size = dist.get_world_size()
    values = {
        **{"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "add_position_embedding": True},
        **{
            "bf16": body["bf16"],
            "fp16": False,
            "world_size": size,
            "data_parallel_size": size,
            "rank": dist.get_rank(),
        },
        **{"load": str(load.folder), "ckpt_format": "torch" if load.is_legacy else "torch_dist"},
        **{"use_dist_ckpt": not load.is_legacy, "no_load_rng": not load.random, "no_load_optim": False},
        **{"use_distributed_optimizer": body["distributed_optimizer"], "optimizer": body["optimizer"]},
        **{"use_layer_wise_distributed_optimizer": body["layer_wise"], "expert_model_parallel_size": body["ep"]},
        **{"micro_batch_size": MICRO_BATCH, "global_batch_size": MICRO_BATCH * size, "consumed_train_samples": 0},
    }
    vars(args).update(values)
    return args
