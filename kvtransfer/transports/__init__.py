"""The ways in which frames of KV travel, each behind the contract of `kvtransfer.transports.base`."""
