"""The server with much time for its last spans and metrics, for a receiver on a busy machine.

python -m tests.otel.long_export_timeout serve --port 0
"""

from __future__ import annotations

import sys

from headwater.cli import main
from headwater.otel import export

if __name__ == "__main__":
    vars(export)["CLOSE_TIMEOUT_S"] = 60.0
    main(sys.argv[1:])
