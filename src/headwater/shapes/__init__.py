"""Electric's Shape API over Postgres: each shape's log is a Headwater stream, and one slot feeds them all.

A shape is one table, some of its columns, and a condition on its rows. `where` parses and evaluates the condition,
`table` describes the table, `snapshot` reads the rows that exist, `replication` receives the changes, `shape_log`
keeps both as streams, `registry` owns the shapes, and `api` handles HTTP requests. Invariant: a reader sees only what
the stream server has acknowledged.
"""
