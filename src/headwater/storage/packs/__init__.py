"""The cold store of the file modes: packs of bytes and a manifest of states. See `pack_store`."""
