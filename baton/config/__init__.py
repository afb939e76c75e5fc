"""The cluster file: its schema, and how a file, the environment and `--set` become one frozen `ClusterConfig`."""

from baton.config.loading import config_from_json, load_config
from baton.config.schema import ClusterConfig, PoolConfig, RouterConfig, TransferConfig

__all__ = ["ClusterConfig", "PoolConfig", "RouterConfig", "TransferConfig", "config_from_json", "load_config"]
