"""The router: it accepts requests, chooses workers, and carries each request through its life.

Read `service.py` first: the public gRPC service, and the way of a request through the packages below it. They are
`parsing`, `admission`, `placement`, `workers` and `request`, in the order in which a request passes them.
`context.py` builds the parts of a router, `server.py` is the process. `auth` checks tokens and tenants' limits.
For operators there are `admin.py`, `observe` and `dashboard`. `openai` is the HTTP API, a client of the gRPC service.
`audit_digest.py` computes the digest of deterministic answers.
"""
