from __future__ import annotations

import dataclasses

import pytest
from unionkit import golden_trace, make_model, make_stream, make_trace

from moetap.analysis.jackknife import Estimate
from moetap.analysis.ledger import Cache, MoeLayer, Sizes, ledger, make_tier
from moetap.analysis.study import Options, study
from moetap.analysis.verdict import (
    BY_CONSTRUCTION,
    CACHED,
    COLD,
    FAIL,
    GO,
    IO,
    LEDGER,
    MISSING,
    OVERFLOW,
    PASS,
    UNDECIDED,
    Judgement,
    MacVerdict,
    _ledger,
    decide,
    judge,
)
from moetap.criteria import CLOSE, DEFAULT, RESTRICT, Criterion, read_criteria
from moetap.errors import UsageError
from moetap.report.verdict_table import figure as verdict_figure

CRITERIA = read_criteria()


@pytest.mark.parametrize(
    ("value", "low", "high", "expected"),
    [
        (0.20, 0.16, 0.24, (PASS, PASS, PASS)),
        (0.20, 0.10, 0.30, (PASS, UNDECIDED, UNDECIDED)),
        (0.10, 0.05, 0.20, (FAIL, UNDECIDED, UNDECIDED)),
        (0.10, 0.05, 0.14, (FAIL, FAIL, FAIL)),
        (0.15, 0.15, 0.15, (PASS, PASS, PASS)),  # on the threshold
        (1 - 0.85, 1 - 0.85, 0.2, (PASS, PASS, PASS)),  # 0.15000000000000002 and the like
        (0.50, None, None, (PASS, MISSING, UNDECIDED)),
    ],
)
def test_judge_at_least(value, low, high, expected):
    assert judge(Estimate(value, low, high), 0.15, at_least=True) == expected


def test_judge_at_most():
    assert judge(Estimate(0.2, 0.1, 0.25), 0.25, at_least=False) == (PASS, PASS, PASS)
    assert judge(Estimate(0.2, 0.1, 0.3), 0.25, at_least=False) == (PASS, UNDECIDED, UNDECIDED)
    assert judge(Estimate(0.9, 0.8, 1.0), 0.25, at_least=False) == (FAIL, FAIL, FAIL)


def qwen(lanes=(4,), slots=None):
    """Qwen3.6-35B-A3B, 4-bit group 64, without the assumed activations and overhead."""
    sizes = Sizes(
        model="qwen", source="", layers=tuple(MoeLayer(i, 256, 8, 1_769_472) for i in range(40)),
        resident_bytes=1_389_394_176, caches=(Cache(0, "all", 20_480, 64_389_120),),
        cache_source="",
    )  # fmt: skip
    return ledger(sizes, [make_tier(g) for g in (8, 16, 24, 32)], lanes, 8192, slots)


def test_the_known_ledger_depends_on_the_rule():
    book = qwen()
    tier = make_tier(16)
    found = _ledger(CRITERIA, tier, 128, book, "")
    assert found.outcome == UNDECIDED and "depends on the rule" in found.why
    # 11,377,735,936 bytes and the assumed 0.5 GB.
    nets = {net.rule: net.net_bytes for net in found.line.nets}
    assert nets == {
        "older": 11_453_250_000 - 11_877_735_936,
        "newer": 12_713_120_000 - 11_877_735_936,
    }
    assert _ledger(CRITERIA, make_tier(24), 192, book, "").outcome == PASS
    assert _ledger(CRITERIA, make_tier(8), 128, book, "").outcome == FAIL
    demanding = dataclasses.replace(CRITERIA, ledger=Criterion(1.0, RESTRICT))
    assert _ledger(demanding, tier, 128, book, "").outcome == FAIL
    assert _ledger(CRITERIA, tier, 128, None, "no sizes").why == "no sizes"


def mac(gib, slots, io, overflow, book, definition=COLD):
    """A Mac with given outcomes."""
    tier = make_tier(gib)
    figure = Estimate(0.2, 0.1, 0.3)
    line = qwen().line(tier, slots, 4)
    judgements = tuple(
        Judgement(
            name, "", tier, slots, 4, outcome, outcome, outcome, figure=figure,
            line=line if name == LEDGER else None, why="reason",
        )
        for name, outcome in ((IO, io), (OVERFLOW, overflow), (LEDGER, book))
    )  # fmt: skip
    return MacVerdict(definition, tier, slots, judgements, ())


P, F, U, M = PASS, FAIL, UNDECIDED, MISSING


@pytest.mark.parametrize(
    ("at_16", "at_24", "at_32", "word", "text"),
    [
        ((P, BY_CONSTRUCTION, P), (P, P, P), (P, P, P), GO, "go: all criteria pass at 16 GiB"),
        ((P, P, P), (F, P, P), (P, P, P), GO, "on 24 GiB I/O reduction fails"),
        ((F, P, P), (P, P, P), (P, P, P), CLOSE, "close: I/O reduction fails at 16 GiB"),
        ((P, F, P), (P, P, P), (P, P, P), RESTRICT, "restrict to C >= 192 (the default from 24"),
        ((P, F, P), (P, F, P), (P, P, P), RESTRICT, "restrict to C >= 256 (the default from 32"),
        ((P, F, P), (P, F, P), (P, F, P), CLOSE, "close: overflow fails at 16 GiB"),
        ((P, P, F), (P, P, P), (P, P, P), RESTRICT, "restrict to >= 24 GiB: the RAM ledger"),
        ((P, P, F), (P, P, U), (P, P, P), RESTRICT, "restrict to >= 32 GiB"),
        ((P, P, F), (P, P, U), (P, P, F), UNDECIDED, "at best restrict to >= 24 GiB"),
        ((U, P, P), (P, P, P), (P, P, P), UNDECIDED, "at best go, at worst close"),
        ((P, P, U), (P, P, P), (P, P, P), UNDECIDED, "at best go, at worst restrict to >= 24"),
        ((F, P, U), (P, P, P), (P, P, P), CLOSE, "close"),
        ((M, P, P), (P, P, P), (P, P, P), MISSING, "no verdict: I/O reduction is not available"),
    ],
)  # fmt: skip
def test_decisions(at_16, at_24, at_32, word, text):
    macs = [mac(8, 64, F, F, F), mac(16, 128, *at_16), mac(24, 192, *at_24), mac(32, 256, *at_32)]
    decision = decide(CRITERIA, COLD, macs, qwen())
    assert decision.word == word
    assert text in decision.sentence
    assert len(decision.would_change) == 3


def test_a_criterion_may_close_instead_of_restrict():
    strict = dataclasses.replace(CRITERIA, ledger=Criterion(0.0, CLOSE))
    macs = [mac(16, 128, P, P, F), mac(24, 192, P, P, P)]
    assert decide(strict, COLD, macs, qwen()).word == CLOSE


def options(**fields):
    tiers = tuple(make_tier(g) for g in (8, 16))
    return Options(**({"criteria": CRITERIA, "tiers": tiers, "groups": 20} | fields))


def test_figures_come_from_the_tables():
    two = dataclasses.replace(CRITERIA, lanes=2)
    found = study([golden_trace()], options(criteria=two))
    cold = found.verdict.asked(COLD)
    io, overflow, book = cold.judgements
    line = next(f for f in found.unions.figures if f.b == 2)
    assert io.figure == line.values.saved
    # By hand (test_unions): mean union 49 / 16 against 2 x 2.
    assert io.figure.value == pytest.approx(1 - 49 / 64)
    assert overflow.outcome == BY_CONSTRUCTION  # C = 4 holds all experts
    assert book.outcome == MISSING and "does not record" in book.why
    assert [(j.criterion, j.rows) for j in cold.beside] == [(OVERFLOW, 8), (OVERFLOW, 24)]
    cached = found.verdict.asked(CACHED)
    assert cached.judgements[0].figure == found.cache.find("all", 2, 4).values.saved
    assert cached.beside[-1].outcome == MISSING  # no steady step
    assert [d.word for d in found.verdict.decisions] == [MISSING, MISSING]


def test_too_few_streams_and_no_interval():
    found = study([golden_trace()], options())  # 4 streams, B = 4: no group without one of them
    io = found.verdict.asked(COLD).judgements[0]
    assert (io.point, io.interval, io.outcome) == (PASS, MISSING, UNDECIDED)
    assert "without one of the 4 streams" in io.why
    stream = make_stream("a", "", [[{0, 1}]] * 3, (2,))
    found = study([make_trace(make_model((4,), (2,)), [stream])], options())
    io = found.verdict.asked(COLD).judgements[0]
    assert io.outcome == MISSING and io.why == "1 stream"


def test_identical_lanes_pass():
    """All streams select the same: U = k, so 4 lanes save three quarters exactly."""
    cells = [[{0, 1}], [{2, 3}], [{0, 1}]]
    streams = [make_stream(f"s{i}", "", cells, (2,)) for i in range(6)]
    found = study([make_trace(make_model((64,), (2,)), streams)], options())
    for definition in (COLD, CACHED):
        io = found.verdict.asked(definition).judgements[0]
        assert io.outcome == PASS and io.figure.value == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lanes = 4 ", "lanes = 1 ", "lanes is 1, must be a whole number between 2"),
        ("lanes = 4 ", "lanes = true ", "must be a whole number"),
        ("tier_gib = 16 ", "tier_gib = 0 ", "tier_gib is 0"),
        ("at_least = 0.15 ", "at_least = 15 ", "at_least in [io_reduction] is 15, must be a share"),
        ("at_most = 0.25", "at_most = nan", "must be a number"),
        ("at_most = 0.25", "at_mots = 0.25", "unknown key 'at_mots' in [overflow]"),
        ("at_most = 0.25", "", "key 'at_most' in [overflow] is missing"),
        ("net_at_least_gb = 0.0", 'net_at_least_gb = "0"', "must be a number"),
        ("[ledger]", "[extra]\n[ledger]", "unknown key 'extra'"),
        ("[ledger]", "[overflow.ledger]", "key 'ledger' is missing"),
        ('otherwise = "close"', 'otherwise = "stop"', "otherwise in [io_reduction] is 'stop'"),
        ("[ledger]", "[ledger", "not a TOML file"),
    ],
)
def test_criteria_refused(tmp_path, old, new, message):
    text = DEFAULT.read_text()
    assert old in text
    path = tmp_path / "mine.toml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UsageError) as error:
        read_criteria(path)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert str(path) in str(error.value)


def test_criteria_file_cannot_be_read(tmp_path):
    with pytest.raises(UsageError, match="cannot read"):
        read_criteria(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not a TOML file"):
        read_criteria(tmp_path / "bytes.toml")


def test_default_criteria():
    assert (CRITERIA.lanes, CRITERIA.tier_gib) == (4, 16)
    assert CRITERIA.io_reduction == Criterion(0.15, CLOSE)
    assert CRITERIA.overflow == Criterion(0.25, RESTRICT)
    assert CRITERIA.ledger == Criterion(0.0, RESTRICT)
    import hashlib

    assert CRITERIA.sha256 == hashlib.sha256(CRITERIA.text.encode()).hexdigest()


def test_more_rows_would_overflow_only_where_they_can():
    held = study([golden_trace()], options(criteria=dataclasses.replace(CRITERIA, lanes=2)))
    said = held.verdict.decisions[0].would_change[1]
    assert said == "Overflow cannot fail: 2 lanes of 1 row select no more than C = 4 experts."
    cells = [[{0, 1}], [{2, 3}], [{0, 1}]]  # 4 lanes of 8 rows select up to 64 of 256
    streams = [make_stream(f"s{i}", "", cells * 4, (2,)) for i in range(6)]
    for n_experts, possible in ((256, True), (128, False)):  # 24 rows: up to 192, and 128
        found = study([make_trace(make_model((n_experts,), (2,)), streams)], options())
        said = found.verdict.decisions[0].would_change[1]
        assert "4 lanes of 1 row select no more than C = 128" in said
        assert ("More rows per lane would (verify widths)." in said) == possible


def test_shipped_criteria(tmp_path):
    assert CRITERIA.shipped
    own = tmp_path / "mine.toml"
    own.write_text(CRITERIA.text + "# mine\n")
    assert not read_criteria(own).shipped


def test_intervals_are_clipped_where_shown():
    tier = make_tier(16)

    def shown(criterion, value, low, high):
        estimate = Estimate(value, low, high)
        return verdict_figure(
            Judgement(criterion, "", tier, 128, 4, PASS, PASS, PASS, figure=estimate)
        )

    assert shown(OVERFLOW, 0.168, -0.011, 0.347) == "16.8 %, 0.0 to 34.7 %"
    assert shown(OVERFLOW, 0.999, 0.996, 1.002) == "99.9 %, 99.6 to 100.0 %"
    assert shown(OVERFLOW, 0.5, 0.4, 0.6) == "50.0 ± 10.0 %"
    # B lanes may cost more than one: that is no error of the interval.
    assert shown(IO, -0.454, -1.338, 0.43) == "-45.4 ± 88.4 %"
