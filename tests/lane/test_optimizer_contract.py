"""The optimizer as Megatron's trainers use it: norms, clipping, groups, schedules, skipped steps, state."""

import copy
import math
from typing import Any

import pytest
import torch
from dist_pool import run_ranks

from hp_muon_plugin.config.choices import ClipMode, NonFinite, Precision
from hp_muon_plugin.config.optimizer import HpMuon, ScalarAdamW
from hp_muon_plugin.config.trainer import Model, Topology
from hp_muon_plugin.errors import ConfigError, GradientError
from hp_muon_plugin.megatron import install, uninstall
from hp_muon_plugin.megatron.versions import core_version
from hp_muon_plugin.train.setup import Launch
from lane.harness import VOCAB, build, dense, mla, moe, specs_of, start, train, train_config, whole_tensors


def _norms(launch: Launch, model: Model, topology: Topology) -> Any:
    options = HpMuon(clip_grad=0.0, lr=1e-3)
    ready = build(launch, train_config(model, topology, optimizer=options))
    train(ready, 1)
    grads = whole_tensors(ready, lambda param: param.main_grad)
    last = ready.optimizer.grad_norms_last
    return last.total, last.muon, last.adamw, grads, ready.optimizer.count_zeros()


@pytest.mark.parametrize(
    ("model", "ranks", "topology"),
    [
        (dense(), 2, Topology(tp=2)),
        (dense(tie_embeddings=True), 2, Topology(pp=2)),
        (moe(), 2, Topology(ep=2)),
        (moe(), 4, Topology(ep=2)),
        (moe(), 4, Topology(tp=2, ep=2, sequence_parallel=True)),
        (moe(), 4, Topology(pp=2, ep=2)),
        (mla(), 2, Topology(ep=2)),
    ],
    ids=["tp2", "tied-pp2", "ep2", "ep2-edp2", "tp2-ep2", "pp2-ep2", "mla-ep2"],
)
def test_every_gradient_is_counted_once_in_the_norm(model: Model, ranks: int, topology: Topology) -> None:
    """Megatron #5916, #6099: counted once per replica, per instance or per expert."""
    for total, muon, adamw, grads, zeros in run_ranks(ranks, _norms, model, topology):
        wanted = math.sqrt(sum(float(grad.double().square().sum()) for grad in grads.values()))
        assert total == pytest.approx(wanted, rel=1e-5)
        assert muon**2 + adamw**2 == pytest.approx(total**2, rel=1e-5)
        assert zeros == sum(int((grad == 0).sum()) for grad in grads.values())


def _clipped(launch: Launch, mode: ClipMode) -> Any:
    options = HpMuon(clip_grad=0.01, clip_mode=mode)
    ready = build(launch, train_config(dense(), optimizer=options))
    seen: dict[str, float] = {}
    inner = ready.optimizer.optimizer
    update = inner.update

    def watching() -> None:
        for group in inner.param_groups:
            for param in group["params"]:
                seen[group["algorithm"]] = seen.get(group["algorithm"], 0.0) + float(param.grad.double().square().sum())
        update()

    inner.update = watching
    train(ready, 1)
    last = ready.optimizer.grad_norms_last
    return {name: math.sqrt(value) for name, value in seen.items()}, last.total, last.muon, last.adamw


def test_clipping_by_choice() -> None:
    """Megatron #5394: should Muon's gradients be clipped? All, AdamW's only, or none; reported per group."""
    seen, total, muon, adamw = run_ranks(1, _clipped, ClipMode.all)[0]
    assert total == pytest.approx(math.hypot(muon, adamw))
    assert math.hypot(*seen.values()) == pytest.approx(0.01, rel=1e-3)
    seen, _, muon, _ = run_ranks(1, _clipped, ClipMode.adamw_only)[0]
    assert seen["muon"] == pytest.approx(muon, rel=1e-5)
    assert seen["adamw"] == pytest.approx(0.01, rel=1e-3)
    seen, _, muon, adamw = run_ranks(1, _clipped, ClipMode.none)[0]
    assert seen == pytest.approx({"muon": muon, "adamw": adamw}, rel=1e-5)


def _bad_step(launch: Launch, precision: Precision, policy: NonFinite) -> Any:
    options = HpMuon(lr=1e-2, non_finite=policy)
    topology = Topology(ep=launch.world_size)
    ready = build(launch, train_config(moe(), topology, optimizer=options, precision=precision))
    train(ready, 2)
    state = copy.deepcopy(ready.optimizer.state_dict())
    weights = [param.detach().clone() for param in ready.model.parameters()]
    lr = [group["lr"] for group in ready.optimizer.param_groups]
    ready.model.zero_grad_buffer()
    if launch.rank == launch.world_size - 1:  # one expert of the last rank only
        name, param = next((s.name, p) for p, s in specs_of(ready).items() if "local_experts" in s.name)
        param.main_grad[0, 0] = float("nan")
    try:
        answer = ready.optimizer.step()
    except GradientError as error:
        answer = str(error).splitlines()[0]
    after = ready.optimizer.state_dict()
    same = all(torch.equal(a, b) for a, b in zip(weights, ready.model.parameters(), strict=True))
    same &= all(torch.equal(a, b) for a, b in zip(state["main_params"], after["main_params"], strict=True))
    for key, entry in state["optimizer"]["state"].items():
        for field, value in entry.items():
            same &= torch.equal(value, after["optimizer"]["state"][key][field])
    same &= lr == [group["lr"] for group in ready.optimizer.param_groups]
    return answer, same, ready.optimizer.num_skipped


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
def test_a_nan_on_one_rank_skips_the_step_on_all_and_changes_nothing(precision: Precision) -> None:
    for answer, same, skipped in run_ranks(2, _bad_step, precision, NonFinite.skip):
        assert answer == (False, None, None)
        assert same
        assert skipped == 1


def test_a_nan_is_an_error_if_asked_for() -> None:
    first, last = run_ranks(2, _bad_step, Precision.fp32, NonFinite.error)
    assert first[0].startswith("a parameter of another rank: gradient is NaN")
    assert last[0].startswith("decoder.layers.0.mlp.experts.local_experts.2.linear_fc1.weight: gradient is NaN")
    assert first[1]
    assert last[1]


def _frozen_and_unused(launch: Launch) -> Any:
    """One weight frozen before the wrapper is built, and one that gets no gradient on rank 1."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from hp_muon_plugin.config.choices import Precision
    from hp_muon_plugin.models.canonical_init import initialize_canonically
    from hp_muon_plugin.models.gpt import build_gpt, transformer_config
    from hp_muon_plugin.train import setup

    config = train_config(dense(), optimizer=HpMuon(lr=0.1, weight_decay=0.0, clip_grad=0.0))
    start(launch, config)
    core = transformer_config(config.model, config.topology, Precision.fp32)
    module = build_gpt(core, config.model, 128)
    initialize_canonically(module, seed=1, std=0.02)
    frozen = module.decoder.layers[0].mlp.linear_fc1.weight
    frozen.requires_grad_(False)
    model = DistributedDataParallel(core, DistributedDataParallelConfig(), module)
    optimizer = setup.build_optimizer(config, model)
    setup.build_schedule(config, optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    unused, grads = module.decoder.layers[1].mlp.linear_fc2.weight, torch.ones(32, 48)
    before = frozen.detach().clone(), unused.detach().clone()
    if launch.rank == 0:
        unused.main_grad.copy_(2 * grads)
    model.finish_grad_sync()
    succeeded, _, _ = optimizer.step()
    held = sum(v.numel() for s in optimizer.state.values() for n, v in s.items() if n == "momentum_buffer")
    muon = sum(p.numel() for g in optimizer.param_groups if g["algorithm"] == "muon" for p in g["params"])
    moved = unused.detach() - before[1]
    return succeeded, torch.equal(frozen, before[0]), moved, unused.main_grad.clone(), (held, muon)


def test_frozen_weights_stay_and_a_gradient_missing_on_one_rank_counts_as_zero() -> None:
    results = run_ranks(2, _frozen_and_unused)
    for succeeded, frozen_same, moved, mean_grad, (held, muon) in results:
        assert succeeded
        assert frozen_same
        assert torch.equal(mean_grad, torch.ones(32, 48))
        assert float(moved.abs().max()) > 0
        assert held == muon
    assert torch.equal(results[0][2], results[1][2])


def _state_bytes(launch: Launch) -> Any:
    ready = train(build(launch, train_config(moe())), 1)
    inner = ready.optimizer.optimizer
    held: dict[str, int] = {}
    for group in inner.param_groups:
        for param in group["params"]:
            for name, value in inner.state[param].items():
                if name != "step":
                    held[group["algorithm"]] = held.get(group["algorithm"], 0) + value.numel() * value.element_size()
    sizes = {name: 0 for name in held}
    for group in inner.param_groups:
        sizes[group["algorithm"]] += sum(param.numel() for param in group["params"])
    return held, sizes, inner.plan.state_bytes()


def test_muon_keeps_four_bytes_per_weight_and_adamw_eight() -> None:
    held, sizes, planned = run_ranks(1, _state_bytes)[0]
    assert held == {"muon": 4 * sizes["muon"], "adamw": 8 * sizes["adamw"]}
    assert planned == held["muon"]


def _groups(launch: Launch) -> Any:
    """Whatever a trainer passes to the factory about weight decay and learning rates holds."""
    import megatron.core.optimizer as factory

    from hp_muon_plugin.train import setup

    config = train_config(dense())
    platform = start(launch, config)
    model, _ = setup.build_model(config, VOCAB, platform)
    settings = HpMuon(lr=0.02, weight_decay=0.2, adamw=ScalarAdamW(lr=0.002, weight_decay=0.05))
    uninstall()
    install(settings)
    core = factory.OptimizerConfig(optimizer="hp_muon", lr=0.01, min_lr=0.001, weight_decay=0.1)
    if core_version().lane < (0, 16):
        extra = {
            "no_weight_decay_cond": lambda name, param: "linear_fc2" in name or param.dim() == 1,
            "scale_lr_cond": lambda name, param: "linear_proj" in name,
            "lr_mult": 0.5,
        }
    else:
        from megatron.core.optimizer import ParamKey
        from megatron.core.optimizer_param_scheduler import ParamGroupOverride

        extra = {
            "config_overrides": {
                ParamKey(name="*linear_fc2*"): ParamGroupOverride(wd_mult=0.0),
                ParamKey(name="*norm*"): ParamGroupOverride(wd_mult=0.0),
                ParamKey(name="*linear_proj*"): ParamGroupOverride(max_lr=0.005, min_lr=0.0005),
            }
        }
    optimizer = factory.get_megatron_optimizer(core, [model], **extra)
    config.optimizer.lr, config.optimizer.weight_decay = 0.01, 0.1
    config.lr_schedule.warmup_steps = 0
    setup.build_schedule(config, optimizer)
    names = {
        pair.main: spec.name for pair, spec in zip(optimizer._pairs, [c.spec for c in optimizer._counted], strict=True)
    }
    found = {}
    for group in optimizer.param_groups:
        for param in group["params"]:
            found[names[param]] = (group["algorithm"], group["lr"], group["weight_decay"])
    return found


def test_weight_decay_and_learning_rate_conditions_of_the_trainer_hold() -> None:
    found = run_ranks(1, _groups)[0]
    assert found["decoder.layers.0.self_attention.linear_qkv.weight"] == (
        "muon",
        pytest.approx(0.02),
        pytest.approx(0.2),
    )
    assert found["decoder.layers.0.mlp.linear_fc2.weight"] == ("muon", pytest.approx(0.02), 0.0)
    rate = 0.01 if core_version().lane < (0, 16) else 0.005
    assert found["decoder.layers.0.self_attention.linear_proj.weight"] == (
        "muon",
        pytest.approx(rate),
        pytest.approx(0.2),
    )
    assert found["embedding.word_embeddings.weight"] == ("adamw", pytest.approx(0.002), pytest.approx(0.05))
    assert found["decoder.layers.0.input_layernorm.weight"] == ("adamw", pytest.approx(0.002), 0.0)


def _zero_decay(launch: Launch) -> str:
    import megatron.core.optimizer as factory

    from hp_muon_plugin.train import setup

    config = train_config(dense())
    model, _ = setup.build_model(config, VOCAB, start(launch, config))
    uninstall()
    install(HpMuon(lr=0.02, weight_decay=0.2))
    core = factory.OptimizerConfig(optimizer="hp_muon", lr=0.01, min_lr=0.001, weight_decay=0.0)
    try:
        factory.get_megatron_optimizer(core, [model])
    except ConfigError as error:
        return str(error)
    return "not refused"


def test_a_schedule_that_would_zero_the_weight_decay_is_refused() -> None:
    assert "multiply their own weight decay, which is 0 here" in run_ranks(1, _zero_decay)[0]


def _without_settings(launch: Launch) -> Any:
    import megatron.core.optimizer as factory

    from hp_muon_plugin.train import setup

    config = train_config(dense())
    model, _ = setup.build_model(config, VOCAB, start(launch, config))
    uninstall()
    install()
    core = factory.OptimizerConfig(
        optimizer="hp_muon", lr=0.03, min_lr=0.003, weight_decay=0.07, adam_beta1=0.8, adam_beta2=0.9, adam_eps=1e-6
    )
    optimizer = factory.get_megatron_optimizer(core, [model])
    return [(g["algorithm"], g["lr"], g["weight_decay"], g.get("betas"), g.get("eps")) for g in optimizer.param_groups]


def test_without_settings_everything_comes_from_megatrons_configuration() -> None:
    groups = run_ranks(1, _without_settings)[0]
    assert ("muon", 0.03, 0.07, None, None) in groups
    assert ("adamw", 0.03, 0.07, (0.8, 0.9), 1e-6) in groups


def _resumed(launch: Launch, precision: Precision) -> Any:
    """Three steps, state out and in, two more; against five straight."""
    config = train_config(moe(), Topology(ep=launch.world_size), precision=precision)
    ready = train(build(launch, config), 3)
    kept = copy.deepcopy(ready.optimizer.state_dict())
    weights = [param.detach().clone() for param in ready.model.parameters()]
    schedule = copy.deepcopy(ready.schedule.state_dict())
    train(ready, 2)
    straight = [param.detach().clone() for param in ready.model.parameters()]
    with torch.no_grad():
        for param, value in zip(ready.model.parameters(), weights, strict=True):
            param.copy_(value)
    ready.optimizer.load_state_dict(kept)
    ready.schedule.num_steps = 0
    ready.schedule.load_state_dict(schedule)
    train(ready, 2)
    return all(torch.equal(a, b) for a, b in zip(straight, ready.model.parameters(), strict=True))


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
def test_resuming_from_a_state_dict_is_bit_for_bit(precision: Precision) -> None:
    assert run_ranks(2, _resumed, precision) == [True, True]


def _distributed_checkpoint(launch: Launch, folder: str, precision: Precision) -> Any:
    from megatron.core import dist_checkpointing

    config = train_config(moe(), Topology(ep=launch.world_size), precision=precision)
    ready = train(build(launch, config), 3)
    inner = ready.model.module

    def state(is_loading: bool) -> dict[str, Any]:
        model_state = inner.sharded_state_dict()
        return {"model": model_state, "optimizer": ready.optimizer.sharded_state_dict(model_state, is_loading)}

    schedule = copy.deepcopy(ready.schedule.state_dict())
    dist_checkpointing.save(state(False), folder)
    train(ready, 2)
    straight = [param.detach().clone() for param in ready.model.parameters()]
    loaded = dist_checkpointing.load(state(True), folder)
    inner.load_state_dict(loaded["model"])
    ready.optimizer.load_state_dict(loaded["optimizer"])
    ready.schedule.num_steps = 0
    ready.schedule.load_state_dict(schedule)
    train(ready, 2)
    return all(torch.equal(a, b) for a, b in zip(straight, ready.model.parameters(), strict=True))


@pytest.mark.parametrize("precision", [Precision.fp32, Precision.bf16])
def test_resuming_from_megatrons_distributed_checkpoint_is_bit_for_bit(precision: Precision, tmp_path: Any) -> None:
    if core_version().lane < (0, 16):
        pytest.skip("megatron-core 0.12's own writer does not work with this torch")
    assert run_ranks(2, _distributed_checkpoint, str(tmp_path), precision) == [True, True]
