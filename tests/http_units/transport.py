"""A socket of a connection without an event loop: it keeps what is written, and says whether it is read or closed."""

from __future__ import annotations

from bench.calls import KeptTransport


class Transport(KeptTransport):
    def __init__(self) -> None:
        super().__init__()
        self.is_read = True
        self.is_closed = False

    def pause_reading(self) -> None:
        assert self.is_read
        self.is_read = False

    def resume_reading(self) -> None:
        assert not self.is_read
        self.is_read = True

    def can_write_eof(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    abort = close
