"""The transformer engine that both roles use."""
