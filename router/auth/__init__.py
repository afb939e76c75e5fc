"""Authentication and authorization. Without a token file nothing here is active.

Read `tokens` (the token file and its reload), `interceptor` (the check of each call), then `limits` (of each token).
"""
