"""The table of SSDs and what `--ssd` accepts."""

from __future__ import annotations

import pytest

from moetap.errors import MoetapError, UsageError
from moetap.machines import find_machine, load_machines, parse_ssd, read_machines

ROW = """
[[ssd]]
name = "a-1"
machine = "A 1"
gb_per_s = [1, 2.5]
how_read = "guess"
source = "nowhere"
"""


def test_the_bundled_table():
    machines = load_machines()
    assert len(machines) == 10
    assert all(1e9 < m.low_bps <= m.high_bps < 20e9 and m.source and m.how_read for m in machines)
    assert {(m.low_bps, m.high_bps) for m in machines if m.name == "m5-max"} == {(4e9, 12.6e9)}
    # Names can be typed, and none could be taken for a number.
    assert all(m.name == m.name.lower() and not m.name[0].isdigit() for m in machines)


@pytest.mark.parametrize("name", ["m1-air", "M1 Air", "m1air", "M1 Air 512 GB", " m1-AIR "])
def test_find_by_name_or_description(name):
    assert find_machine(name).machine == "M1 Air 512 GB"


@pytest.mark.parametrize("name", ["m9", "", "m1", "air"])
def test_unknown_machines_list_the_names(name):
    with pytest.raises(UsageError) as error:
        find_machine(name)
    assert all(machine.name in str(error.value) for machine in load_machines())


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("3.4", 3.4e9, 3.4e9),
        ("6", 6e9, 6e9),
        (".5", 0.5e9, 0.5e9),
        ("2.5-3.1", 2.5e9, 3.1e9),
        ("2.5 - 3.1 GB/s", 2.5e9, 3.1e9),
    ],
)
def test_numbers(text, low, high):
    ssd = parse_ssd(text)
    assert (ssd.low_bps, ssd.high_bps) == pytest.approx((low, high)) and ssd.source == "as given"


def test_a_machine_brings_its_source():
    ssd = parse_ssd("m3-pro")
    assert (ssd.low_bps, ssd.high_bps) == pytest.approx((6.4e9, 6.4e9))
    assert ssd.source == "M3 Pro 512 GB, engine benchmark: penta2himajin/qwisp bench/community"


@pytest.mark.parametrize("text", ["0", "3400", "3-2", "0-1"])
def test_bandwidths_out_of_range(text):
    with pytest.raises(UsageError, match="above 0 and up to 1000"):
        parse_ssd(text)


@pytest.mark.parametrize("text", ["", "-1", "nan", "inf", "1e3", "3,4", "3.4.5", "fast", "3.4 GiB"])
def test_neither_number_nor_machine(text):
    with pytest.raises(UsageError, match=r"neither a number in GB/s.*m1-air"):
        parse_ssd(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[[ssd]",
        "ssd = 1",
        "ssd = [1]",
        ROW.replace("source", "sauce"),
        ROW + "extra = 1",
        ROW.replace("[1, 2.5]", "[2.5, 1]"),
        ROW.replace("[1, 2.5]", "[1]"),
        ROW.replace("[1, 2.5]", "[0, 1]"),
        ROW.replace("[1, 2.5]", "[nan, nan]"),
        ROW.replace("[1, 2.5]", "2.5"),
        ROW.replace('"guess"', '""'),
        ROW.replace('"guess"', "7"),
        ROW + ROW,
    ],
)
def test_malformed_tables(tmp_path, text):
    path = tmp_path / "machines.toml"
    path.write_text(ROW)
    assert read_machines(path)[0].high_bps == 2.5e9
    path.write_text(text)
    with pytest.raises(MoetapError, match=r"machines\.toml"):
        read_machines(path)


def test_missing_table(tmp_path):
    with pytest.raises(MoetapError, match="reinstall"):
        read_machines(tmp_path / "machines.toml")
