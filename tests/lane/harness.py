"""Small real models on forked ranks: build, train, and read whole weights back."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist

from hp_muon_plugin.config.choices import PlatformName, Precision
from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.config.trainer import MLA, Data, LrSchedule, Model, MoE, Platform, Run, Topology, Train
from hp_muon_plugin.layout.spec import ParamSpec
from hp_muon_plugin.platform.base import choose
from hp_muon_plugin.train import setup
from hp_muon_plugin.train.data import Batch
from hp_muon_plugin.train.setup import Launch

VOCAB = 120  # padded to 128 with vocab_multiple=32 and tp <= 4
SEQ = 16
GLOBAL_BATCH = 4


def dense(**changes: Any) -> Model:
    values: dict[str, Any] = dict(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=48,
        seq_length=SEQ,
        vocab_multiple=32,
    )
    return Model(**(values | changes))


def moe(**changes: Any) -> Model:
    experts = MoE(num_experts=4, top_k=2, ffn_hidden_size=24, shared_ffn_hidden_size=16)
    return dense(**({"moe": experts} | changes))


def mla(*, v_head_dim: int = 8, **changes: Any) -> Model:
    latent = MLA(q_lora_rank=16, kv_lora_rank=8, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=v_head_dim)
    return moe(**({"mla": latent} | changes))


def train_config(
    model: Model,
    topology: Topology | None = None,
    *,
    optimizer: HpMuon | AdamW | None = None,
    precision: Precision = Precision.fp32,
    steps: int = 20,
    dp: HpFsdp | None = None,
    global_batch: int = GLOBAL_BATCH,
) -> Train:
    return Train(
        dp=dp,
        optimizer=optimizer or HpMuon(lr=5e-3, weight_decay=0.1),
        model=model,
        topology=topology or Topology(),
        platform=Platform(name=PlatformName.cpu, precision=precision),
        data=Data(),
        lr_schedule=LrSchedule(warmup_steps=2),
        run=Run(steps=steps, micro_batch_size=1, global_batch_size=global_batch, canonical_init=True, dir="unused"),
    )


@dataclass
class Ready:
    """A built model on one rank."""

    config: Train
    model: torch.nn.Module
    optimizer: Any
    schedule: Any
    trainer: Any
    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)


def start(launch: Launch, config: Train) -> Any:
    platform = choose(PlatformName.cpu)
    setup.start_ranks(platform, replace(config.topology, timeout_s=30.0), launch)
    setup.seed_everything(config.run.seed)
    return platform


def build(launch: Launch, config: Train) -> Ready:
    from hp_muon_plugin.train.loop import Trainer
    from hp_muon_plugin.train.progress import Silent

    platform = start(launch, config)
    model, _ = setup.build_model(config, VOCAB, platform)
    optimizer = setup.build_optimizer(config, model)
    schedule = setup.build_schedule(config, optimizer)
    trainer = Trainer(
        config,
        model,
        optimizer,
        schedule,
        data=None,
        platform=platform,
        log=None,
        display=Silent(),  # type: ignore[arg-type]
    )
    return Ready(config, model, optimizer, schedule, trainer)


def batches(config: Train, dp_rank: int, dp_size: int, *, first_step: int = 0) -> Iterator[Batch]:
    """Random tokens, the same samples per step whatever the number of ranks."""
    step, size = first_step, config.run.global_batch_size
    while True:
        generator = torch.Generator().manual_seed(1000 + step)
        tokens = torch.randint(0, VOCAB, (size, SEQ + 1), generator=generator)
        for micro in range(size // dp_size):
            row = tokens[micro * dp_size + dp_rank][None]
            positions = torch.arange(SEQ)[None]
            yield Batch(row[:, :-1], row[:, 1:], torch.ones(1, SEQ), positions)
        step += 1


def train(ready: Ready, steps: int, *, before_step: Callable[[int], None] | None = None) -> Ready:
    trainer = ready.trainer
    stream = batches(ready.config, trainer._dp_rank, trainer._dp_size)
    for step in range(steps):
        if before_step is not None:
            before_step(step)
        loss, _, norm, _ = trainer._step(stream)
        ready.losses.append(loss)
        ready.norms.append(norm)
    return ready


def specs_of(ready: Ready) -> dict[torch.nn.Parameter, ParamSpec]:
    from hp_muon_plugin.megatron.groups import megatron_groups
    from hp_muon_plugin.megatron.specs import chunk_specs

    options = ready.config.optimizer if isinstance(ready.config.optimizer, HpMuon) else HpMuon()
    if isinstance(ready.config.dp, HpFsdp):  # by the whole parameters, which are registered during forward only
        with ready.model.whole_parameters():
            return chunk_specs([ready.model], options, megatron_groups())
    return chunk_specs([ready.model], options, megatron_groups())


def whole_tensors(ready: Ready, read: Callable[[torch.nn.Parameter], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors of the whole model by canonical name, on every rank."""
    from hp_muon_plugin.megatron.groups import megatron_groups

    groups = megatron_groups()
    mine = []
    for param, spec in specs_of(ready).items():
        index = groups.axes[spec.split.axis].index if spec.split else 0
        mine.append((spec, index, read(param).detach().clone()))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    found: dict[str, torch.Tensor] = {}
    for pieces in gathered:
        for spec, index, tensor in pieces:
            _place(found, spec, index, tensor)
    return found


def _place(found: dict[str, torch.Tensor], spec: ParamSpec, index: int, tensor: torch.Tensor) -> None:
    from hp_muon_plugin.muon.matrix_view import local_slice

    if spec.split is None:
        found[spec.name] = tensor
        return
    whole = found.setdefault(spec.name, torch.full(spec.shape, float("nan"), dtype=tensor.dtype))
    target = local_slice(whole, spec.split, index)
    target.copy_(tensor.view(target.shape))


def whole_weights(ready: Ready) -> dict[str, torch.Tensor]:
    if not isinstance(ready.config.dp, HpFsdp):
        return whole_tensors(ready, lambda param: param)
    model: Any = ready.model
    model.schedule.settle_weights()
    gathered: dict[int, torch.Tensor] = {}
    values: dict[torch.nn.Parameter, torch.Tensor] = {}
    for bucket, parameter in model.sharded():
        if id(bucket) not in gathered:
            gathered[id(bucket)] = bucket.gather_master()
        at = parameter.placement
        values[parameter.full] = gathered[id(bucket)][at.offset : at.stop].view(at.shape)
    return whole_tensors(ready, lambda param: values[param])


def optimizer_config(name: str = "hp_muon", **values: Any) -> Any:
    """megatron-core's own configuration, as a trainer would fill it in."""
    from megatron.core.optimizer import OptimizerConfig

    return OptimizerConfig(optimizer=name, **(dict(lr=0.01, min_lr=0.001, weight_decay=0.1) | values))


def wrapped_model(launch: Launch, config: Train | None = None) -> torch.nn.Module:
    """A model chunk inside Megatron's wrapper, without an optimizer."""
    config = config or train_config(dense())
    platform = start(launch, config)
    return setup.build_model(config, VOCAB, platform)[0]
