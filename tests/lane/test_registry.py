"""hp_muon in Megatron's own table of optimizers: built by upstream's factory, without the hook on it."""

import importlib.util
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_pool import run_ranks

from hp_muon_plugin.config.choices import Precision
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import Model, Topology, Train
from hp_muon_plugin.errors import HookError, HpMuonError
from hp_muon_plugin.megatron import install, uninstall
from hp_muon_plugin.train.setup import Launch
from lane.harness import build, dense, moe, optimizer_config, train, train_config, whole_weights, wrapped_model
from lane.script_runs import MOCK, MOE, SCRIPT, script, script_alone

_NO_TABLE = "megatron-core has this table from 0.18 on, and needs emerging-optimizers for it"


@pytest.fixture(autouse=True)
def _has_table() -> None:
    if importlib.util.find_spec("megatron.core.optimizer.emerging_optimizers") is None:
        assert "registry" not in [entry.hook.name for entry in install().hooks]
        pytest.skip(_NO_TABLE)
    if importlib.util.find_spec("emerging_optimizers") is None:
        pytest.skip(_NO_TABLE)


def _only(hooks: str) -> None:
    os.environ["HP_MUON_HOOKS"] = hooks  # of this rank, which is a process of its own


def _trained(launch: Launch, config: Train, hooks: str) -> Any:
    _only(hooks)
    ready = train(build(launch, config), 6)
    report = install(config.optimizer)
    report.assert_used()
    kinds = [type(part).__name__ for part in getattr(ready.optimizer, "chained_optimizers", [ready.optimizer])]
    return whole_weights(ready), ready.losses, ready.norms, str(report), kinds


@pytest.mark.parametrize(
    ("ranks", "model", "topology", "precision"),
    [
        (2, moe(), Topology(ep=2), Precision.fp32),
        (2, moe(), Topology(ep=2), Precision.bf16),
        (4, dense(), Topology(tp=2), Precision.bf16),
        (4, dense(num_layers=4), Topology(pp=2), Precision.fp32),
    ],
)
def test_upstreams_factory_trains_with_our_muon(
    ranks: int, model: Model, topology: Topology, precision: Precision
) -> None:
    """In bf16 Megatron puts float32 masters into the groups after construction; in MoE there are two of ours.

    AdamW is torch's and not ours, and norms add up in another order, which a bf16 weight may round otherwise.
    """
    config = train_config(model, topology, precision=precision, optimizer=HpMuon(lr=5e-3))
    hooked = run_ranks(ranks, _trained, config, "optimizer,guard")
    upstream = run_ranks(ranks, _trained, config, "registry,guard")
    close = 1e-6 if precision is Precision.fp32 else 1e-3
    for (weights, losses, norms, *_), (others, other_losses, other_norms, told, kinds) in zip(
        hooked, upstream, strict=True
    ):
        assert "_EMERGING_OPTIMIZERS['hp_muon']" in told
        assert "get_megatron_optimizer" not in told
        assert set(kinds) == {"FP32Optimizer" if precision is Precision.fp32 else "Float16OptimizerWithFloat16Params"}
        assert len(kinds) == (3 if topology.ep > 1 else 2)  # dense matrices, those of experts, and the rest
        assert other_losses == pytest.approx(losses, rel=close)
        assert other_norms == pytest.approx(norms, rel=10 * close)
        for name, weight in weights.items():
            torch.testing.assert_close(others[name], weight, rtol=10 * close, atol=close)


def _complaint(launch: Launch, hooks: str, name: str, given: Any, data_parallel: Any, values: dict[str, Any]) -> str:
    import megatron.core.optimizer as factory

    _only(hooks)
    install(given, data_parallel=data_parallel)
    model = wrapped_model(launch, train_config(moe()))
    try:
        factory.get_megatron_optimizer(optimizer_config(name, **values), [model])
    except HpMuonError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "given", "data_parallel", "values", "message"),
    [
        ("hp_muon", None, {}, {}, "the model is sharded by HP-FSDP, and Megatron's own factory would take shards"),
        ("dist_hp_muon", None, None, {}, "optimizer=dist_hp_muon: is Megatron's way to ask for its layer-wise"),
        ("hp_muon", None, None, {"use_layer_wise_distributed_optimizer": True}, "use_layer_wise_distributed_optimizer"),
        ("hp_muon", {"adamw": {"lr": 1e-3}}, None, {}, "optimizer.adamw.lr=0.001: Megatron's own factory builds"),
        ("hp_muon", {"adamw": {"weight_decay": 0.0}}, None, {}, "optimizer.adamw.weight_decay=0.0: Megatron's own"),
        ("hp_muon", {"adamw_params": ["*linear_proj*"]}, None, {}, r"optimizer.adamw_params=\['\*linear_proj\*'\]"),
        (
            "hp_muon",
            {"lr": 0.5, "clip_mode": "adamw_only"},
            None,
            {},
            "(?s)optimizer.lr=0.5.*optimizer.clip_mode=adamw_only",
        ),
    ],
)
def test_what_upstreams_factory_cannot_honour_is_refused(
    name: str, given: Any, data_parallel: Any, values: dict[str, Any], message: str
) -> None:
    complaint = run_ranks(1, _complaint, "registry,wrapper", name, given, data_parallel, values)[0]
    assert re.search(message, complaint), complaint
    assert "fix:" in complaint


def _around_the_hook(launch: Launch) -> list[str]:
    """A trainer that kept the factory in a closure before the plugin was there."""
    import megatron.core.optimizer as factory

    own = factory.get_megatron_optimizer

    def build_by(config: Any, chunks: Any, make: Any = own) -> Any:
        return make(config, chunks)

    report = install()
    optimizer = build_by(optimizer_config(), [wrapped_model(launch)])
    report.assert_used()
    return sorted(type(part.optimizer).__name__ for part in optimizer.chained_optimizers)


def test_a_trainer_that_goes_around_the_hook_gets_our_muon() -> None:
    assert run_ranks(1, _around_the_hook)[0] == ["AdamW", "RegisteredMuon"]


def test_the_table_is_upstreams_again_after_uninstalling() -> None:
    from megatron.core.optimizer import emerging_optimizers

    table = emerging_optimizers._EMERGING_OPTIMIZERS
    before = dict(table)
    report = install()
    assert set(table) - set(before) == {"hp_muon"}
    assert "registry (entry): megatron.core.optimizer.emerging_optimizers._EMERGING_OPTIMIZERS['hp_muon']" in str(
        report
    )
    uninstall()
    assert table == before


def test_an_entry_of_somebody_else_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.optimizer import emerging_optimizers

    theirs = object()
    monkeypatch.setitem(emerging_optimizers._EMERGING_OPTIMIZERS, "hp_muon", theirs)
    with pytest.raises(HookError, match="is there already, and not ours"):
        install()
    assert emerging_optimizers._EMERGING_OPTIMIZERS["hp_muon"] is theirs


_OWN_SCRIPT = """
import runpy
import hp_muon_plugin.megatron


def parse_and_choose(**options):
    args = parse(**options)
    args.optimizer = "hp_muon"
    return args


if __name__ == "__main__":  # Megatron's writer starts processes, which import this
    hp_muon_plugin.megatron.install()
    script = runpy.run_path({path!r})
    parse = script["parse_and_validate_args"]
    script["main"].__globals__["parse_and_validate_args"] = parse_and_choose
    script["main"]()
"""
_CPU = ["--distributed-backend", "gloo", "--transformer-impl", "local", "--no-gradient-accumulation-fusion"]


def _own_script(folder: Path) -> str:
    """A Megatron script with two lines for the plugin: one installs it, one names it after parsing."""
    path = folder / "pretrain_mine.py"
    path.write_text(_OWN_SCRIPT.format(path=SCRIPT))
    return str(path)


@pytest.mark.slow  # upstream's pretrain() four times, and its writer, which starts processes on every rank
@pytest.mark.timeout(400)
def test_upstreams_trainer_trains_saves_and_goes_on_with_its_own_factory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moe_ep2 = [*MOCK, *MOE, "--expert-model-parallel-size", "2"]
    launched = script(2, *moe_ep2, "--optimizer", "hp_muon")
    monkeypatch.setenv("HP_MUON_HOOKS", "registry,guard")
    path, line = _own_script(tmp_path), [*moe_ep2, *_CPU]
    saved = ["--save", str(tmp_path / "ckpt"), "--save-interval", "2"]
    own = script_alone(2, path, *line, *saved)
    assert (launched.code, own.code) == (0, 0), own.text[-2000:]
    assert own.norms == launched.norms
    assert [float(loss) for loss in own.losses] == pytest.approx([float(x) for x in launched.losses], rel=1e-6)
    (tmp_path / "ckpt" / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = script_alone(2, path, *line, "--load", str(tmp_path / "ckpt"))
    assert "successfully loaded checkpoint" in resumed.text
    assert resumed.losses[0] == own.losses[2]
    assert resumed.norms == own.norms[2:]
    assert resumed.validation == own.validation


def test_megatrons_parser_refuses_the_name() -> None:
    """Why a script names it after parsing, or is run by ``hp_muon_plugin.run``.

    ``pretrain()`` parses the line again by itself, so that ``extra_args_provider`` could not add the name.
    """
    refused = script_alone(1, SCRIPT, *MOCK, *_CPU, "--optimizer", "hp_muon")
    assert refused.code == 2
    assert "argument --optimizer: invalid choice: 'hp_muon'" in refused.text
