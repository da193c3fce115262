"""Which of its three forms the optimizer state of a legacy checkpoint is written in."""

from hp_muon_plugin.checkpoint.canonical import Kind
from hp_muon_plugin.checkpoint.formats.layer_wise import DATA, Shares, data_ranks
from hp_muon_plugin.checkpoint.formats.legacy_plan import Plan
from hp_muon_plugin.errors import ConfigError

NO_STATE = (Kind.weight, Kind.main, Kind.buffer)
LAYER_WISE = "layer_wise"
_FORMS = ("distributed", "plain", LAYER_WISE)


def form_of(made: Plan) -> str:
    """Which form the optimizer state takes; ``none`` without groups or state.

    Args:
        made: What is written.

    Raises:
        ConfigError: If the form that is asked for is unknown, or does not fit the optimizer.
    """
    state, wanted = made.source.state(), made.target.sharding
    if wanted is not None and wanted not in _FORMS:
        raise ConfigError("--sharding", wanted, "no form of a legacy checkpoint", f"one of {', '.join(_FORMS)}")
    kinds = {name: set(kinds) - set(NO_STATE) for name, kinds in made.kinds.items() if Kind.buffer not in kinds}
    has_momentum = any(Kind.momentum in item for item in kinds.values())
    form = "none"
    if state.hyper and any(kinds.values()):
        uniform = len({frozenset(item) for item in kinds.values()}) == 1 and not has_momentum
        if wanted == "distributed" and not uniform:
            why = "DistributedOptimizer keeps the same state for every parameter"
            raise ConfigError("--sharding", wanted, why, "--sharding plain")
        if wanted == LAYER_WISE and not has_momentum:
            why = "the layer-wise optimizer is Muon's, and no parameter has a momentum"
            raise ConfigError("--sharding", wanted, why, "--sharding distributed or plain")
        plain = not uniform or state.model.get("legacy_optimizer") == "plain"
        form = wanted or (_as_before(made) if has_momentum else None) or ("plain" if plain else "distributed")
    if LAYER_WISE not in (form, wanted) and DATA in made.target.options:
        value, fix = made.target.options[DATA], "add --sharding layer_wise" if has_momentum else "leave it out"
        raise ConfigError(f"--option {DATA}", value, "is for Muon's layer-wise optimizer alone", fix)
    if form == LAYER_WISE:
        shares_of(made)
    return form


def _as_before(made: Plan) -> str | None:
    """Layer-wise where the source was without buffer layout, and it is known for how many ranks."""
    model = made.source.state().model
    was = LAYER_WISE in (model.get("legacy_optimizer"), model.get("sharding"))
    return LAYER_WISE if was and data_ranks(made.source, made.target, made.expert_tensors) is not None else None


def shares_of(made: Plan) -> Shares:
    """Data-parallel ranks of the run that will load.

    Args:
        made: What is written, in the layer-wise form.

    Raises:
        ConfigError: If their number is not known, or does not fit the experts.
    """
    found = data_ranks(made.source, made.target, made.expert_tensors)
    if found is None:
        raise ConfigError(
            "--sharding",
            LAYER_WISE,
            "every data-parallel rank has a file of its own, and nothing says how many there will be on this mesh",
            f"--option {DATA}=N",
        )
    return found
