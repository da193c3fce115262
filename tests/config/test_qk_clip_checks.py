import pytest

from hp_muon_plugin.config.checks import check_train
from hp_muon_plugin.config.optimizer import HpMuon
from hp_muon_plugin.config.trainer import MLA, Model, Topology, Train
from hp_muon_plugin.errors import ConfigError


def config(model: Model, **topology: int) -> Train:
    return Train(optimizer=HpMuon(qk_clip=100.0), model=model, topology=Topology(**topology))


def test_normalised_queries_are_refused_before_a_rank_starts() -> None:
    with pytest.raises(ConfigError, match="changes no logit"):
        check_train(config(Model(qk_layernorm=True)), world_size=1)


def test_cut_heads_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_query_groups=2 is not divisible by topology\.tp=4"):
        check_train(config(Model(num_query_groups=2), tp=4), world_size=4)


def test_latent_attention_may_normalise_what_it_projects_from() -> None:
    check_train(config(Model(qk_layernorm=True, mla=MLA())), world_size=1)


def test_a_threshold_must_be_positive() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.qk_clip"):
        check_train(Train(optimizer=HpMuon(qk_clip=0.0)), world_size=1)
