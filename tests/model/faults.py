"""What the engine is known to do otherwise than the model says.

Each has a test of its own in `tests/engine/test_endings.py` that says so. When that one no longer fails, the line
here is set to False, and the model test watches that rule as well.
"""

from __future__ import annotations

from typing import Final

EARLY_410: Final = False
"""A deletion that is not yet durable already shows to readers, where forks keep the stream."""
ENDING_UNREADABLE: Final = False
"""A stream whose deletion is not yet durable cannot be read in pieces, nor can its forks."""
NO_EXPIRY_AFTER_FAILURE: Final = False
"""After a failed write, what has expired is still there for writers."""
