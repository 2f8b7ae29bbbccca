"""Storage mode `acid`, on LMDB. See `store` for how it works and `layout` for what lies where."""

from headwater.storage.acid.store import AcidStorage

__all__ = ["AcidStorage"]
