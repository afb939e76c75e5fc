"""The router: it accepts requests, chooses workers, and carries each request through its life.

Read `service.py` first: the public gRPC service, and the way of a request. `parsing` makes a value of the message.
`request`, `admission`, `workers` and `placement` serve it, each with the help of those after it.
`context.py` builds the parts of a router, `server.py` is the process. `auth` checks tokens and tenants' limits.
For operators, `activity.py` records recent events, `status.py` makes views, and `admin.py` and `dashboard` serve them.
`openai` is the HTTP API, a client of the gRPC service. `audit_digest.py` computes the digest of deterministic answers.
"""
