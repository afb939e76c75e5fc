"""The Ray side: placement, supervision, scaling and drain of processes."""
