"""Model families: configuration, weights and layers."""
