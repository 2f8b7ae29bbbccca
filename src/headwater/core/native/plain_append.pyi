from collections.abc import Callable, Mapping
from typing import Any

class PlainAppendPath:
    def __init__(self, classes: Mapping[str, type], server: Mapping[str, Any]) -> None: ...
    append: Callable[[Any, bytes], bool]
    response_to: Callable[[Any, bytes, float], bytes | None]
