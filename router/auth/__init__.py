"""Authentication and authorization. Without a token file nothing here is active.

Read `tokens` (the token file, its reload, the limits of each token), then `interceptor` (the check of each call).
"""
