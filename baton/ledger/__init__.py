"""The Redis ledger: incarnations, leases and ownership of requests' KV."""
