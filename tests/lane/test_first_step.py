"""Whoever trains a model that the optimizer does not update is told in the first step, on every rank."""

import logging
from typing import Any

import pytest
from dist_pool import run_ranks

from hp_muon_plugin.config.trainer import Topology, Train
from hp_muon_plugin.errors import HookError
from hp_muon_plugin.megatron import install
from hp_muon_plugin.platform.base import choose
from hp_muon_plugin.train import setup
from hp_muon_plugin.train.setup import Launch
from lane.harness import VOCAB, Ready, batches, dense, optimizer_config, start, train_config

BY_NAME: Any = {"ddp": None, "fsdp": {}}


def _model(config: Train) -> Any:
    return setup.build_model(config, VOCAB, choose(config.platform.name))[0]


def _optimizer(models: list[Any], name: str = "hp_muon") -> Any:
    from megatron.core import optimizer as factory

    from hp_muon_plugin.megatron.param_groups import standard_overrides

    options = optimizer_config(name)
    return factory.get_megatron_optimizer(options, models, **standard_overrides(options))


def _step(config: Train, model: Any, optimizer: Any) -> str:
    """One step of a trainer with this model and this optimizer; what it was told."""
    from hp_muon_plugin.train.loop import Trainer
    from hp_muon_plugin.train.progress import Silent

    schedule = setup.build_schedule(config, optimizer)
    parts = {"data": None, "platform": choose(config.platform.name), "log": None, "display": Silent()}
    trainer = Trainer(config, model, optimizer, schedule, **parts)  # type: ignore[arg-type]
    ready = Ready(config, model, optimizer, schedule, trainer)
    try:
        trainer._step(batches(ready.config, trainer._dp_rank, trainer._dp_size))
    except HookError as error:
        return str(error)
    return "trained"


def _another_model(launch: Launch, wrapper: Any) -> Any:
    """The model is built again after its optimizer, as a trainer does that reloads one."""
    config = train_config(dense())
    start(launch, config)
    install(data_parallel=wrapper)
    first = _model(config)
    return _step(config, _model(config), _optimizer([first]))


@pytest.mark.parametrize("wrapper", BY_NAME)
def test_a_model_that_was_built_again_is_not_trained_in_vain(wrapper: str) -> None:
    for told in run_ranks(2, _another_model, BY_NAME[wrapper]):
        assert ("model chunk 0 (GPTModel): belongs to this optimizer and took no part" in told) == (wrapper == "ddp")
        assert "embedding.word_embeddings.weight" in told
        assert "is trained, and belongs to no optimizer, so that it would keep its first value\n  fix: " in told


def _before_install(launch: Launch) -> Any:
    """The trained model was wrapped where no hook saw it."""
    config = train_config(dense())
    start(launch, config)
    unseen = _model(config)
    install()
    return _step(config, unseen, _optimizer([_model(config)]))


def test_an_optimizer_whose_model_takes_no_part_is_an_error() -> None:
    (told,) = run_ranks(1, _before_install)
    assert told.startswith("model chunk 0 (GPTModel): belongs to this optimizer and took no part in its first step")


def _a_chunk_left_out(launch: Launch, strict: bool) -> Any:
    """One pipeline stage has a second chunk, whose gradients are there, and its optimizer has the first one alone."""
    config = train_config(dense(), Topology(pp=2))
    start(launch, config)
    install(strict=strict)
    model = _model(config)
    if launch.rank == 0:
        second = _model(config)
        for param in second.parameters():
            param.main_grad.fill_(1.0)
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hp_muon_plugin.megatron.first_step").addHandler(handler)
    optimizer = _optimizer([model])
    return _step(config, model, optimizer), _step(config, model, optimizer), logged


def test_a_chunk_that_was_left_out_on_one_stage_is_an_error_on_every_rank() -> None:
    (first, _, _), (last, _, _) = run_ranks(2, _a_chunk_left_out, True)
    assert "embedding.word_embeddings.weight" in first
    assert "is trained, and belongs to no optimizer" in first
    assert "a model chunk of another rank" in last


def test_without_strict_it_is_logged_once_and_training_goes_on() -> None:
    for rank, (first, second, logged) in enumerate(run_ranks(2, _a_chunk_left_out, False)):
        assert (first, second) == ("trained", "trained")
        assert len(logged) == (1 if rank == 0 else 0)


def _two_models(launch: Launch, wrapper: Any) -> Any:
    """Two models, an optimizer for each, as in distillation or with a critic; and one that is only evaluated."""
    config = train_config(dense())
    start(launch, config)
    install(data_parallel=wrapper)
    models = [_model(config) for _ in range(3)]
    models[2].requires_grad_(False)
    pairs = [(models[0], _optimizer([models[0]])), (models[1], _optimizer([models[1]], "adam"))]
    return [_step(config, model, optimizer) for model, optimizer in pairs * 2]


@pytest.mark.parametrize("wrapper", BY_NAME)
def test_two_models_with_an_optimizer_each_are_trained(wrapper: str) -> None:
    assert set(run_ranks(1, _two_models, BY_NAME[wrapper])[0]) == {"trained"}
