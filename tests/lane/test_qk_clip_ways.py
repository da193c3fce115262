"""When QK-clip does not count, how other attention gives its logits, and what is refused."""

from typing import Any

import pytest
import torch
from dist_pool import RankError, run_ranks

from hp_muon_plugin.config.choices import Precision
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import Model, Topology
from hp_muon_plugin.train import setup
from hp_muon_plugin.train.setup import Launch
from lane.harness import VOCAB, Ready, batches, build, start, train, train_config, whole_weights
from lane.test_qk_clip import DDP, GROUPED, one_layer, run


def _skipped(launch: Launch) -> Any:
    ready = build(launch, train_config(GROUPED, optimizer=HpMuon(qk_clip=1e-3)))
    before = whole_weights(ready)
    before = {name: weight.clone() for name, weight in before.items()}
    trainer, stream = ready.trainer, batches(ready.config, 0, 1)
    ready.optimizer.zero_grad()
    ready.model.zero_grad_buffer()
    trainer._forward_backward(stream, forward_only=False)
    next(ready.model.parameters()).main_grad.fill_(float("nan"))
    succeeded, *_ = ready.optimizer.step()
    ready.optimizer.zero_grad()
    largest = ready.optimizer.qk_clip.largest.clone()
    return succeeded, all(torch.equal(before[n], w) for n, w in whole_weights(ready).items()), largest


@pytest.mark.once
def test_a_skipped_step_clips_nothing_and_is_forgotten() -> None:
    succeeded, is_unchanged, largest = run_ranks(1, _skipped)[0]
    assert not succeeded
    assert is_unchanged
    assert torch.isinf(largest).all()


def _held_out(launch: Launch) -> Any:
    ready = build(launch, train_config(GROUPED, optimizer=HpMuon(qk_clip=1e-3)))
    ready.model.eval()
    with torch.no_grad():
        ready.trainer._forward_backward(batches(ready.config, 0, 1), forward_only=True)
    return ready.optimizer.qk_clip.largest


@pytest.mark.once
def test_evaluation_does_not_count() -> None:
    assert torch.isinf(run_ranks(1, _held_out)[0]).all()


@pytest.mark.parametrize("model", [one_layer(qk_layernorm=True)], ids=["qk-layernorm"])
def test_what_cannot_be_clipped_is_refused_by_the_build_as_well(model: Model) -> None:
    with pytest.raises(RankError, match=r"optimizer\.qk_clip"):
        run_ranks(1, run, model, Topology(), DDP, Precision.fp32, 1.0)


class OutsideLogits(torch.nn.Module):
    """A core attention with Transformer Engine's contract: it keeps a running maximum until it is told to forget.

    Transformer Engine needs CUDA; this computes with megatron-core's attention, and only the contract is its own.
    """

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.current_max_attn_logits: torch.Tensor | None = None
        inner.scale_mask_softmax.register_forward_pre_hook(self._see)

    def _see(self, softmax: Any, arguments: tuple[Any, ...]) -> None:
        found = arguments[0].detach().masked_fill(arguments[1], float("-inf")).amax((0, 2, 3))
        before = self.current_max_attn_logits
        self.current_max_attn_logits = found if before is None else torch.max(before, found)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.inner(*args, **kwargs)


def _outside(launch: Launch, is_outside: bool) -> Any:
    config = train_config(GROUPED, optimizer=HpMuon(lr=0.05, qk_clip=0.02))
    platform = start(launch, config)
    model, _ = setup.build_model(config, VOCAB, platform)
    if is_outside:
        attention = model.module.decoder.layers[0].self_attention
        attention.core_attention = OutsideLogits(attention.core_attention)
    optimizer = setup.build_optimizer(config, model)
    from hp_muon_plugin.train.loop import Trainer
    from hp_muon_plugin.train.progress import Silent

    schedule = setup.build_schedule(config, optimizer)
    trainer = Trainer(config, model, optimizer, schedule, data=None, platform=platform, log=None, display=Silent())
    ready, largest = Ready(config, model, optimizer, schedule, trainer), []
    for _ in range(6):
        train(ready, 1)
        largest.append(optimizer.qk_clip.largest_last.clone())
    return torch.stack(largest), whole_weights(ready)


@pytest.mark.once
def test_logits_that_attention_gives_itself_clip_alike() -> None:
    """megatron-core 0.16 never forgets them, so that a head would be clipped for what it did long ago."""
    wanted, weights = run_ranks(1, _outside, False)[0]
    largest, same = run_ranks(1, _outside, True)[0]
    assert wanted.max() > 0.02
    assert torch.equal(largest, wanted)
    assert all(torch.equal(weights[name], same[name]) for name in weights)


def _cannot(launch: Launch, way: str) -> None:
    options = HpMuon(qk_clip=None if way == "own" else 1.0)
    config = train_config(GROUPED, optimizer=options)
    model, core_config = setup.build_model(config, VOCAB, start(launch, config))
    if way == "own":
        core_config.qk_clip = True
    else:
        model.module.decoder.layers[0].self_attention.core_attention = torch.nn.Identity()
    setup.build_optimizer(config, model)


@pytest.mark.once
@pytest.mark.parametrize(
    ("way", "words"), [("own", "qk_clip=True: .*not the masters"), ("silent", "Identity, which does not give")]
)
def test_what_cannot_be_seen_or_would_be_undone_is_refused(way: str, words: str) -> None:
    with pytest.raises(RankError, match=words):
        run_ranks(1, _cannot, way)
