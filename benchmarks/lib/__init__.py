"""What the benchmark programs share. Modules that a peer's environment imports need the standard library only."""
