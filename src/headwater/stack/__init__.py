"""The full stack as supervised child processes: the server, Envoy, Postgres and the pipeline."""
