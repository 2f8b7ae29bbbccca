"""A server that listens a moment after it has opened its store: what a command sees on a busy machine.

python -m tests.storage.slow_start serve --port 0
"""

from __future__ import annotations

import ssl
import sys
import time

from headwater.cli import main
from headwater.config import Settings
from headwater.http import server
from headwater.http.tls import build_tls

DELAY_S = 0.3


def delayed(settings: Settings) -> ssl.SSLContext | None:
    """Called after the store is open and before the address is."""
    time.sleep(DELAY_S)
    return build_tls(settings)


if __name__ == "__main__":
    server.__dict__["build_tls"] = delayed
    main(sys.argv[1:])
