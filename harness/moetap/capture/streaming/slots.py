"""Which expert is in which slot of one layer's arena.

Knows the rule of `moetap.policies` for LRU, one step at a time: look-ups are step-atomic, hits are
touched before misses get slots, and of the experts last used in the same step the lowest id leaves
first. So measured misses equal those of a replay. Refuses to know what slots hold and how they are
filled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class LRUSlots:
    """The slot table of a layer with `n_slots` slots.

    `slot_of` maps the experts that are resident to their slots, in the order in which they leave.
    """

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self.slot_of: dict[int, int] = {}
        self._free = list(range(n_slots - 1, -1, -1))

    def request(self, experts: Sequence[int]) -> list[int]:
        """Give every expert of a step's set a slot; returns those that missed, to be read into it.

        experts: distinct, ascending, at most n_slots.
        """
        if len(experts) > self.n_slots:
            raise ValueError(f"{len(experts)} experts in one pass, {self.n_slots} slots")
        table = self.slot_of
        slots = {e: table.pop(e) for e in experts if e in table}
        missing = [e for e in experts if e not in slots]
        for expert in missing:
            # What is left in the table is not of this set: its first entry is the one to leave.
            slots[expert] = self._free.pop() if self._free else table.pop(next(iter(table)))
        for expert in experts:
            table[expert] = slots[expert]
        return missing

    def forget(self, experts: Iterable[int]) -> None:
        """Give back the slots of experts that are not there after all."""
        self._free.extend(self.slot_of.pop(e) for e in experts)

    def clear(self) -> None:
        """Forget every expert."""
        self.forget(list(self.slot_of))
