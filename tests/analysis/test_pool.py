from __future__ import annotations

from dataclasses import replace

import pytest
from unionkit import golden_streams, golden_trace, make_model, make_stream, make_trace

from moetap.analysis.pool import pool
from moetap.analysis.strata import layer_groups, strata
from moetap.errors import MoetapError, UsageError
from moetap.report.words import left_out, sampler, warnings


def test_prompts_that_coincide_stay_distinct_streams():
    one = golden_trace(run_id="1", source="one.h5")
    two = golden_trace(run_id="2", source="two.h5", complete=False, n_prompts=9)
    both = pool([one, two])
    assert both.n_streams == 8
    assert not both.complete
    assert [origin.n_planned for origin in both.origins] == [0, 9]


@pytest.mark.parametrize(
    "model",
    [
        make_model((4, 4), (2, 2), [100, 10], [3, 5], config_sha256="other"),
        make_model((4, 4), (2, 2), [100, 10], [3, 5], weights_sha256="other"),
        make_model((4, 4), (2, 2), [100, 10], [3, 6]),
        make_model((4, 8), (2, 2), [100, 10], [3, 5]),
        make_model((4, 4), (2, 2), [100, 11], [3, 5]),
    ],
)
def test_different_models_are_refused_by_name(model):
    other = make_trace(model, golden_streams(), source="other.h5")
    with pytest.raises(UsageError, match=r"first\.h5 and other\.h5"):
        pool([golden_trace(source="first.h5"), other])


def test_the_same_run_twice_is_refused():
    with pytest.raises(UsageError, match=r"a\.h5 and b\.h5 are the same run"):
        pool([golden_trace(run_id="r", source="a.h5"), golden_trace(run_id="r", source="b.h5")])


def test_nothing_to_analyse():
    with pytest.raises(MoetapError, match=r"empty\.h5: no stream"):
        pool([make_trace(golden_trace().model, [], source="empty.h5")])
    with pytest.raises(UsageError):
        pool([])


def test_stream_that_only_loops_is_counted_and_dropped():
    looped = make_stream("x", "code", [[{0, 1}, {0, 1}]], (2, 2), looped_from=0)
    trace = make_trace(golden_trace().model, [*golden_streams(), looped])
    assert (pool([trace]).n_streams, pool([trace]).n_empty) == (4, 1)
    assert pool([trace], keep_loops=True).n_streams == 5


def test_strata_and_names():
    assert [s.name for s in strata(pool([golden_trace()]))] == ["all", "agentic", "code", "mixed"]
    one_class = make_trace(golden_trace().model, golden_streams()[:2])
    assert [s.name for s in strata(pool([one_class]))] == ["all", "code"]
    cells = [[{0, 1}, {0, 1}]]
    named = [make_stream(c or "none", c, cells, (2, 2)) for c in ("mixed", "")]
    names = [s.name for s in strata(pool([make_trace(golden_trace().model, named)]))]
    assert names == ["all", "class", "class mixed", "mixed"]


def test_layer_groups_are_contiguous_and_at_most_four():
    model = make_model((4,) * 10, (2,) * 10, layer_index=[1, 3, 5, 7, 9, 11, 13, 15, 17, 19])
    found = layer_groups(model.layer_index)
    groups = [f.label for f in found if f.kind == "group"]
    assert groups == ["1-5", "7-11", "13-15", "17-19"]
    assert [f.label for f in found if f.kind == "layer"] == [str(i) for i in range(1, 20, 2)]
    assert [f.label for f in layer_groups(golden_trace().model.layer_index)] == [
        "all",
        "3",
        "5",
        "3",
        "5",
    ]


def test_streams_of_one_prompt_count_once():
    """The same capture under another run id must not pose as independent streams."""
    model = golden_trace().model
    hashed = [replace(s, prompt_sha256=f"hash-{s.prompt_id}") for s in golden_streams()]
    twin = make_trace(model, hashed, run_id="2")
    one = pool([make_trace(model, hashed, run_id="1")])
    both = pool([make_trace(model, hashed, run_id="1"), twin])
    assert (one.n_streams, one.n_repeated) == (4, 0)
    assert (both.n_streams, both.n_repeated) == (4, 4)
    assert "4 streams of a prompt that occurs before left out." in left_out(both)
    assert left_out(one) == ""
    # Without hashes nothing is known, and nothing is left out.
    bare = [make_trace(model, golden_streams(), run_id=r) for r in "12"]
    assert (pool(bare).n_streams, pool(bare).n_repeated) == (8, 0)


def captured(name, **settings):
    """A trace of one model that a recorder made, in a file of this name."""
    trace = golden_trace(run_id=name, source=name)
    recorded = {"moetap_version": "1", "expert_kernel": "row", "prefill_step": 2048}
    return replace(trace, capture=replace(trace.capture, **(recorded | settings)))


def test_traces_that_were_not_computed_alike_are_pooled_with_a_warning():
    assert warnings(pool([captured("a"), captured("b")])) == []
    both = pool([captured("a"), captured("b", prefill_step=512, expert_kernel=None)])
    assert both.n_streams == 8
    (line,) = warnings(both)
    assert line.startswith(
        "a and b were not computed alike (expert kernel row against mlx-lm's choice, prefill step "
        "2048 against 512): pooled all the same"
    )


def test_every_value_is_named_once_and_what_is_not_recorded_is_no_difference():
    imported = captured("i", moetap_version="", expert_kernel=None, prefill_step=0)
    four = [imported, captured("a"), captured("b", prefill_step=64), captured("c")]
    found = pool(four).differences
    assert [(d.first.source, d.second.source, d.values) for d in found] == [
        ("a", "b", (("prefill step", "2048", "64"),))
    ]
    # An importer may know the step and not the kernel.
    knows = captured("k", moetap_version="", expert_kernel=None, prefill_step=32)
    (line,) = warnings(pool([imported, knows, captured("a")]))
    assert "k and a were" in line and "kernel" not in line


def test_swap_growth_is_flagged_above_100_megabytes():
    for growth in (None, 0, 100_000_000):
        assert warnings(pool([captured("a", swap_growth_bytes=growth)])) == []
    (line,) = warnings(pool([captured("a"), captured("b", swap_growth_bytes=350_000_000)]))
    assert line.startswith("b: memory ran short, swap grew by 0.35 GB")
    assert "the times are not those of a machine at ease" in line


def test_sampler_of_an_imported_trace_is_not_recorded():
    assert sampler(pool([captured("a")])) == "greedy (temperature 0)"
    imported = captured("i", moetap_version="")
    assert sampler(pool([captured("a"), imported])) == "greedy (temperature 0) and not recorded"
