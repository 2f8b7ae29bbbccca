"""CRC-32 as in zlib, computed by ISA-L where it is installed, which takes a tenth of the time.

Stored checksums do not depend on which of the two computed them.
"""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:
    # Not built for this machine.
    from zlib import crc32

__all__ = ["crc32"]
