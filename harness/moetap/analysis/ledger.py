"""The RAM ledger: what a model, C expert slots a layer and B lanes of T tokens need, against what a
Mac of a given size has.

Knows the sum, the size of caches by kind of attention, the budgets of a Mac, and how to invert the
sum for the largest C and B. Refuses to know files, MLX and where a model's sizes came from; they
come in as a `Sizes`. Every byte count is an integer.

    total(C, B, T) = resident + sum over MoE layers l of min(C, E_l) x expert_bytes_l
                   + B x sum over caches c of (bytes_per_token_c x slots_c(T) + constant_bytes_c)
                   + activation peak + runtime overhead

    net = budget - total, for two budgets: physical memory less headroom for the system, and the
    GPU's working-set limit. The smaller net decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from moetap.errors import MoetapError, UsageError
from moetap.trace import ModelInfo

KV_STEP = 256
"""mlx-lm's KV caches grow by this many tokens at a time."""

KV_GROUP = 64
"""Group size of quantised KV in mlx-lm, each group with a scale and a bias."""

GB = 10**9
GIB = 2**30


# -- caches


@dataclass(frozen=True)
class Cache:
    """One cache object of one stream.

    entry: its place in the model's list of caches, which is the decoder layer in most families.
    bytes_per_token: of K and V together. constant_bytes: state that does not grow with T.
    max_tokens: tokens at which a sliding window stops growing, None if it never does.
    step: tokens by which the cache grows.
    """

    entry: int
    kind: str
    bytes_per_token: int = 0
    constant_bytes: int = 0
    max_tokens: int | None = None
    step: int = KV_STEP

    def slots(self, tokens: int) -> int:
        """Token slots allocated for a context of `tokens`.

        Without a window T is rounded up to whole steps. A sliding window holds the prompt as it is
        and grows by a step beyond it, so that up to T + step - 1 slots are allocated, depending on
        where the prompt ended: the most is taken, and the window is never exceeded.
        """
        if self.max_tokens is None:
            return -(-tokens // self.step) * self.step
        return min(tokens + self.step - 1 if tokens else 0, self.max_tokens)

    def nbytes(self, tokens: int) -> int:
        """Bytes for a context of `tokens`."""
        return self.bytes_per_token * self.slots(tokens) + self.constant_bytes


def attention_bytes_per_token(
    kv_heads: int, key_dim: int, value_dim: int, itemsize: int = 2, kv_bits: int | None = None
) -> int:
    """KV bytes per token of one attention layer: kv_heads x (key_dim + value_dim) x itemsize.

    Quantised: of each vector, its numbers at kv_bits plus a scale and a bias for each 64.
    MLA (DeepSeek) caches one latent vector and one rotary key for all heads: kv_heads = 1,
    key_dim = kv_lora_rank, value_dim = qk_rope_head_dim.
    """
    if kv_bits is None:
        return kv_heads * (key_dim + value_dim) * itemsize
    return kv_heads * sum(
        dim * kv_bits // 8 + dim // KV_GROUP * 2 * itemsize for dim in (key_dim, value_dim)
    )


def linear_attention_bytes(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int, conv_kernel: int,
    itemsize: int = 2,
) -> int:  # fmt: skip
    """Constant state of one gated delta-net layer (GDN, KDA), for one stream.

    The last conv_kernel - 1 inputs of the convolution over queries, keys and values, in the
    activations' dtype: (conv_kernel - 1) x (2 x key_heads x key_dim + value_heads x value_dim); and
    the recurrent state in float32: value_heads x value_dim x key_dim x 4.
    """
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return (conv_kernel - 1) * channels * itemsize + value_heads * value_dim * key_dim * 4


def mamba_bytes(
    heads: int, head_dim: int, state_dim: int, groups: int, conv_kernel: int,
    itemsize: int = 2, state_itemsize: int = 2,
) -> int:  # fmt: skip
    """Constant state of one Mamba-2 layer, for one stream.

    The last conv_kernel - 1 inputs: (conv_kernel - 1) x (heads x head_dim + 2 x groups x
    state_dim); and the state: heads x head_dim x state_dim.
    """
    channels = heads * head_dim + 2 * groups * state_dim
    return (conv_kernel - 1) * channels * itemsize + heads * head_dim * state_dim * state_itemsize


# -- what is known of a model


@dataclass(frozen=True)
class MoeLayer:
    """One MoE layer: decoder layer, E, k, stored bytes of one routed expert."""

    layer_index: int
    n_experts: int
    top_k: int
    expert_bytes: int


@dataclass(frozen=True)
class Sizes:
    """A model's sizes in bytes, and where they came from.

    source, cache_source: one line each for people, on the weights and on the caches.
    notes: what else must be said beside the figures.
    """

    model: str
    source: str
    layers: tuple[MoeLayer, ...]
    resident_bytes: int
    caches: tuple[Cache, ...]
    cache_source: str
    kv_bits: int | None = None
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.layers:
            raise MoetapError(f"{self.model}: a ledger needs at least one MoE layer")

    @property
    def n_experts(self) -> int:
        """The largest E: more slots than that hold nothing."""
        return max(layer.n_experts for layer in self.layers)

    @property
    def top_k(self) -> int:
        """The largest k: the fewest slots with which every layer can run a token in one pass."""
        return max(layer.top_k for layer in self.layers)

    def arena_bytes(self, slots: int) -> int:
        """Expert slots: sum over MoE layers of min(C, E_l) x expert_bytes_l."""
        return sum(min(slots, layer.n_experts) * layer.expert_bytes for layer in self.layers)

    def kv_bytes(self, tokens: int) -> int:
        """Per lane, what grows with T; a window counts up to its size."""
        return sum(c.bytes_per_token * c.slots(tokens) for c in self.caches)

    @property
    def kv_bytes_per_token(self) -> int:
        """Per lane and token while no window is full."""
        return sum(c.bytes_per_token for c in self.caches)

    @property
    def state_bytes(self) -> int:
        """Per lane, what does not grow with T."""
        return sum(c.constant_bytes for c in self.caches)


def trace_sizes(model: ModelInfo) -> Sizes:
    """The sizes that a trace recorded of its model.

    A trace has the sum over all caches: where the model has sliding windows, they are counted as if
    they never filled. Raises MoetapError if the trace lacks a size.
    """
    resident, kv, state = (
        model.resident_bytes,
        model.kv_bytes_per_token,
        model.state_bytes_per_stream,
    )
    if resident is None or kv is None or state is None or np.any(model.expert_bytes <= 0):
        raise MoetapError(
            f"{model.id}: the trace does not record the model's sizes, so there is no ledger; use "
            "moetap ledger --model with the model or its card"
        )
    layers = zip(model.layer_index, model.n_experts, model.top_k, model.expert_bytes, strict=True)
    return Sizes(
        model=model.id,
        source="the trace",
        layers=tuple(MoeLayer(*(int(value) for value in layer)) for layer in layers),
        resident_bytes=resident,
        caches=(Cache(0, "all caches", kv, state),),
        cache_source="the trace, summed over layers; a sliding window counts as if it never filled",
    )


@dataclass(frozen=True)
class Allowance:
    """A term that the model's files do not tell: bytes, and whether measured or assumed."""

    n_bytes: int
    source: str


ACTIVATIONS = Allowance(
    300_000_000, "assumed: a prefill chunk of 2048 tokens, its routed copies included"
)
OVERHEAD = Allowance(
    200_000_000, "assumed: Python, MLX, tokenizer; MLX's buffer cache bounded by set_cache_limit"
)


# -- what a Mac has


@dataclass(frozen=True)
class Headroom:
    """Physical memory left to the system and other programs: a fixed part and a share."""

    fixed_bytes: int = 2_500_000_000
    share: Fraction = Fraction(1, 10)

    def of(self, ram_bytes: int) -> int:
        """Bytes not to be used on a Mac of `ram_bytes`."""
        return self.fixed_bytes + int(ram_bytes * self.share)


# Limits that Macs printed (recommendedMaxWorkingSetSize, in MB of 10^6 bytes as llama.cpp prints
# it), by GiB of memory. The share of the memory follows the macOS release, not the chip.
WORKING_SET: dict[str, dict[int, int]] = {
    "older": {
        8: 5_726_630_000,
        16: 11_453_250_000,
        32: 22_906_500_000,
        36: 28_991_030_000,
        64: 49152 * 2**20,
    },
    "newer": {
        16: 12_713_120_000,
        24: 19_069_670_000,
        32: 26_800_600_000,
        64: 55_662_790_000,
        128: 115_448_730_000,
    },
}


@dataclass(frozen=True)
class Limit:
    """The GPU's working-set limit of a Mac under one rule, and how it is known."""

    rule: str  # "older" | "newer" | "device"
    n_bytes: int
    source: str


@dataclass(frozen=True)
class Device:
    """The machine at hand, if it is a Mac: memory and the working-set limit that it reports."""

    ram_bytes: int
    working_set_bytes: int


def working_set_limits(ram_gib: int, device: Device | None = None) -> tuple[Limit, ...]:
    """The limits that may hold on a Mac with `ram_gib`: the device's own if it is that size, else
    one for each rule.

    Sizes that no log was found for take the share of the neighbours in the table: on a straight
    line between two, that of the last one beyond them.
    """
    if device is not None and round(device.ram_bytes / GIB) == ram_gib:
        return (Limit("device", device.working_set_bytes, "reported by this machine"),)
    return tuple(_limit(rule, ram_gib) for rule in WORKING_SET)


def _limit(rule: str, gib: int) -> Limit:
    table = WORKING_SET[rule]
    if gib in table:
        return Limit(rule, table[gib], "printed by a Mac of this size")
    shares = {size: Fraction(n, size * GIB) for size, n in table.items()}
    below = max((size for size in table if size < gib), default=None)
    above = min((size for size in table if size > gib), default=None)
    if below is None or above is None:
        nearest = above if below is None else below
        assert nearest is not None  # the tables are not empty
        share, source = shares[nearest], f"no log of this size; share of {nearest} GiB"
    else:
        step = Fraction(gib - below, above - below)
        share = shares[below] + step * (shares[above] - shares[below])
        source = f"no log of this size; share between {below} and {above} GiB"
    return Limit(rule, int(share * gib * GIB), source)


@dataclass(frozen=True)
class Tier:
    """A Mac: physical memory, what of it may be used, and the working-set limits."""

    ram_gib: int
    headroom_bytes: int
    limits: tuple[Limit, ...]

    @property
    def physical_bytes(self) -> int:
        """The first budget: memory less headroom."""
        return self.ram_gib * GIB - self.headroom_bytes

    def budget(self, limit: Limit) -> int:
        """The smaller of the two budgets."""
        return min(self.physical_bytes, limit.n_bytes)


def make_tier(ram_gib: int, headroom: Headroom | None = None, device: Device | None = None) -> Tier:
    """A Mac with `ram_gib` GiB. UsageError if there is no such thing."""
    if ram_gib < 1:
        raise UsageError(f"tier {ram_gib}: memory is a positive number of GiB")
    left = (headroom or Headroom()).of(ram_gib * GIB)
    return Tier(ram_gib, left, working_set_limits(ram_gib, device))


def default_slots(ram_gib: int) -> int | None:
    """C by tier: 8 -> 64, 16 -> 128, 24 -> 192, 32 and up -> None, all experts."""
    return next((c for least, c in ((32, None), (24, 192), (16, 128)) if ram_gib >= least), 64)


# -- the ledger


@dataclass(frozen=True)
class Terms:
    """The sum for one C, B and T."""

    slots: int
    lanes: int
    resident_bytes: int
    arena_bytes: int
    kv_bytes: int  # of all lanes
    state_bytes: int  # of all lanes
    activation_bytes: int
    overhead_bytes: int

    @property
    def model_bytes(self) -> int:
        """Before activations and overhead."""
        return self.resident_bytes + self.arena_bytes + self.kv_bytes + self.state_bytes

    @property
    def total_bytes(self) -> int:
        """Everything."""
        return self.model_bytes + self.activation_bytes + self.overhead_bytes

    @property
    def largest(self) -> tuple[str, int]:
        """The term that weighs most, and its bytes."""
        sizes = {
            "experts": self.arena_bytes,
            "resident weights": self.resident_bytes,
            "KV and state": self.kv_bytes + self.state_bytes,
            "activations and overhead": self.activation_bytes + self.overhead_bytes,
        }
        return max(sizes.items(), key=lambda item: item[1])


@dataclass(frozen=True)
class Net:
    """What is left under one working-set rule; negative if it does not fit."""

    rule: str
    physical_bytes: int
    working_set_bytes: int

    @property
    def net_bytes(self) -> int:
        """The smaller of the two decides."""
        return min(self.physical_bytes, self.working_set_bytes)

    @property
    def tight(self) -> str:
        """The budget that decides: "physical" or "working set"."""
        return "physical" if self.physical_bytes < self.working_set_bytes else "working set"


@dataclass(frozen=True)
class Line:
    """One C and B on one tier. nets: one for each rule."""

    tier: Tier
    terms: Terms
    nets: tuple[Net, ...]

    @property
    def verdict(self) -> str:
        """ "fits" or "does not fit" where all rules agree, else "depends on the rule"."""
        fitting = [net.net_bytes >= 0 for net in self.nets]
        if all(fitting):
            return "fits"
        return "depends on the rule" if any(fitting) else "does not fit"

    @property
    def tight(self) -> str:
        """The budget that decides under every rule, or those that do, by rule."""
        names = {net.tight for net in self.nets}
        if len(names) == 1:
            return names.pop()
        return ", ".join(f"{net.rule}: {net.tight}" for net in self.nets)


@dataclass(frozen=True)
class Ledger:
    """The question, and every figure that answers it. Tiers, slots (C) and lanes (B) rise."""

    sizes: Sizes
    context: int
    activations: Allowance
    overhead: Allowance
    tiers: tuple[Tier, ...]
    slots: tuple[int, ...]
    lanes: tuple[int, ...]

    def terms(self, slots: int, lanes: int) -> Terms:
        """The sum for one C and B."""
        return Terms(
            slots=slots,
            lanes=lanes,
            resident_bytes=self.sizes.resident_bytes,
            arena_bytes=self.sizes.arena_bytes(slots),
            kv_bytes=lanes * self.sizes.kv_bytes(self.context),
            state_bytes=lanes * self.sizes.state_bytes,
            activation_bytes=self.activations.n_bytes,
            overhead_bytes=self.overhead.n_bytes,
        )

    def line(self, tier: Tier, slots: int, lanes: int) -> Line:
        """One C and B on one tier."""
        parts = self.terms(slots, lanes)
        physical = tier.physical_bytes - parts.total_bytes
        nets = (Net(lim.rule, physical, lim.n_bytes - parts.total_bytes) for lim in tier.limits)
        return Line(tier, parts, tuple(nets))

    @property
    def lines(self) -> list[Line]:
        """Every line asked for, by tier, C and B in this order."""
        return [
            self.line(tier, c, b) for tier in self.tiers for c in self.slots for b in self.lanes
        ]

    def default_slots(self, tier: Tier) -> int:
        """The tier's default C, at most E and at least k."""
        wanted = default_slots(tier.ram_gib) or self.sizes.n_experts
        return max(min(wanted, self.sizes.n_experts), self.sizes.top_k)

    def largest_slots(self, tier: Tier, lanes: int) -> dict[str, int]:
        """Rule -> the largest C that fits at `lanes`; 0 if there is none, or none of at least k.

        The sum never falls with C, so halving finds it.
        """
        found = {}
        for limit in tier.limits:
            low, high = 0, self.sizes.n_experts
            while low < high:
                middle = (low + high + 1) // 2
                if self.terms(middle, lanes).total_bytes <= tier.budget(limit):
                    low = middle
                else:
                    high = middle - 1
            found[limit.rule] = low if low >= self.sizes.top_k else 0
        return found

    def largest_lanes(self, tier: Tier, slots: int) -> dict[str, int] | None:
        """Rule -> the largest B that fits at `slots`, 0 if none does; None if lanes cost nothing.

        Each lane costs the same, so B is what is left without lanes, divided by a lane.
        """
        per_lane = self.sizes.kv_bytes(self.context) + self.sizes.state_bytes
        if per_lane == 0:
            return None
        alone = self.terms(slots, 0).total_bytes
        return {
            limit.rule: max(0, (tier.budget(limit) - alone) // per_lane) for limit in tier.limits
        }


def ledger(
    sizes: Sizes,
    tiers: Sequence[Tier],
    lanes: Sequence[int],
    context: int,
    slots: Sequence[int] | None = None,
    activations: Allowance = ACTIVATIONS,
    overhead: Allowance = OVERHEAD,
) -> Ledger:
    """Work out the ledger. Without `slots`: each tier's default C.

    Raises UsageError: C below k, B or T below 1, no tier.
    """
    if not tiers or not lanes:
        raise UsageError("a ledger needs at least one tier and one B")
    for b in lanes:
        if b < 1:
            raise UsageError(f"B = {b}: at least one lane decodes")
    if context < 1:
        raise UsageError(f"context {context}: at least one token")
    for name, allowance in (("activations", activations), ("overhead", overhead)):
        if allowance.n_bytes < 0:
            raise UsageError(f"{name} of {allowance.n_bytes:,} bytes: must not be negative")
    for c in slots or ():
        if c < sizes.top_k:
            raise UsageError(
                f"C = {c} is less than the {sizes.top_k} experts that a token of {sizes.model} "
                "selects in a layer"
            )
    asked = Ledger(
        sizes=sizes,
        context=context,
        activations=activations,
        overhead=overhead,
        tiers=tuple(sorted(set(tiers), key=lambda tier: tier.ram_gib)),
        slots=(),
        lanes=tuple(sorted(set(lanes))),
    )
    wanted = slots or [asked.default_slots(tier) for tier in asked.tiers]
    # More slots than experts hold nothing.
    return replace(asked, slots=tuple(sorted({min(c, sizes.n_experts) for c in wanted})))
