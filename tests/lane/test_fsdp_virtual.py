"""Several model chunks on each pipeline stage: one root per chunk, under Megatron's interleaved schedule."""

import functools
import inspect
from typing import Any

import pytest
import torch
from dist_pool import run_ranks

from hp_muon_plugin.config.choices import OuterMode, Precision
from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.config.optimizer import AdamW
from hp_muon_plugin.config.trainer import Topology, Train
from hp_muon_plugin.train.setup import Launch
from lane.harness import SEQ, batches, dense, start, train_config

CHUNKS, STEPS = 2, 4


def _chunks(core: Any, config: Train) -> list[torch.nn.Module]:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    from hp_muon_plugin.megatron.local_fixes import apply_local_fixes
    from hp_muon_plugin.models.canonical_init import initialize_canonically

    apply_local_fixes()
    chunks = []
    for place in range(CHUNKS):
        parallel_state.set_virtual_pipeline_model_parallel_rank(place)
        named = {"vp_stage": place} if "vp_stage" in inspect.signature(GPTModel.__init__).parameters else {}
        where = parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage
        asked = {"ignore_virtual": False, "vp_stage": place}
        first, last = (
            ask(**{key: value for key, value in asked.items() if key in inspect.signature(ask).parameters})
            for ask in where
        )
        chunk = GPTModel(
            core,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=128,
            max_sequence_length=SEQ,
            pre_process=first,
            post_process=last,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            **named,
        )
        chunk.model_type = None
        initialize_canonically(chunk, seed=config.run.seed, std=0.02)
        chunks.append(chunk)
    return chunks


def _train(launch: Launch, dp: HpFsdp | None) -> Any:
    from megatron.core import optimizer as factory
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    from hp_muon_plugin.megatron.build import build_sharded_adamw
    from hp_muon_plugin.megatron.sharded_model import wrap_model_chunks
    from hp_muon_plugin.models.gpt import transformer_config

    config = train_config(dense(num_layers=4), Topology(pp=2), optimizer=AdamW(weight_decay=0.0), global_batch=8)
    parallel_state.initialize_model_parallel = functools.partial(
        parallel_state.initialize_model_parallel, virtual_pipeline_model_parallel_size=CHUNKS
    )
    start(launch, config)
    core = transformer_config(config.model, config.topology, Precision.fp32)
    core.virtual_pipeline_model_parallel_size = CHUNKS
    core.overlap_p2p_comm, core.batch_p2p_comm = True, False  # both neighbours are one rank: messages would be mixed up
    core.finalize_model_grads_func = finalize_model_grads
    chunks = _chunks(core, config)
    options = factory.OptimizerConfig(optimizer="adam", lr=3e-3, weight_decay=0.0, adam_beta2=0.95, clip_grad=1.0)
    if dp is None:
        ddp = DistributedDataParallelConfig()
        models: Any = [DistributedDataParallel(core, ddp, chunk) for chunk in chunks]
        return _steps(models, factory.get_megatron_optimizer(options, models), config)
    models = wrap_model_chunks(chunks, core, options=dp)
    return _steps(models, build_sharded_adamw(options, models, config.optimizer), config)


def _steps(models: list[Any], optimizer: Any, config: Train) -> Any:
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    mask = torch.triu(torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool), diagonal=1)
    stream = batches(config, parallel_state.get_data_parallel_rank(), 2)

    def forward(rows: Any, model: Any) -> Any:
        row = next(rows)
        losses = model(row.tokens, row.position_ids, mask, labels=row.labels)
        return losses, lambda values: (values.float().mean(), {"loss": values.detach().float().mean()})

    seen = []
    for _ in range(STEPS):
        rows = [next(stream) for _ in range(4)]
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        reduced = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(rows) for _ in models],
            model=models,
            num_microbatches=4,
            seq_length=SEQ,
            micro_batch_size=1,
            forward_only=False,
        )
        seen.append((optimizer.step()[1], [float(entry["loss"]) for entry in reduced]))
    return seen


@pytest.mark.parametrize(
    "dp",
    [HpFsdp(), HpFsdp(replicas=2, outer=OuterMode.shard, shard_accumulated=True)],
    ids=["fsdp", "hsdp"],
)
def test_interleaved_stages_train_as_with_megatrons_wrapper(dp: HpFsdp) -> None:
    wanted, found = run_ranks(4, _train, None)[3], run_ranks(4, _train, dp)[3]
    for (norm, losses), (norm_found, losses_found) in zip(wanted, found, strict=True):
        assert norm_found == pytest.approx(norm, rel=1e-4)
        assert losses_found == pytest.approx(losses, rel=1e-5)
    assert wanted[0][1] != wanted[1][1]
