"""Training on replicas of a sharded model, from real backward passes: losses, weights and norms of one process."""

from typing import Any

import pytest
import torch
from dist_pool import joined, run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hp_muon_plugin.errors import GradientError
from hp_muon_plugin.fsdp import hp_fully_shard
from hp_muon_plugin.muon import build_optimizer
from hp_muon_plugin.muon.distributed.shards import local_part
from hp_muon_plugin.platform.counting import CountingWire
from hp_muon_plugin.platform.wire import C10dWire, Collective
from hp_muon_plugin.train.setup import Launch
from muon.sharded_weights import built, whole_weights

STEPS, BATCH = 3, 8
OPTIONS: dict[str, Any] = {"clip_grad": 0.05, "lr": 0.02, "missing_grad": "error"}
MODES = ("hp replicate", "hp broadcast", "hp shard", "torch")
ONCE = ("hp broadcast", "hp shard")  # each replica has the gradients of other weights


class Tiny(nn.Module):
    """Embedding, layers, a norm, and an output that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 12)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(12, 28), "down": nn.Linear(28, 12)}) for _ in range(2)
        )
        self.norm = nn.LayerNorm(12)
        self.output = nn.Linear(12, 11, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer["down"](torch.relu(layer["up"](x)))
        return self.output(self.norm(x))


def _model() -> Tiny:
    torch.manual_seed(3)
    return Tiny()


def _sharded(mode: str, mesh: Any) -> Tiny:
    model = _model()
    if mode == "torch":
        for layer in model.layers:
            fully_shard([layer["up"], layer["down"]], mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    for layer in model.layers:
        for part in layer.values():
            hp_fully_shard(part, mesh)
    hp_fully_shard(model, mesh, outer=mode.removeprefix("hp "), outer_bucket_bytes=1)
    return model


def _train(model: nn.Module, optimizer: Any, rank: int, size: int) -> tuple[list[float], list[float]]:
    """Losses of the rank's share of each batch, and gradient norms of the whole."""
    losses, norms = [], []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, 11, (BATCH, 5), generator=generator)
        mine = tokens[rank * BATCH // size : (rank + 1) * BATCH // size]
        loss = nn.functional.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        norms.append(optimizer.grad_norms_last.total)
    return losses, norms


def _run(launch: Launch, mode: str, divide: bool) -> Any:
    joined(launch)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    found = []
    for strategy in ("auto", "allgather", "allgather_dedup", "alltoall", "gram"):
        model = _sharded(mode, mesh)
        wire = CountingWire(C10dWire())
        optimizer = built(model, given={"wire": wire}, strategy=strategy, divide_replicas=divide, **OPTIONS)
        losses, norms = _train(model, optimizer, launch.rank, launch.world_size)
        with torch.no_grad():
            model(torch.zeros(2, 4, dtype=torch.int64))  # weights of other owners have arrived
        if mode == "torch":
            model.reshard()  # a root keeps its weights whole after forward
        sent = wire.of(Collective.BROADCAST, "replicate").num_bytes
        groups = [group["params"] for group in optimizer.param_groups if group["algorithm"] == "muon"]
        held = sum(4 * local_part(param).numel() for params in groups for param in params)
        assert sent == (STEPS * held if divide and mode not in ONCE else 0), (strategy, sent)
        done = torch.tensor([optimizer.num_orthogonalized])
        torch.distributed.all_reduce(done)
        found.append((losses, norms, {n: w.numpy() for n, w in whole_weights(model).items()}, int(done)))
        _check_bad_step(launch, model, optimizer)
    return found


def _check_bad_step(launch: Launch, model: nn.Module, optimizer: Any) -> None:
    """A NaN that one rank alone holds, then a parameter that it alone unfreezes, or loses the gradient of."""
    before = [p.detach().clone() for p in model.parameters()]
    if launch.rank == 1:
        mine = [p for p in model.parameters() if p.grad is not None]
        grads = [g.to_local() if hasattr(g, "to_local") else g for g in (p.grad for p in mine)]
        next(g for g in grads if g is not None and g.numel()).view(-1)[0] = torch.nan
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    if launch.rank == 1:
        mine[0].grad = None
    with pytest.raises(GradientError):
        optimizer.step()


@pytest.mark.parametrize(
    ("mode", "divide"), [*((mode, False) for mode in MODES), ("hp replicate", True), ("torch", True)]
)
def test_replicas_train_as_one_process_does(mode: str, divide: bool) -> None:
    model = _model()
    optimizer = build_optimizer(model, **OPTIONS)
    losses, norms = _train(model, optimizer, 0, 1)
    assert min(norms) > 2 * OPTIONS["clip_grad"]
    answers = run_ranks(4, _run, mode, divide)
    for number in range(len(answers[0])):
        per_rank = [answer[number] for answer in answers]
        mean = torch.tensor([found[0] for found in per_rank]).mean(0)
        torch.testing.assert_close(mean, torch.tensor(losses), rtol=1e-5, atol=1e-6)
        for _, found, weights, done in per_rank:
            torch.testing.assert_close(torch.tensor(found), torch.tensor(norms), rtol=1e-4, atol=1e-6)
            for name, param in model.named_parameters():
                torch.testing.assert_close(torch.from_numpy(weights[name]), param.detach(), rtol=1e-4, atol=2e-5)
            matrices = 4 * STEPS
            if number == 3:  # alltoall: each once per replica that updates it
                assert done == matrices * (1 if divide or mode in ONCE else 2)
