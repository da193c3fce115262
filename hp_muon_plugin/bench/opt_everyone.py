"""All peers of ``hp-muon bench optimizer``."""

from hp_muon_plugin.bench import opt_naive, opt_peers, opt_peers_engine, opt_peers_megatron, opt_peers_owner
from hp_muon_plugin.bench.opt_contenders import Peer


def peers() -> dict[str, Peer]:
    """All of them.

    Returns:
        By name.
    """
    owners = opt_peers_owner.PEERS | opt_peers_megatron.PEERS
    return opt_naive.PEERS | opt_peers.PEERS | owners | opt_peers_engine.PEERS
