"""Experts that stay on disk: everything else resident, and per MoE layer an arena of C expert slots
that reads fill after the router has chosen.

Knows how a loaded model of mlx-lm is turned into such a one. Refuses to know prompts, traces and
budgets. docs/STREAMING.md describes the whole.

    kernel    one kernel for the experts on every path, resident or streamed
    index     where each expert's bytes lie in the checkpoint
    arena     slot memory, written in place
    slots     which expert is in which slot
    reads     worker threads that fill slots
    meter     what a decode step missed, read and waited for
    engine    the streamed expert module, and what its layers share
    load      from a lazily loaded model to a streamed one
    choice    resident or streamed, and how many slots
    selfcheck resident and streamed runs compared, bit by bit
"""
