"""The pipeline while its processes are killed, suspended, started twice and restored from backups."""
