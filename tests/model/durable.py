"""The model as readers of a durable server see it: nothing is shown before it is durable."""

from __future__ import annotations

from tests.model.reference import Life, Reference


class DurableReference(Reference):
    """The model as readers of a durable server see it: a life is shown when its creation is durable, and so on."""

    def __init__(self, now_ms: int) -> None:
        super().__init__(now_ms)
        self.reached: dict[Life, tuple[int, bool]] = {}
        self.by_name: dict[str, Life] = {}
        self.buried: set[Life] = set()

    def seen(self, life: Life) -> tuple[int, bool] | None:
        return self.reached.get(life)

    def shown(self, name: str) -> Life | None:
        life = self.by_name.get(name)
        if life is not None and life.over(self.now_ms) and not life.forks:
            return None
        return life

    def ended(self, life: Life) -> bool:
        return life in self.buried or life.over(self.now_ms)

    def needed(self, life: Life) -> bool:
        """Whether a stream that lives reads bytes that lie in this one."""
        for heir in [heir for heir in self.names.values() if not heir.deleted]:
            shared, at = heir.inherited, heir.source
            while at is not None and at is not life:
                shared, at = min(shared, at.inherited), at.source
            if at is life and shared > life.inherited:
                return True
        return False

    def settle(self) -> None:
        """Whatever was pending is durable, as after a restart."""
        self.reached = {life: (len(life.log), life.closed) for life in self.names.values()}
        self.by_name = dict(self.names)
        self.buried = {life for life in self.names.values() if life.deleted}


def stored(life: Life, at: int) -> bytes:
    return life.log[at] + b"," if life.json else life.log[at]
