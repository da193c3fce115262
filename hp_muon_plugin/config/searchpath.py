"""What makes ``optimizer=hp_muon`` work in anybody's Hydra application after ``pip install``.

Hydra 1.3 finds this class through ``hydra_plugins/hp_muon_plugin/``, Hydra 1.4 and later through
the ``hydra.plugins`` entry point. Both import it in every Hydra application on the machine, so it
must stay cheap: no torch, nothing that can fail.
"""

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from hp_muon_plugin.config.store import register_schemas


class HpMuonSearchPath(SearchPathPlugin):
    """Appends our config tree, so an application's own files of the same name come first."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add ``pkg://hp_muon_plugin.conf`` behind the application's own paths.

        Args:
            search_path: Hydra's search path, changed in place.
        """
        register_schemas()
        search_path.append(provider="hp_muon_plugin", path="pkg://hp_muon_plugin.conf")
