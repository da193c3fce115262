"""megatron-core's own model on any mesh, with DistributedOptimizer: trained, saved by its own code, and loaded again.

As upstream_runs.py, which is for the fixtures' model on data and expert ranks; here are tensor, pipeline and virtual
stages, uneven ones, and multi-token prediction. The plugin builds the chunks and takes no other part.
"""

import argparse
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hp_muon_plugin.config.choices import Precision
from hp_muon_plugin.config.optimizer import AdamW
from hp_muon_plugin.config.trainer import Model, Train
from hp_muon_plugin.megatron.versions import core_version
from hp_muon_plugin.train.setup import Launch
from lane.combos import build_chunk, core_config, model_options
from lane.fused_adam import use_fused_adam
from lane.harness import SEQ, batches, start, train_config
from lane.upstream_mesh import Mesh
from lane.upstream_runs import sha256

BATCH = 8


class Parallel:
    """Megatron's objects of a rank.

    Args:
        launch: This rank.
        mesh: What to build.
    """

    distributed = True

    def __init__(self, launch: Launch, mesh: Mesh) -> None:
        from megatron.core import parallel_state

        self.mesh, self.mpu = mesh, parallel_state
        options: Model = model_options(mesh.features)
        options.num_layers = mesh.layers
        options.tie_embeddings = mesh.tied
        self.config: Train = train_config(
            options, mesh.sizes, optimizer=AdamW(), precision=Precision.bf16, global_batch=BATCH
        )
        more: dict[str, Any] = {"virtual_pipeline_model_parallel_size": 2} if "vpp" in mesh.features else {}
        if mesh.layout:  # as Megatron's trainer, for multi-token prediction on a stage between the first and the last
            more["get_embedding_ranks"] = list
        parallel_state.initialize_model_parallel = functools.partial(parallel_state.initialize_model_parallel, **more)
        start(launch, self.config)
        self._build()
        self.optimizer = self._optimizer()

    def _build(self) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.transformer.module import Float16Module

        core = core_config(self.mesh.features, self.config)
        core.num_layers_in_first_pipeline_stage = self.mesh.first
        if self.mesh.layout:
            from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

            layout = PipelineParallelLayerLayout.from_str(self.mesh.layout, self.mesh.sizes.pp)
            core.pipeline_model_parallel_layout = layout
            core.mtp_standalone = layout.validate_layer_layout(self.mesh.layers, core.mtp_num_layers)
        places = range(2 if "vpp" in self.mesh.features else 1)
        self.chunks = [build_chunk(core, self.config, self.mesh.features, place) for place in places]
        many = self.mesh.bucket_size is not None
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=self.distributed,
            overlap_grad_reduce=many,
            bucket_size=self.mesh.bucket_size,
        )
        self.models = [
            DistributedDataParallel(core, ddp, Float16Module(core, chunk), disable_bucketing=place > 0)
            for place, chunk in enumerate(self.chunks)
        ]
        if many:
            no_sync = [model.no_sync for model in self.models]
            core.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def options(self, **more: Any) -> Any:
        """Of an optimizer."""
        from megatron.core.optimizer import OptimizerConfig

        values = {"lr": 3e-3, "min_lr": 1e-3, "weight_decay": 0.1, "adam_beta2": 0.95, "clip_grad": 1.0, "bf16": True}
        return OptimizerConfig(**{**values, "params_dtype": torch.bfloat16, **more})

    def _optimizer(self) -> Any:
        from megatron.core import optimizer as factory

        use_fused_adam()
        options = self.options(optimizer="adam", use_distributed_optimizer=True)
        return factory.get_megatron_optimizer(options, self.models)

    def train(self, steps: int, first_step: int = 0) -> list[float]:
        """Losses of some steps, the same samples on every mesh."""
        return [self._step(number) for number in range(first_step, first_step + steps)]

    def _step(self, number: int) -> float:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        size, rank = self.mpu.get_data_parallel_world_size(), self.mpu.get_data_parallel_rank()
        stream = batches(self.config, rank, size, first_step=number)
        mask = torch.triu(torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool), diagonal=1)

        def forward(rows: Iterator[Any], model: Any) -> Any:
            row = next(rows)
            losses = model(row.tokens, row.position_ids, mask, labels=row.labels)
            return losses, lambda values: (values.float().mean(), {"loss": values.detach().float().mean()})

        rows = [next(stream) for _ in range(BATCH // size)]
        for model in self.models:
            model.zero_grad_buffer()
        self.optimizer.zero_grad()
        reduced = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(rows) for _ in self.models] if len(self.models) > 1 else iter(rows),
            model=self.models if len(self.models) > 1 else self.models[0],
            num_microbatches=BATCH // size,
            seq_length=SEQ,
            micro_batch_size=1,
            forward_only=False,
        )
        self.optimizer.step()
        total = torch.tensor([sum(float(entry["loss"]) for entry in reduced), float(len(reduced))], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total[0] / total[1])

    def held(self) -> list[Any]:
        """Hashes of all that this rank has: weights, buffers, masters, moments; values of groups."""
        found: list[Any] = []
        for chunk in self.chunks:
            found.append({name: sha256(tensor) for name, tensor in _held_by(chunk).items()})
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for group in part.optimizer.param_groups:
                found.append({key: value for key, value in group.items() if key not in ("params", "bias_correction")})
                for param in group["params"]:
                    state = part.optimizer.state[param]
                    found.append({"main": sha256(param), **{key: sha256(value) for key, value in state.items()}})
        return found

    def save(self, folder: Path, form: str) -> None:
        """Save in a form of ``torch_dist``, or as ``legacy``."""
        if dist.get_rank() == 0:
            (folder / "iter_0000002").mkdir(parents=True)
            (folder / "latest_checkpointed_iteration.txt").write_text("2")
        dist.barrier()
        if form == "legacy":
            self._save_legacy(folder / "iter_0000002")
        else:
            self._save_dist(folder / "iter_0000002", form)
        dist.barrier()

    def _common(self) -> dict[str, Any]:
        sizes = {"iteration": 2, "data_parallel_size": self.mpu.get_data_parallel_world_size()}
        args = argparse.Namespace(**self.mesh.args, **sizes)
        return {"args": args, "checkpoint_version": 3.0, "iteration": 2}

    def _sharded(self, form: str, *, is_loading: bool) -> dict[str, Any]:
        if core_version().lane < (0, 14):
            how: dict[str, Any] = {"sharding_type": form}
            of_model: dict[str, Any] = {}
        else:
            content = {"distrib_optim_sharding_type": form, "chained_optim_avoid_prefix": True}
            content["singleton_local_shards"] = False  # type: ignore[assignment]
            how = of_model = {"metadata": content}
        keys = ["model"] if len(self.chunks) == 1 else [f"model{place}" for place in range(len(self.chunks))]
        state: dict[str, Any] = {}
        for place, (key, chunk) in enumerate(zip(keys, self.chunks, strict=True)):
            if len(keys) > 1:
                self.mpu.set_virtual_pipeline_model_parallel_rank(place)  # 0.12 asks it for the numbers of layers
            state[key] = chunk.sharded_state_dict(**of_model)
        model = state if len(keys) > 1 else {"model": state["model"]}
        state["optimizer"] = self.optimizer.sharded_state_dict(model, is_loading=is_loading, **how)
        return state

    def refusal(self) -> str:
        """Why a chunk has no sharded keys; empty if all have."""
        how: dict[str, Any] = {} if core_version().lane < (0, 14) else {"metadata": {"singleton_local_shards": False}}
        try:
            for chunk in self.chunks:
                chunk.sharded_state_dict(**how)
        except AssertionError as error:
            return f"AssertionError: {error}"
        return ""

    def _save_dist(self, folder: Path, form: str) -> None:
        from megatron.core import dist_checkpointing

        state = {**self._sharded(form, is_loading=False), **self._common()}
        content = {"content_metadata": {"distrib_optim_sharding_type": form, "chained_optim_avoid_prefix": True}}
        dist_checkpointing.save(state, str(folder), **(content if core_version().lane >= (0, 14) else {}))

    def _folder(self, folder: Path) -> Path:
        sizes = self.mesh.sizes
        name = f"mp_rank_{self.mpu.get_tensor_model_parallel_rank():02d}"
        name += f"_{self.mpu.get_pipeline_model_parallel_rank():03d}" if sizes.pp > 1 else ""
        return folder / (name + (f"_{self.mpu.get_expert_model_parallel_rank():03d}" if sizes.ep > 1 else ""))

    def _save_legacy(self, folder: Path) -> None:
        """As ``save_checkpoint``: the ranks of one expert-data-parallel rank write, the optimizer gathers from all."""
        own = self._folder(folder)
        own.mkdir(exist_ok=True)
        dist.barrier()
        keys = ["model"] if len(self.chunks) == 1 else [f"model{place}" for place in range(len(self.chunks))]
        state = {key: chunk.state_dict_for_save_checkpoint() for key, chunk in zip(keys, self.chunks, strict=True)}
        state["optimizer"] = self.optimizer.state_dict()
        if self.mpu.get_expert_data_parallel_rank() == 0:
            torch.save({**state, **self._common()}, own / "model_optim_rng.pt")
        self._save_state(own)

    def _save_state(self, own: Path) -> None:
        """Save what the optimizer has beside the model's file."""
        self.optimizer.save_parameter_state(str(own / "distrib_optim.pt"))

    def _load_state(self, own: Path, saved: dict[str, Any]) -> None:
        """Load what :meth:`_save_state` or a conversion wrote."""
        self.optimizer.load_state_dict(saved["optimizer"])
        self.optimizer.load_parameter_state(str(own / "distrib_optim.pt"))

    def load(self, folder: Path, form: str) -> None:
        """Load what :meth:`save` or a conversion wrote."""
        from megatron.core import dist_checkpointing

        folder = folder / "iter_0000002"
        if form == "legacy":
            own = self._folder(folder)
            saved = torch.load(own / "model_optim_rng.pt", map_location="cpu", weights_only=False)
        else:
            saved = dist_checkpointing.load(
                self._sharded(form, is_loading=True), str(folder), strict="assume_ok_unexpected"
            )
        for place, chunk in enumerate(self.chunks):
            chunk.load_state_dict(saved["model" if len(self.chunks) == 1 else f"model{place}"], strict=True)
        if form == "legacy":
            self._load_state(own, saved)
        else:
            self.optimizer.load_state_dict(saved["optimizer"])

    def unlike(self, folder: Path, form: str, had: list[Any], losses: list[float], later: list[Any]) -> list[str]:
        """Spoil everything, load, and train one step more.

        Args:
            folder: The checkpoint.
            form: Its form.
            had: What was held when it was saved.
            losses: Of the step after.
            later: What was held then.

        Returns:
            What is not as it was.
        """
        self.spoil()
        self.load(folder, form)
        wrong = [] if self.held() == had else ["as loaded"]
        wrong += [] if self.train(1, 2) == losses else ["losses"]
        return wrong + ([] if self.held() == later else ["a step later"])

    def spoil(self) -> None:
        """Make everything wrong, so that what is right later was loaded."""
        for chunk in self.chunks:
            for tensor in _held_by(chunk).values():
                tensor.data.fill_(9)
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            for group in part.optimizer.param_groups:
                group["step"], group["lr"] = 77, 77.0
                for param in group["params"]:
                    for tensor in (param.data, *part.optimizer.state[param].values()):
                        tensor.fill_(9)


def _held_by(chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    held = {**dict(chunk.named_parameters()), **dict(chunk.named_buffers())}
    return {name: tensor for name, tensor in held.items() if "local_tokens" not in name}
