"""The wire: generated stubs, their conversion to Baton's own types, channels."""
