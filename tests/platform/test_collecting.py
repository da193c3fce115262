import gc

import pytest

from hp_muon_plugin.platform.collecting import without_collecting


def _fails() -> None:
    with without_collecting():
        assert not gc.isenabled()
        raise ValueError


@pytest.mark.parametrize("is_enabled", [True, False])
def test_what_was_set_is_set_again_also_after_an_error(is_enabled: bool) -> None:
    try:
        (gc.enable if is_enabled else gc.disable)()
        pytest.raises(ValueError, _fails)
        assert gc.isenabled() == is_enabled
    finally:
        gc.enable()
