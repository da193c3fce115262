import copy
from typing import Any

import pytest

from hp_muon_plugin.config.checks import check_optimizer, check_train
from hp_muon_plugin.config.choices import DataKind, FloatDtype, Precision, ScaleMode, Schedule, TensorParallelMode
from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.config.options import from_options
from hp_muon_plugin.config.trainer import MLA, MoE, Train, default_warmup
from hp_muon_plugin.errors import ConfigError, ConfigErrors

MEGATRON = {"data__kind": DataKind.megatron, "data__path": "x", "data__vocab_size": 9}
TP2 = {"topology__tp": 2, "topology__sequence_parallel": True}


def config() -> Train:
    return Train(optimizer=HpMuon())


def errors_of(changed: Train, world_size: int = 4) -> list[ConfigError]:
    try:
        check_train(changed, world_size=world_size)
    except ConfigErrors as several:
        return list(several.errors)
    except ConfigError as error:
        return [error]
    return []


def changed(**values: Any) -> Train:
    """A valid configuration with dotted options changed."""
    train = copy.deepcopy(config())
    for path, value in values.items():
        *groups, name = path.split("__")
        node: Any = train
        for group in groups:
            node = getattr(node, group)
        assert hasattr(node, name), path
        setattr(node, name, value)
    return train


def test_the_defaults_are_valid() -> None:
    assert errors_of(config()) == []
    assert errors_of(changed(optimizer=AdamW())) == []


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (9, 0), (57, 5), (200, 20), (100_000, 20)])
def test_a_run_of_any_length_has_a_warm_up_that_fits(steps: int, warmup: int) -> None:
    assert errors_of(changed(run__steps=steps)) == []
    assert default_warmup(steps) == warmup


@pytest.mark.parametrize(
    ("values", "option"),
    [
        ({"optimizer__lr": 0.0}, "optimizer.lr"),
        ({"optimizer__lr": float("nan")}, "optimizer.lr"),
        ({"optimizer__momentum": 1.0}, "optimizer.momentum"),
        ({"optimizer__weight_decay": -1.0}, "optimizer.weight_decay"),
        ({"optimizer__adamw__betas": [0.9]}, "optimizer.adamw.betas"),
        ({"optimizer__adamw__betas": [0.9, 1.0]}, "optimizer.adamw.betas"),
        ({"optimizer__scale": ScaleMode.none}, "optimizer.adamw.lr"),
        (
            {"optimizer__tp_mode": TensorParallelMode.distributed, "optimizer__ns_dtype": FloatDtype.float16},
            "optimizer.ns_dtype",
        ),
        ({"optimizer__schedule": Schedule.custom}, "optimizer.coefficients"),
        ({"optimizer__coefficients": [[1.0, 2.0, 3.0]]}, "optimizer.coefficients"),
        ({"optimizer__steps": 0}, "optimizer.steps"),
        ({"topology__tp": 3}, "topology.tp"),
        ({"topology__tp": 0}, "topology.tp"),
        ({"topology__pp": 8}, "topology.tp"),
        ({"topology__sequence_parallel": True}, "topology.sequence_parallel"),
        ({"topology__ep": 2}, "topology.ep"),
        ({"model__num_layers": 3, "topology__pp": 2}, "model.num_layers"),
        ({"model__num_query_groups": 3}, "model.num_attention_heads"),
        ({"model__hidden_size": 130}, "model.hidden_size"),
        ({"model__ffn_hidden_size": 351, "topology__tp": 2}, "model.ffn_hidden_size"),
        ({"run__global_batch_size": 33}, "run.global_batch_size"),
        ({"run__micro_batch_size": 0}, "run.micro_batch_size"),
        ({"lr_schedule__warmup_steps": 200}, "lr_schedule.warmup_steps"),
        ({"lr_schedule__warmup_steps": 5, "run__steps": 5}, "lr_schedule.warmup_steps"),
        ({"lr_schedule__min_ratio": 2.0}, "lr_schedule.min_ratio"),
        ({"data__split": "90,10"}, "data.split"),
        ({"data__split": "90,0,10"}, "data.split"),
        ({"data__split": "a,b,c"}, "data.split"),
        ({"data__split": "inf,1,0"}, "data.split"),
        ({"data__path": "/mine"}, "data.path"),
        ({"data__path": "/mine", "data__vocab_size": 5}, "data.path"),
        ({"data__vocab_size": 5}, "data.vocab_size"),
        ({"data__eod_id": 5}, "data.eod_id"),
        ({"data__cache_dir": ""}, "data.cache_dir"),
        ({**MEGATRON, "data__eod_id": 9, "data__eod_mask_loss": True}, "data.eod_id"),
        ({**MEGATRON, "data__eod_id": 3}, "data.eod_id"),
        ({"dp__bucket_size": 1000}, "dp.bucket_size"),
        ({"run__name": ""}, "run.name"),
        ({"run__dir": " "}, "run.dir"),
        ({"model__hidden_size": 20}, "model.hidden_size"),
        ({"model__mla": MLA(qk_pos_emb_head_dim=5)}, "model.mla.qk_pos_emb_head_dim"),
        ({"data__kind": DataKind.megatron}, "data.path"),
        ({"data__kind": DataKind.megatron, "data__path": "x.bin", "data__vocab_size": 3}, "data.path"),
        ({"platform__precision": Precision.fp16}, "platform.precision"),
    ],
)
def test_a_wrong_value_is_named_with_a_fix(values: dict[str, Any], option: str) -> None:
    found = errors_of(changed(**values))
    assert option in [error.option for error in found]
    assert all("\n  fix: " in str(error) for error in found)


@pytest.mark.parametrize(
    ("values", "option"),
    [
        ({"model__moe__top_k": 9}, "model.moe.top_k"),
        ({"model__moe__num_experts": 6, "topology__ep": 4}, "model.moe.num_experts"),
        ({"model__moe__ffn_hidden_size": 63, "topology__etp": 2}, "model.moe.ffn_hidden_size"),
        ({"topology__tp": 2}, "topology.sequence_parallel"),
        ({"topology__ep": 8}, "topology.ep"),
        ({**TP2, "model__moe__shared_ffn_hidden_size": 33}, "model.moe.shared_ffn_hidden_size"),
        ({"model__moe__shared_ffn_hidden_size": 0}, "model.moe.shared_ffn_hidden_size"),
        ({"model__moe__ffn_hidden_size": 0}, "model.moe.ffn_hidden_size"),
        ({"model__moe__aux_loss_coeff": -1.0}, "model.moe.aux_loss_coeff"),
    ],
)
def test_experts_are_checked_against_the_ranks(values: dict[str, Any], option: str) -> None:
    train = config()
    train.model.moe = MoE()
    base = copy.deepcopy(train)
    for path, value in values.items():
        *groups, name = path.split("__")
        node: Any = base
        for group in groups:
            node = getattr(node, group)
        setattr(node, name, value)
    assert errors_of(train) == []
    assert option in [error.option for error in errors_of(base)]


def test_options_that_work_together_are_accepted() -> None:
    assert errors_of(changed(dp__bucket_size=1000, dp__overlap_grad_reduce=True)) == []
    assert errors_of(changed(data__eod_mask_loss=True, data__reset_attention_mask=True)) == []
    assert errors_of(changed(model__mla=MLA(), model__num_query_groups=3)) == []  # it has none


def test_eight_ranks_share_the_default_batch() -> None:
    """README: `hp-muon train --dry-run topology.ranks=8 topology.ep=8` was refused."""
    train = changed(model__moe=MoE(), topology__ep=8)
    assert errors_of(train, world_size=8) == []


def test_all_errors_come_together() -> None:
    found = errors_of(changed(optimizer__lr=-1.0, topology__tp=3, data__split="x"))
    assert {"optimizer.lr", "topology.tp", "data.split"} <= {error.option for error in found}


def test_the_message_says_value_reason_and_fix() -> None:
    error = ConfigError("dp.replicate", 5, "768 ranks cannot be split into 5 equal copies", "choose a divisor of 768")
    assert str(error) == "dp.replicate=5: 768 ranks cannot be split into 5 equal copies\n  fix: choose a divisor of 768"


def test_options_come_from_mappings_with_their_types() -> None:
    options = from_options(HpMuon, {"lr": 1, "scale": "none", "adamw": {"lr": "3e-3"}}, prefix="optimizer")
    assert (options.lr, options.scale, options.adamw.lr) == (1.0, ScaleMode.none, 3e-3)
    check_optimizer(options)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"momentm": 0.9},
            r"optimizer\.momentm=.*: there is no such option\n  fix: did you mean optimizer\.momentum\?",
        ),
        ({"adamw": {"bettas": [1, 2]}}, r"optimizer\.adamw\.bettas"),
        ({"steps": "five"}, r"optimizer\.steps"),
        ({"scale": "big"}, r"expected one of \[match_rms_adamw, spectral"),
    ],
)
def test_wrong_mappings_name_the_option(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        from_options(HpMuon, given, prefix="optimizer")


def test_defaults_have_one_source() -> None:
    """Megatron: --muon-momentum defaulted to 0.9 on the command line and 0.95 in the config."""
    from pathlib import Path

    text = (Path(__file__).parents[2] / "conf" / "optimizer" / "hp_muon.yaml").read_text()
    values = [line for line in text.splitlines() if line and not line.startswith(("#", "defaults:", "  - "))]
    assert values == []


def test_latent_attention_is_not_split_over_tensor_parallel_ranks() -> None:
    """The dry run planned it, and every rank refused it when the model was built."""
    assert errors_of(changed(model__mla=MLA())) == []
    (error,) = errors_of(changed(model__mla=MLA(), **TP2))
    assert "topology.tp=2" in str(error)
