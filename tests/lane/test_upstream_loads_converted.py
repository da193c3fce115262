"""Fixtures and what became of them, loaded by megatron-core's own code: it trains on the same from both.

Every fixture of the lane's own version is loaded as it is, and after conversions there and back or into another
format: weights, masters, moments, steps, values of groups, schedule and random states are the same to the bit, and
so are the losses and all of that after two more steps. HP_MUON_ALL_PAIRS=1 takes all fixtures by all routes.

Left out, because upstream cannot load it: mcore019/dense_dp2_fr_mb (written corrupt), ``fully_sharded_model_space`` in
a version after 0.12, our ``torch_dist`` with a distributed optimizer in 0.12, ``torch_dcp`` (0.19.2: TypeError), the
legacy format with float32 weights and a distributed optimizer, or with layer-wise Muon and buffer layout (its chain has
no ``save_state_dict_to_file``: AttributeError).
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dist_pool import run_ranks

from hp_muon_plugin.checkpoint import convert
from hp_muon_plugin.checkpoint.canonical import Target
from hp_muon_plugin.checkpoint.formats import open_checkpoint
from hp_muon_plugin.errors import HookError
from hp_muon_plugin.megatron.versions import core_version
from lane.upstream_runs import Load, Outcome, outcomes
from tests.checkpoint.fixtures import CARRIED, CORRUPT, SHARED, truth, unpacked


def _lane() -> str:
    """Family of the fixtures of the installed version; any where there is none, and nothing here runs."""
    try:
        return f"mcore0{core_version().minor}"
    except HookError:
        return "mcore016"


LANE = _lane()
CHOSEN = {
    "mcore012": ["moehet_ep2_dp2_fsms", "dense_dp2_fsms", "dense_dp2_legacy"],
    "mcore016": ["moe_ep2_dp2_dpr", "dense_dp2_legacy", "tied_dp2_fr"],
    "mcore019": ["muon_lwl_dense_dp2_dpr", "moe_ep2_dp2_fr", "dense_dp2_legacy", "muon_moe_ep2_dp2"],
}
VIA = ["hp", "fsdp2", "torch_dcp", "fsdp_dtensor", "hyper_parallel"]
SHOWN = ["hp", "fsdp2"]
ALL = bool(os.environ.get("HP_MUON_ALL_PAIRS"))


def _names() -> list[str]:
    every = [path.name for path in (SHARED / LANE).glob("*") if f"{LANE}_{path.name}" != CORRUPT]
    return sorted(every) if ALL and every else CHOSEN[LANE]


def _fixture(name: str, folder: Path) -> Path:
    full = f"{LANE}_{name}"
    if full not in CARRIED and not SHARED.is_dir():
        pytest.skip(f"{full} is in the shared folder, which is not at {SHARED}: set HP_MUON_SHARED")
    return unpacked(full, folder)


def _sharding(body: dict[str, Any], to: str) -> str:
    """The form that the fixture's own optimizer loads."""
    if to == "torch":
        return "distributed" if body["distributed_optimizer"] else "layer_wise" if body["layer_wise"] else "plain"
    if body["layer_wise"]:
        return "layer_wise_fully_reshardable" if body.get("lw_layout") else "layer_wise"
    return "fully_reshardable" if body["distributed_optimizer"] else "none"


def _routes(body: dict[str, Any]) -> dict[str, list[str]]:
    """Formats on the way, the last of them for Megatron to load."""
    own = body["format"]
    other = "torch" if own == "torch_dist" else "torch_dist"
    if LANE == "mcore012" and body["distributed_optimizer"]:
        own = other = "torch"  # 0.12 wants fully_sharded_model_space, which we do not write
    if not body["bf16"] and body["distributed_optimizer"]:
        own = other = "torch_dist"  # load_parameter_state writes into leaves that require gradients: RuntimeError
    if body.get("lw_layout"):
        own = other = "torch_dist"
    routes = {f"{via} {own}": [via, own] for via in (VIA if ALL else SHOWN)}
    routes[f"{other}"] = [other]
    if other != own and ALL:
        routes[f"{other} {own}"] = [other, own]
    return routes


def _converted(ckpt: Path, route: list[str], body: dict[str, Any], folder: Path) -> Load:
    """A fixture that went through some formats, and whether its random states came along."""
    with_random = True
    for number, to in enumerate(route):
        sharding = _sharding(body, to) if to in ("torch", "torch_dist") else None
        target = Target(ep=body["ep"], sharding=sharding, megatron=core_version().lane)
        found = convert.plan(open_checkpoint(ckpt), to, target)
        assert all("random state" in line for line in found.losses), found.losses
        with_random = with_random and not found.losses
        ckpt = folder / f"{number}_{to}"
        convert.convert(found, ckpt, drop=bool(found.losses))
        found.source.close()
    return Load(ckpt, route[-1] == "torch", with_random)


def _differences(one: Outcome, other: Outcome) -> list[str]:
    """Names of what is not the same."""
    if not (one.draws and other.draws):
        one, other = replace(one, draws={}), replace(other, draws={})
    found = [name for name in ("state", "draws", "losses", "later") if getattr(one, name) != getattr(other, name)]
    return found + [name for name in one.weights if one.weights[name] != other.weights.get(name)]


@pytest.mark.slow  # four or more conversions and loads
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", _names())
def test_trains_on_as_if_never_converted(name: str, tmp_path: Path) -> None:
    fixture = _fixture(name, tmp_path)
    hashes, body = truth(fixture)
    loads = {"as it is": Load(fixture / "ckpt", body["format"] == "torch")}
    for route, formats in _routes(body).items():
        loads[route] = _converted(fixture / "ckpt", formats, body, tmp_path / route.replace(" ", "_"))
    ranks = run_ranks(body["world_size"], outcomes, body, list(loads.values()), timeout_s=200.0)
    weights = {key.name: value for key, value in hashes.items() if key.kind in ("weight", "buffer")}
    for rank, found in enumerate(ranks):
        for name_, value in found[0].weights.items():
            assert value == weights[name_], name_
        for route, outcome in zip(loads, found, strict=True):
            assert not _differences(found[0], outcome), (rank, route)
    assert len({tuple(outcome.losses) for outcome in ranks[0]}) == 1
    assert ranks[0][0].draws == body["next_rng_draws_rank0"]
