"""The model as readers of a durable server see it: data is not visible before it is durable."""

from __future__ import annotations

from tests.model.reference import Incarnation, Reference


class DurableReference(Reference):
    """A model that also tracks what is durable, and therefore visible to readers."""

    def __init__(self, now_ms: int) -> None:
        super().__init__(now_ms)
        self.reached: dict[Incarnation, tuple[int, bool]] = {}
        self.by_name: dict[str, Incarnation] = {}
        self.soft_deleted: set[Incarnation] = set()

    def seen(self, incarnation: Incarnation) -> tuple[int, bool] | None:
        return self.reached.get(incarnation)

    def shown(self, name: str) -> Incarnation | None:
        incarnation = self.by_name.get(name)
        if incarnation is not None and incarnation.over(self.now_ms) and not incarnation.forks:
            return None
        return incarnation

    def ended(self, incarnation: Incarnation) -> bool:
        return incarnation in self.soft_deleted or incarnation.over(self.now_ms)

    def needed(self, incarnation: Incarnation) -> bool:
        """Whether an existing stream inherits data through this one, which then keeps all of its own data.

        That includes a fork at or before this one's own fork point: its data is in a source further up, but a floor is
        an offset, and the offset that the fork needs lies before this one's data.
        """
        for heir in [heir for heir in self.names.values() if not heir.deleted]:
            shared, at = heir.inherited, heir.source
            while at is not None and at is not incarnation:
                shared, at = min(shared, at.inherited), at.source
            if at is incarnation and shared > 0:
                return True
        return False

    def make_durable(self) -> None:
        """Treat everything as durable, as after a restart."""
        self.reached = {incarnation: (len(incarnation.log), incarnation.closed) for incarnation in self.names.values()}
        self.by_name = dict(self.names)
        self.soft_deleted = {incarnation for incarnation in self.names.values() if incarnation.deleted}


def stored(incarnation: Incarnation, at: int) -> bytes:
    return incarnation.log[at] + b"," if incarnation.json else incarnation.log[at]
