"""What the launcher sees before a rank starts."""

from pathlib import Path
from typing import Any

import pytest

from hp_muon_plugin.config.optimizer import AdamW, HpMuon
from hp_muon_plugin.config.trainer import MLA, Data, MoE, Train
from hp_muon_plugin.errors import ConfigError, HookError
from hp_muon_plugin.megatron.versions import parse_version
from hp_muon_plugin.train.preflight import check_hooks_variable, check_machine, check_plan

VERSION = parse_version("0.16.1")


def train(**options: Any) -> Train:
    return Train(optimizer=HpMuon(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"muon_params": ["decoder.layers.99.*"]},
            r"optimizer\.muon_params=decoder\.layers\.99\.\*: fits no parameter",
        ),
        ({"adamw_params": ["nothing"]}, r"optimizer\.adamw_params=nothing: fits no parameter"),
        ({"muon_params": ["*final_layernorm*"]}, "which is no matrix"),
        ({"adamw_params": ["*"]}, r"optimizer\.adamw_params=\[\*\]: leaves no parameter for Muon"),
        ({"ns_table": "/"}, r"^optimizer\.ns_table=/: cannot be read \(Is a directory\)\n  fix: let this user"),
        ({"ns_table": "/gone.json"}, r"^optimizer\.ns_table=/gone\.json: there is no such file\n  fix: write one"),
    ],
)
def test_patterns_and_tables_are_checked_without_a_rank(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_plan(train(**options))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"rows": [{}]}', '{"rows": [3]}'])
def test_a_file_that_is_no_table_is_named(content: str, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(content)
    with pytest.raises(
        ConfigError, match=r"^optimizer\.ns_table=\S*table\.json: is no table of algorithms \(.*\)\n  fix: .*$"
    ):
        check_plan(train(ns_table=str(path)))


def test_what_is_right_passes() -> None:
    check_plan(train(muon_params=["embedding.*"], adamw_params=["*.layers.0.*"]))
    check_plan(Train(optimizer=AdamW()))
    latent = train(adamw_params=["*linear_kv_down_proj.weight"])
    latent.model.mla = MLA()
    check_plan(latent)


def test_names_of_grouped_experts_are_left_to_the_ranks() -> None:
    grouped = train(adamw_params=["*.experts.weight1"])
    grouped.model.moe = MoE(grouped_gemm=True)
    check_plan(grouped)


def test_a_part_of_the_built_in_text_can_be_too_small() -> None:
    small = train()
    small.data.split = "99.9999,0.0001,0"
    with pytest.raises(ConfigError, match=r"data\.split=99\.9999,0\.0001,0: the held-out part has 0 of"):
        check_plan(small)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("nonsense", "HP_MUON_HOOKS=nonsense: there is no hook 'nonsense'"),
        (",", "HP_MUON_HOOKS=,: there is no hook '', ''"),
        ("guard", "HP_MUON_HOOKS=guard: without the hook optimizer Megatron does not know optimizer=hp_muon"),
    ],
)
def test_the_variable_of_the_hooks_is_named(value: str, message: str) -> None:
    """With `guard` alone training failed with Megatron's "hp_muon optimizer is not supported"."""
    with pytest.raises(HookError, match=message) as caught:
        check_hooks_variable(value, VERSION)
    assert "fix: unset HP_MUON_HOOKS" in str(caught.value)


@pytest.mark.parametrize("value", [None, "", "optimizer", "optimizer, guard"])
def test_hooks_that_suffice_are_accepted(value: str | None) -> None:
    check_hooks_variable(value, VERSION)


def test_hooks_are_of_no_concern_to_adamw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("megatron.core")
    monkeypatch.setenv("HP_MUON_HOOKS", "nonsense")
    data = Data(cache_dir=str(tmp_path))
    check_machine(Train(optimizer=AdamW(), data=data))
    with pytest.raises(HookError, match="HP_MUON_HOOKS"):
        check_machine(Train(optimizer=HpMuon(), data=data))


def test_a_cache_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"data\.cache_dir=.*file: cannot be written to"):
        check_machine(Train(optimizer=AdamW(), data=Data(cache_dir=str(tmp_path / "file"))))
