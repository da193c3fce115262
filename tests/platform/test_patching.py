import types

from hp_muon_plugin.platform.patching import Patcher, Replacement


def test_restores_in_reverse_order_and_removes_what_was_not_there() -> None:
    owner = types.SimpleNamespace(a=1)
    patcher = Patcher()
    patcher.apply(
        [
            Replacement(owner, "a", lambda old: old + 1, "twice"),
            Replacement(owner, "a", lambda old: old * 10, "over the first"),
            Replacement(owner, "b", lambda old: old, "new"),
        ]
    )
    assert (owner.a, owner.b) == (20, None)
    assert [r.name for r in patcher.applied] == ["a", "a", "b"]
    patcher.restore()
    patcher.restore()
    assert vars(owner) == {"a": 1}


def test_target_is_a_dotted_name() -> None:
    import torch

    assert Replacement(torch.cuda, "Stream", lambda old: old, "x").target == "torch.cuda.Stream"
    assert Replacement(torch.Tensor, "cuda", lambda old: old, "x").target == "torch.Tensor.cuda"


def test_what_a_module_keeps_elsewhere_is_put_back_too() -> None:
    """Removing torch._dynamo.config.disable left torch without that option: its next read was an AttributeError."""
    import torch._dynamo

    patcher, config = Patcher(), torch._dynamo.config
    patcher.apply([Replacement(config, "disable", lambda old: not old, "x")])
    assert config.disable is True
    patcher.restore()
    assert config.disable is False
