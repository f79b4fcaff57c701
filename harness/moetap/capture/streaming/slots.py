"""Which expert is in which slot of one layer's arena.

Knows which slots are free and asks a policy of `moetap.policies` who leaves, so that measured
misses equal those of its replay. Refuses to know any policy, what slots hold and how they are
filled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moetap.policies import Online


class SlotTable:
    """The slot table of a layer with `n_slots` slots.

    `slot_of` maps the experts that are resident to their slots.
    """

    def __init__(self, n_slots: int, policy: Online) -> None:
        self.n_slots = n_slots
        self.slot_of: dict[int, int] = {}
        self._policy = policy
        self._free = list(range(n_slots - 1, -1, -1))

    def request(self, experts: Sequence[int]) -> list[int]:
        """Give every expert of a step's set a slot; returns those that missed, to be read into it.

        experts: distinct, ascending, at most n_slots.
        """
        missing = [e for e in experts if e not in self.slot_of]
        self._give_back(self._policy.request(experts))
        for expert in missing:
            self.slot_of[expert] = self._free.pop()
        return missing

    def forget(self, experts: Sequence[int]) -> None:
        """Give back the slots of experts that are not there after all."""
        self._policy.forget(experts)
        self._give_back(experts)

    def clear(self, policy: Online) -> None:
        """Forget every expert; from now on `policy`, an empty cache, decides."""
        self._give_back(list(self.slot_of))
        self._policy = policy

    def keep(self, policy: Online) -> None:
        """From now on `policy`, an empty cache, decides about what is resident."""
        policy.request(sorted(self.slot_of))
        self._policy = policy

    def _give_back(self, experts: Iterable[int]) -> None:
        for expert in experts:
            self._free.append(self.slot_of.pop(expert))
