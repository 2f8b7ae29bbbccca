"""Tools for data directories: check, stats, backup, restore, copy into another mode. See `interface`."""
