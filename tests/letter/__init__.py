"""To the letter: each test checks one line of the documents, which its docstring names.

`reference` is the description of the reference system, `protocol` the base text of the Durable Streams protocol,
`extensions` the text on buckets, snapshots and bootstrap, `newer protocol` what the public text added later. The
table in docs/compatibility.md says for each point what was done. Every test runs in `memory` and in `file-durable`.
"""
