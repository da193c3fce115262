"""What a resumed run does otherwise is told: VeOmni took the saved split of heads for the configured one."""

from hp_muon_plugin.train.differences import changed_values


def test_changed_options_are_told_with_their_place_and_nothing_else() -> None:
    saved = {
        "split_qkv": True,
        "ns_steps": None,
        "adamw": {"lr": 0.1, "betas": [0.9, 0.95]},
        "gone": 1,
        "schedule": "a",
    }
    own = {"split_qkv": False, "ns_steps": 5, "adamw": {"lr": 0.1, "betas": [0.9, 0.99]}, "new": 2, "schedule": "b"}
    assert list(changed_values(saved, own, "optimizer.")) == [
        "optimizer.split_qkv true -> false",
        "optimizer.ns_steps null -> 5",
        "optimizer.adamw.betas [0.9, 0.95] -> [0.9, 0.99]",
        "optimizer.schedule a -> b",
    ]
    assert list(changed_values(saved, saved, "optimizer.")) == []
