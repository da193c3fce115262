"""A small model with any set of Megatron's features under a data-parallel wrapper, trained for a few steps.

Features are of the layout (tp, sp, ep, ep4, etp, pp, vpp, cp) or of the model (moe, mtp, mla, shared, recompute). Every
run can be compared with one rank that trains the same model without the features of the layout.
"""

import functools
import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from hp_muon_plugin.config.data_parallel import DpOptions, HpFsdp
from hp_muon_plugin.config.model_checks import model_errors
from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.config.trainer import Model, Topology, Train
from hp_muon_plugin.errors import ConfigError, raise_all
from hp_muon_plugin.train.data import Batch
from hp_muon_plugin.train.setup import Launch
from lane.harness import SEQ, batches, dense, mla, moe, start, train_config

FEATURES = ("tp", "sp", "ep", "ep4", "etp", "pp", "vpp", "cp", "moe", "mtp", "mla", "shared", "recompute")
_WITH_EXPERTS = frozenset({"ep", "ep4", "etp", "moe", "shared"})
STEPS, BATCH, LAYERS = 3, 8, 4
PADDED = 128

Features = frozenset[str]


def features(text: str) -> Features:
    """``"tp sp"`` as a set."""
    found = frozenset(text.split())
    assert found <= set(FEATURES), text
    return found


def model_options(chosen: Features) -> Model:
    has_experts = chosen & _WITH_EXPERTS
    options = mla() if "mla" in chosen else moe() if has_experts else dense()
    options.num_layers = LAYERS
    if "mla" in chosen and not has_experts:
        options.moe = None
    if options.moe is not None and "shared" not in chosen:
        options.moe.shared_ffn_hidden_size = None
    return options


def topology(chosen: Features) -> Topology:
    def size(name: str) -> int:
        return 2 if name in chosen else 1

    ep = 4 if "ep4" in chosen else size("ep")
    return Topology(tp=size("tp"), pp=size("pp"), ep=ep, etp=size("etp"), sequence_parallel="sp" in chosen)


Curves = tuple[list[float], list[float]]


def run(launch: Launch, chosen: Features, wrappers: Sequence[DpOptions | None]) -> list[Curves | str]:
    """Losses and gradient norms of a few steps of AdamW under each wrapper, or why it was refused; on every rank."""
    config = joined(launch, chosen)
    found: list[Curves | str] = []
    for dp in wrappers:
        try:
            found.append(_run(chosen, replace(config, dp=dp)))
        except ConfigError as refusal:  # of all ranks alike
            found.append(str(refusal))
    return found


def joined(launch: Launch, chosen: Features) -> Train:
    """Join the job, and the options of the run."""
    from megatron.core import parallel_state

    config = train_config(
        model_options(chosen), topology(chosen), optimizer=AdamW(weight_decay=0.0), global_batch=BATCH
    )
    more: dict[str, int] = {"context_parallel_size": 2} if "cp" in chosen else {}
    if "vpp" in chosen:
        more["virtual_pipeline_model_parallel_size"] = 2
    parallel_state.initialize_model_parallel = functools.partial(parallel_state.initialize_model_parallel, **more)
    start(launch, config)
    return config


def _run(chosen: Features, config: Train) -> Curves:
    models, optimizer = built(chosen, config)
    return train_steps(models, optimizer, config, chosen)


def built(chosen: Features, config: Train) -> tuple[list[Any], Any]:
    """Chunks under the wrapper that the options name, and their optimizer."""
    raise_all(list(model_errors(config.model, config.topology)))
    core = core_config(chosen, config)
    chunks = [build_chunk(core, config, chosen, place) for place in range(2 if "vpp" in chosen else 1)]
    return _wrapped(core, config, chunks)


def core_config(chosen: Features, config: Train) -> Any:
    from megatron.core.distributed import finalize_model_grads

    from hp_muon_plugin.models.gpt import transformer_config

    core: Any = transformer_config(config.model, config.topology, config.platform.precision)
    core.finalize_model_grads_func = finalize_model_grads
    if "vpp" in chosen:
        core.virtual_pipeline_model_parallel_size = 2
        # With two stages both neighbours are one rank; batched messages then arrive in each other's place.
        core.overlap_p2p_comm, core.batch_p2p_comm = True, False
    if "recompute" in chosen:
        core.recompute_granularity, core.recompute_method, core.recompute_num_layers = "full", "uniform", 1
    if "mtp" in chosen:
        core.mtp_num_layers, core.mtp_loss_scaling_factor = 1, 0.3
    if "cp" in chosen:
        core.context_parallel_size = 2
    return core


def _known(function: Any, **values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in inspect.signature(function).parameters}


def build_chunk(core: Any, config: Train, chosen: Features, place: int) -> torch.nn.Module:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from hp_muon_plugin.megatron.local_fixes import apply_local_fixes
    from hp_muon_plugin.models.canonical_init import initialize_canonically

    apply_local_fixes()
    vp = {"vp_stage": place} if "vpp" in chosen else {}
    if vp:
        parallel_state.set_virtual_pipeline_model_parallel_rank(place)
    spec = get_gpt_layer_local_spec(
        num_experts=core.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=core.qk_layernorm,
        multi_latent_attention="mla" in chosen,
        normalization="RMSNorm",
    )
    if "cp" in chosen:
        from lane.cp_attention import GatheredAttention

        spec.submodules.self_attention.submodules.core_attention = GatheredAttention
    first, last = (
        ask(**_known(ask, ignore_virtual=not vp, **vp))
        for ask in (parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage)
    )
    mtp = None
    if "mtp" in chosen:
        mtp = get_gpt_mtp_block_spec(core, spec, use_transformer_engine=False, **_known(get_gpt_mtp_block_spec, **vp))
        if not last and getattr(core, "pipeline_model_parallel_layout", None) is None:
            mtp = None
    chunk: torch.nn.Module = GPTModel(
        core,
        spec,
        vocab_size=PADDED,
        max_sequence_length=SEQ,
        pre_process=first,
        post_process=last,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=config.model.tie_embeddings,
        **_known(GPTModel.__init__, mtp_block_spec=mtp, **vp),
    )
    chunk.model_type = None  # read by 0.12's interleaved schedule
    initialize_canonically(chunk, seed=config.run.seed, std=0.02)
    return chunk


def _wrapped(core: Any, config: Train, chunks: list[torch.nn.Module]) -> tuple[list[Any], Any]:
    from megatron.core import optimizer as factory
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from hp_muon_plugin.megatron import install
    from hp_muon_plugin.megatron.build import build_sharded_adamw
    from hp_muon_plugin.megatron.sharded_model import wrap_model_chunks

    is_muon = isinstance(config.optimizer, HpMuon)
    name, decay = "hp_muon" if is_muon else "adam", config.optimizer.weight_decay
    options = factory.OptimizerConfig(optimizer=name, lr=3e-3, weight_decay=decay, adam_beta2=0.95, clip_grad=1.0)
    if is_muon:
        install(config.optimizer)
    if isinstance(config.dp, HpFsdp):
        models: list[Any] = list(wrap_model_chunks(chunks, core, options=config.dp))
        if isinstance(config.optimizer, AdamW):
            return models, build_sharded_adamw(options, models, config.optimizer)
    else:
        models = [DistributedDataParallel(core, DistributedDataParallelConfig(), chunk) for chunk in chunks]
    return models, factory.get_megatron_optimizer(options, models)


def train_steps(
    models: list[Any], optimizer: Any, config: Train, chosen: Features, *, steps: int = STEPS, first_step: int = 0
) -> Curves:
    """Losses and norms of some steps."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    size, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    own, parts = _positions(chosen), 2 if "cp" in chosen else 1
    mask = torch.triu(torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool), diagonal=1)
    stream = batches(config, rank, size, first_step=first_step)

    def forward(rows: Any, model: Any) -> Any:
        row: Batch = next(rows)
        tokens, labels, positions = row.tokens[:, own], row.labels[:, own], row.position_ids[:, own]
        losses = model(tokens, positions, mask[:, :, own], labels=labels)
        # Schedules multiply by the context-parallel ranks, because trainers divide by the tokens of all of them.
        return losses, lambda values: (values.float().mean() / parts, {"loss": values.detach().float().mean()})

    losses, norms = [], []
    micro = BATCH // size
    for _ in range(steps):
        rows = [next(stream) for _ in range(micro)]
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        reduced = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(rows) for _ in models] if len(models) > 1 else iter(rows),
            model=models if len(models) > 1 else models[0],
            num_microbatches=micro,
            seq_length=SEQ,
            micro_batch_size=1,
            forward_only=False,
        )
        total = torch.tensor([sum(float(entry["loss"]) for entry in reduced), float(len(reduced))], dtype=torch.float64)
        dist.all_reduce(total)
        losses.append(float(total[0] / total[1]))
        norms.append(float(optimizer.step()[1]))
    return losses, norms


def _positions(chosen: Features) -> torch.Tensor:
    """Tokens of this context-parallel rank: a chunk from the beginning and its mirror image, as megatron-core wants."""
    from megatron.core import parallel_state

    chunks = torch.arange(SEQ).chunk(4 if "cp" in chosen else 1)
    if "cp" not in chosen:
        return chunks[0]
    rank = parallel_state.get_context_parallel_rank()
    return torch.cat([chunks[rank], chunks[3 - rank]])


def reference(chosen: Features) -> Features:
    """Features of the run on one rank to compare with: the model alone."""
    kept = chosen & {"mtp", "mla", "shared"}
    return kept | {"moe"} if chosen & _WITH_EXPERTS else kept
