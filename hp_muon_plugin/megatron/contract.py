"""What Megatron's optimizer class must be for ours to stand in its place."""

from hp_muon_plugin.errors import HookError

_ABSTRACT_METHODS = frozenset(
    {
        "get_loss_scale",
        "load_state_dict",
        "prepare_grads",
        "reload_model_params",
        "sharded_state_dict",
        "state_dict",
        "step",
        "step_with_ready_grads",
        "zero_grad",
    }
)


def check_contract() -> None:
    """Check the abstract methods.

    Raises:
        HookError: If upstream changed them.
    """
    from megatron.core.optimizer.optimizer import MegatronOptimizer

    abstract = frozenset(MegatronOptimizer.__abstractmethods__)
    if abstract != _ABSTRACT_METHODS:
        grown, gone = sorted(abstract - _ABSTRACT_METHODS), sorted(_ABSTRACT_METHODS - abstract)
        raise HookError(
            f"MegatronOptimizer's abstract methods changed (new: {', '.join(grown) or 'none'}; "
            f"gone: {', '.join(gone) or 'none'})\n"
            "  fix: install a megatron-core version that `hp-muon doctor` lists as tested"
        )
