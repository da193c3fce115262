"""What Megatron's trainers ask of a data-parallel wrapper and of an optimizer, on every lane."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dist_pool import run_ranks

from hp_muon_plugin.config.choices import OuterMode, Precision
from hp_muon_plugin.config.data_parallel import HpFsdp
from hp_muon_plugin.config.trainer import Topology
from hp_muon_plugin.errors import HookError
from hp_muon_plugin.megatron.versions import core_version
from hp_muon_plugin.train.setup import Launch
from lane.harness import build, dense, moe, optimizer_config, start, train, train_config, whole_weights


def test_every_method_takes_what_megatrons_own_takes() -> None:
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    from hp_muon_plugin.megatron.optimizer import HpMuonMegatronOptimizer
    from hp_muon_plugin.megatron.sharded_build import ShardedMegatronOptimizer
    from hp_muon_plugin.megatron.sharded_model import HpFsdpModel

    pairs = [
        (HpFsdpModel, (DistributedDataParallel, _BaseDataParallel)),
        (HpMuonMegatronOptimizer, (MegatronOptimizer,)),
        (ShardedMegatronOptimizer, (MegatronOptimizer,)),
    ]
    seen = 0
    for ours, bases in pairs:
        for base in bases:
            for name, theirs in vars(base).items():
                if name.startswith("_") or not inspect.isfunction(theirs):
                    continue
                seen += 1
                mine = inspect.signature(getattr(ours, name)).parameters
                if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in mine.values()):
                    continue
                wanted = inspect.signature(theirs).parameters.values()
                named = {p.name for p in wanted if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
                assert named <= set(mine), f"{ours.__name__}.{name} lacks {named - set(mine)}"
    assert seen > 50


def test_what_trainers_read_of_a_chunk_and_of_its_parameters_is_there() -> None:
    assert run_ranks(1, _unwrapped) == [("GPTModel", "GPTModel", 1)]


def _unwrapped(launch: Launch) -> Any:
    from megatron.core import utils

    ready = build(launch, train_config(dense(), dp=HpFsdp()))
    unwrap = getattr(utils, "unwrap_model", lambda chunks: [chunk.module for chunk in chunks])  # 0.14 and later
    inner, config = unwrap([ready.model])[0], utils.get_model_config(ready.model)
    model: Any = ready.model
    for parameter in inner.parameters():
        assert parameter.main_grad.dtype is torch.float32
        assert parameter.main_grad.shape == parameter.shape
        assert parameter.grad_added_to_main_grad is False
    assert {"tensor_model_parallel", "partition_dim"} <= set(vars(inner.embedding.word_embeddings.weight))
    model.force_all_reduce = True  # 0.16 and later say so in every step
    model.finish_grad_sync(force_all_reduce=True)
    assert model.ddp_config.use_distributed_optimizer is False
    return type(model.module).__name__, type(inner).__name__, config.pipeline_model_parallel_size


def _offloaded(launch: Launch, dp: HpFsdp | None, precision: Precision, is_offloaded: bool) -> Any:
    """Memory is given up between steps, as trainers with inference in between do."""
    ready = train(build(launch, train_config(moe(), Topology(ep=2), dp=dp, precision=precision)), 2)
    sizes = []
    if is_offloaded:
        if dp is not None:
            ready.model.offload_grad_buffers(synchronize=True)
            sizes = [group.grad.untyped_storage().size() for group in ready.model.schedule.reducer.groups]
            ready.model.restore_grad_buffers()
        if hasattr(ready.optimizer, "offload_to_cpu"):
            ready.optimizer.offload_to_cpu()
            ready.optimizer.restore_from_cpu()
    train(ready, 2)
    return ready.losses, whole_weights(ready), sizes


@pytest.mark.parametrize(
    ("dp", "precision"),
    [(HpFsdp(replicas=2, outer=OuterMode.shard), Precision.fp32), (None, Precision.bf16)],
    ids=["hsdp-fp32", "ddp-bf16"],
)
def test_memory_given_up_between_steps_changes_nothing(dp: HpFsdp | None, precision: Precision) -> None:
    straight = run_ranks(4, _offloaded, dp, precision, False)
    for (losses, weights, _), (other, others, sizes) in zip(
        straight, run_ranks(4, _offloaded, dp, precision, True), strict=True
    ):
        assert losses == other
        assert all(torch.equal(weights[name], others[name]) for name in weights)
        assert set(sizes) <= {0}


def _bypassed(launch: Launch) -> list[str]:
    """One trainer wraps the model before install(), another builds its optimizer around the factory."""
    from megatron.core import optimizer as factory
    from megatron.core.optimizer.optimizer import FP32Optimizer

    from hp_muon_plugin.megatron import install, uninstall
    from hp_muon_plugin.platform.base import choose
    from hp_muon_plugin.train import setup
    from lane.harness import VOCAB

    config = train_config(dense())
    platform: Any = start(launch, config)
    before = setup.build_model(config, VOCAB, platform)[0]
    install(data_parallel={})
    messages = []
    for name in ("adam", "hp_muon"):
        with pytest.raises(HookError) as caught:
            factory.get_megatron_optimizer(optimizer_config(name), [before])
        messages.append(str(caught.value).splitlines()[0])
    sharded = setup.build_model(config, VOCAB, choose(platform.name))[0]
    with pytest.raises(HookError) as caught:
        FP32Optimizer(torch.optim.AdamW(sharded.parameters()), optimizer_config("adam"), lambda *unused: None)
    messages.append(str(caught.value).splitlines()[0])
    uninstall()
    return messages


def test_a_bypass_is_found_in_both_directions() -> None:
    adam, muon, around = run_ranks(1, _bypassed)[0]
    assert (
        adam
        == muon
        == "the model was to be sharded, but the trainer wrapped it in DistributedDataParallel by another way"
    )
    assert around.startswith("the model is sharded by dp=hp_fsdp, but megatron.core.optimizer.optimizer.FP32Optimizer")


def _plain(launch: Launch, was_installed: bool) -> Any:
    from hp_muon_plugin.config.optimizer import AdamW
    from hp_muon_plugin.megatron import install, uninstall

    if was_installed:
        install(data_parallel={})
        uninstall()
    ready = train(build(launch, train_config(moe(), Topology(ep=2), optimizer=AdamW(lr=3e-3))), 4)
    return type(ready.model).__name__, ready.losses, ready.norms, whole_weights(ready)


def test_uninstall_gives_upstream_back_bit_for_bit() -> None:
    for (kind, *numbers, weights), (other, *others, after) in zip(
        run_ranks(2, _plain, False), run_ranks(2, _plain, True), strict=True
    ):
        assert kind == other == "DistributedDataParallel"
        assert numbers == others
        assert all(torch.equal(weights[name], after[name]) for name in weights)


def _arguments_after(launch: Launch) -> list[bool]:
    """Megatron's own Muon of 0.16 changed the name in the caller's configuration, newer ones the caller's overrides."""
    import copy

    from megatron.core import optimizer as factory

    from hp_muon_plugin.megatron import install
    from hp_muon_plugin.megatron.param_groups import standard_overrides
    from lane.harness import wrapped_model

    model, config = wrapped_model(launch), optimizer_config("hp_muon")
    arguments = standard_overrides(config)
    before = copy.deepcopy(vars(config)), {name: dict(value) for name, value in arguments.items()}
    requires = [parameter.requires_grad for parameter in model.parameters()]
    install()
    factory.get_megatron_optimizer(config, [model], **arguments)
    return [
        vars(config) == before[0],
        {name: dict(value) for name, value in arguments.items()} == before[1],
        requires == [parameter.requires_grad for parameter in model.parameters()],
    ]


def test_the_factory_changes_nothing_of_the_callers() -> None:
    assert run_ranks(1, _arguments_after) == [[True, True, True]]


class _GroupedExperts(torch.nn.Module):
    """Parameters, and how they are read, as in megatron-core's GroupedMLP, whose kernels need CUDA."""

    def __init__(self, config: Any, experts: int, hidden: int, ffn: int) -> None:
        super().__init__()
        self.config, self.num_local_experts = config, experts
        self.ep_group = self.tp_group = self.dp_group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
        generator = torch.Generator().manual_seed(3)
        self.weight1 = torch.nn.Parameter(torch.randn(hidden, experts * ffn, generator=generator))
        self.weight2 = torch.nn.Parameter(torch.randn(experts * ffn, hidden, generator=generator))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first = self.weight1.view(self.num_local_experts, tokens.shape[-1], -1)
        second = self.weight2.view(self.num_local_experts, -1, tokens.shape[-1])
        found: torch.Tensor = torch.bmm(torch.relu(torch.bmm(tokens, first)), second)
        return found


def _grouped(launch: Launch) -> Any:
    """Three experts over two ranks, with what lies whole where; and the checkpoint's view of them."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    from hp_muon_plugin.megatron.sharded_checkpoint import shard_factories
    from hp_muon_plugin.megatron.sharded_model import HpFsdpModel
    from hp_muon_plugin.models.gpt import transformer_config

    config = train_config(moe())
    start(launch, config)
    core = transformer_config(config.model, config.topology, Precision.fp32)
    core.gated_linear_unit = False
    experts, hidden, ffn = 3, core.hidden_size, 8
    mlp = torch.nn.Module()
    mlp.experts = _GroupedExperts(core, experts, hidden, ffn)  # type: ignore[assignment]
    module = torch.nn.Module()
    module.mlp = mlp
    module.forward = mlp.experts.forward  # type: ignore[method-assign, union-attr, assignment]
    module.config = core  # type: ignore[assignment]
    module.sharded_state_dict = lambda: {}  # type: ignore[assignment]
    plain = _GroupedExperts(core, experts, hidden, ffn)
    model = HpFsdpModel(core, None, module)
    tokens = torch.randn(experts, 5, hidden, generator=torch.Generator().manual_seed(launch.rank))
    out = model(tokens)
    out.square().sum().backward()
    plain(tokens).square().sum().backward()
    held = [(p.sharded.hp_shard.start, p.sharded.hp_shard.stop, tuple(p.sharded.shape)) for _, p in model.sharded()]

    def build(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any = None) -> Any:
        whole = data.view(experts, -1, hidden).transpose(1, 2).contiguous()
        return ShardedTensor.from_rank_offsets(key, whole, replica_id=replica_id)

    found = {}
    with model.whole_parameters() as homes:
        for full, (_, parameter) in homes.items():
            if parameter.name.endswith("weight2"):
                factory = ShardedTensorFactory("w2", full, build, lambda state: state, (0, 0, 0))
                found = shard_factories({"w2": factory}, homes)
    pieces = []
    if core_version().lane >= (0, 16):
        built = found["w2"].build()
        pieces = [(piece.global_offset, piece.data) for piece in built] if isinstance(built, list) else []
    grads = [(p.name, p.sharded.hp_shard.start, p.sharded.main_grad.reshape(-1)) for _, p in model.sharded()]
    whole = plain.weight2.detach().view(experts, -1, hidden).transpose(1, 2)
    return held, torch.equal(out, plain(tokens)), grads, [p.grad for p in plain.parameters()], pieces, whole


def test_legacy_grouped_experts_stay_whole() -> None:
    results = run_ranks(2, _grouped)
    hidden = 32
    covered = 0
    for held, is_equal, _, _, pieces, whole in results:
        assert is_equal
        assert all(start % (hidden * 8) == stop % (hidden * 8) == 0 for start, stop, _ in held)
        assert all(len(shape) == 3 or start == stop for start, stop, shape in held)
        for offset, data in pieces:
            covered += data.numel()
            assert torch.equal(data.reshape(hidden, 8), whole[offset[0]])
    assert covered == (3 * 8 * hidden if core_version().lane >= (0, 16) else 0)
    for place in range(2):  # weight1, weight2: the mean over both ranks' tokens
        mean = sum(result[3][place] for result in results) / 2
        parts = [result[2][place] for result in results]
        sharded = torch.cat([grad for _, _, grad in sorted(parts, key=lambda part: part[1])])
        torch.testing.assert_close(sharded, mean.reshape(-1), rtol=1e-5, atol=1e-5)
