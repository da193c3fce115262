"""``fsdp2`` that conversions wrote, loaded by torch's own DCP into ``fully_shard`` and AdamW: trains on the same."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dist_pool import run_ranks
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from hp_muon_plugin.checkpoint import convert
from hp_muon_plugin.checkpoint.canonical import Key, Kind, Target
from hp_muon_plugin.checkpoint.formats import open_checkpoint
from hp_muon_plugin.train.setup import Launch
from lane.any_fixture import described, folder_of
from lane.harness import dense, start, train_config
from lane.upstream_model import SEQ, VOCAB, model_of
from lane.upstream_runs import STEPS, sha256
from tests.checkpoint.others import SHARED

pytestmark = pytest.mark.once
NAMES, ROUTES = ["mcore016/moe_ep2_dp2_dpr"], [["torch_dist"]]
if SHARED.is_dir() and os.environ.get("HP_MUON_ALL_PAIRS"):
    ROUTES += [["hp"]]
    NAMES += ["torch_fsdp2/dense_nested_ws2", "torch_fsdp2/moe_nested_ws2", "torch_fsdp2/tied_nested_ws2"]


def _trained(
    launch: Launch, body: dict[str, Any], ckpt: Path
) -> tuple[dict[str, Any], list[Any], list[float], list[Any]]:
    """Whole tensors and what a rank holds of them, as loaded; losses of two steps, and what it holds then."""
    start(launch, train_config(dense()))
    model = model_of({**body, "bf16": False, "ep": 1})
    for layer in model.decoder.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.7, betas=(0.5, 0.6), weight_decay=0.3)
    _step(model, optimizer, launch.rank)  # makes state, which is not what any checkpoint has
    state = {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=ckpt)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    loaded, whole = _held(model, optimizer), {}
    for name, param in model.named_parameters():
        state = {kind: sha256(value.full_tensor()) for kind, value in optimizer.state[param].items() if value.dim()}
        whole[name] = {"main": sha256(param.full_tensor()), **state, "step": float(optimizer.state[param]["step"])}
    losses = [_step(model, optimizer, 100 * number + launch.rank) for number in range(STEPS)]
    return whole, loaded, losses, _held(model, optimizer)


def _step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> float:
    tokens = torch.randint(0, VOCAB, (2, SEQ + 1), generator=torch.Generator().manual_seed(seed))
    mask = torch.triu(torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool), 1)
    loss = model(tokens[:, :-1], torch.arange(SEQ).expand(2, -1), mask, labels=tokens[:, 1:]).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss)


def _held(model: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
    found: list[Any] = [[group["lr"], group["betas"], group["weight_decay"]] for group in optimizer.param_groups]
    for name, param in model.named_parameters():
        kinds = {kind: sha256(_local(value)) for kind, value in optimizer.state[param].items()}
        found.append((name, sha256(_local(param)), kinds))
    return found


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.slow  # conversions, and loads on two ranks
@pytest.mark.parametrize("name", NAMES)
def test_fully_shard_trains_on_as_if_never_converted(name: str, tmp_path: Path) -> None:
    folder = folder_of(name, tmp_path)
    source = open_checkpoint(folder / "ckpt")
    body = described(source, folder)
    ckpts = [folder / "ckpt"] if name.startswith("torch_fsdp2") else []
    for route in ROUTES:
        ckpt = folder / "ckpt"
        for to in [*route, "fsdp2"]:
            found = convert.plan(open_checkpoint(ckpt), to, Target())
            assert all("random state" in line for line in found.losses), found.losses
            ckpt = tmp_path / "_".join([*route, to])
            convert.convert(found, ckpt, drop=bool(found.losses))
        ckpts.append(ckpt)
    wanted, *others = (run_ranks(2, _trained, body, _dcp(ckpt)) for ckpt in ckpts)
    for found_ in others:
        assert found_ == wanted
    whole, loaded, losses, later = wanted[0]
    for name_, kinds in whole.items():
        assert kinds.pop("step") == source.state().steps[name_]
        for kind, value in kinds.items():
            key = Key(name_, kind) if Key(name_, kind) in source.tensors() else Key(name_, Kind.weight)
            assert value == sha256(source.read(key)), key
    assert loaded != later
    assert losses[0] < 5.5
    assert loaded[0][0] == pytest.approx(0.01, rel=0.2)


def _dcp(ckpt: Path) -> Path:
    return next(path.parent for path in ckpt.rglob(".metadata"))
