"""Literal conformance: each test checks one line of the specifications, which its docstring names.

`reference` is the description of the reference system, `protocol` the base text of the Durable Streams protocol,
`extensions` the text on buckets, snapshots and bootstrap, `newer protocol` what the public text added later. The
table in docs/compatibility.md lists the decision for each point. Every test runs in `memory` and in `file-durable`.
"""
