"""The cluster file. `schema` has its sections and `values` the kinds of values. `loading` merges the file, the
environment and `--set` into one frozen `ClusterConfig`. `tls_check` checks the certificate files.
"""

from baton.config.loading import config_from_json, load_config, located, with_places
from baton.config.schema import ClusterConfig, PoolConfig, RouterConfig, TransferConfig

__all__ = [
    "ClusterConfig",
    "PoolConfig",
    "RouterConfig",
    "TransferConfig",
    "config_from_json",
    "load_config",
    "located",
    "with_places",
]
