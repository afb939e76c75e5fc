"""Commands that prepare a cluster: `config.py` checks its file, `certs.py` makes certificates, and `doctor.py` (with
`doctor_transport.py`) looks for problems on this machine.
"""
