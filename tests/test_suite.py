"""The pure parts of the benchmark suite: its cases, what is drawn from answers, what is written."""

import json

import pytest

from benchmarks.models import SHAPES
from benchmarks.names import CHECKPOINTED, CHUNKED, OURS
from benchmarks.suite.cases import DECODER, LLAMA, SETS, STREAMBP, Case
from benchmarks.suite.figures import Ratios, head_flops, units
from benchmarks.suite.report import page
from benchmarks.suite.results import Results
from benchmarks.suite.store import Store
from benchmarks.suite.tables import table
from benchmarks.suite.verdicts import verdicts

MIB = 2**20


def measured(family: str, method: str, length: int, peak_mib: int, flops: float = 1.0) -> dict:
    """A record as a worker would answer; ``flops`` in units of 4 F + 4.5 A and the head's."""
    case = Case(family, "small", method, length, chunk=1024)
    linear, attention = units(SHAPES["small"], length)
    head = head_flops(SHAPES["small"], length)
    total = flops * (4 * linear + 4.5 * attention + head)
    return {
        "case": vars(case),
        "versions": {"torch": "2"},
        "peak_bytes": peak_mib * MIB,
        "timeline": [(0.0, 0), (0.5, peak_mib * MIB)],
        "flops": {
            "products": total - 4.5 * attention,
            "attention": 4.5 * attention,
            "total": total,
        },
    }


def records(*found: dict) -> dict[str, dict]:
    return {Case(**record["case"]).key: record for record in found}


def raced(family: str, length: int, seconds: dict[str, list[float]]) -> dict:
    cases = [Case(family, "small", method, length, chunk=1024) for method in seconds]
    times = {m: [{"seconds": s, "cpu_seconds": s} for s in each] for m, each in seconds.items()}
    return {
        "cases": [vars(case) for case in cases],
        "against": cases[-1].method,
        "compile_s": dict.fromkeys(seconds, 3.0),
        "times": times,
    }


@pytest.mark.parametrize("name", SETS)
def test_no_case_of_a_set_is_there_twice(name):
    plan = SETS[name]()
    for keys in ([c.key for c in plan.measures], [r.key for r in plan.races]):
        assert len(keys) == len(set(keys))
    for race in plan.races:
        assert len({(case.group, case.length) for case in race.cases}) == 1
    for case in plan.measures:
        assert case.shape in SHAPES
        assert Case.from_json(case.to_json()) == case
    part = plan.only("llama")
    assert part.measures and all(case.family == LLAMA for case in part.measures)
    assert part.gradients == plan.gradients
    assert part.races == [race for race in plan.races if race.cases[0].family == LLAMA]


def test_ratios_are_taken_within_rounds():
    # The machine is four times slower in the last round, which the ratio does not see.
    found = Ratios.of([(1.0, 2.0), (1.2, 2.0), (5.6, 8.0)])
    assert found.median == pytest.approx(0.6)
    assert found.range == pytest.approx((0.5, 0.7))
    assert found.quartiles == pytest.approx((0.55, 0.65))
    assert Ratios.of([(3.0, 4.0)]).quartiles == (0.75, 0.75)


def test_a_table_has_a_line_per_row():
    assert table(["a", "b"], [[1, 2]]) == "| a | b |\n| --- | ---: |\n| 1 | 2 |"


def test_limits_on_memory_and_flops():
    found = records(
        measured(DECODER, OURS, 8192, 250),
        measured(DECODER, OURS, 16_384, 500, flops=1.04),
        measured(DECODER, CHUNKED, 16_384, 1200),
        measured(DECODER, CHECKPOINTED, 16_384, 2600),
    )
    by_name = {verdict.what: verdict for verdict in verdicts(Results(found))}
    chunked = by_name[f"peak of {CHUNKED} by ours, T=16,384: at least"]
    assert (chunked.found, chunked.met) == (2.4, False)
    checkpointed = by_name[f"peak of {CHECKPOINTED} by ours, T=16,384: at least"]
    assert (checkpointed.found, checkpointed.met) == (5.2, True)
    growth = by_name["growth of memory by the floor: at most"]
    assert growth.found == pytest.approx(250 * MIB / 8192 / 22_528)
    assert not growth.met
    met = [v.met for name, v in by_name.items() if name.startswith("FLOPs of seqsplit by")]
    assert met == [True, False]


def test_limits_on_time_are_those_of_a_race():
    slower = raced(DECODER, 4096, {OURS: [1.2, 1.0, 1.1], CHUNKED: [1.0, 1.0, 1.0]})
    streambp = raced(LLAMA, 4096, {OURS: [0.9, 0.8, 2.0], STREAMBP: [1.0, 1.0, 1.0]})
    found = verdicts(Results({"a": slower, "b": streambp}))
    assert all(verdict.timed for verdict in found)
    assert [(verdict.found, verdict.limit, verdict.met) for verdict in found] == [
        (pytest.approx(1.1), 1.05, False),
        (pytest.approx(0.9), 1.0, True),
    ]


def test_the_page_has_the_figures_of_all_methods():
    found = records(
        *(measured(DECODER, OURS, length, length // 32) for length in (4096, 8192)),
        measured(DECODER, CHUNKED, 4096, 333),
        measured(LLAMA, STREAMBP, 4096, 777),
    )
    found["race"] = raced(DECODER, 4096, {OURS: [1.5, 1.5], CHUNKED: [3.0, 2.0]})
    found["lost"] = {"failed": "status 1\nValueError: no"}
    results = Results(found)
    text = page(results, verdicts(results))
    assert "| seqsplit | 128 | 256 | 32,768 | 1.5 |" in text
    assert f"| {CHUNKED} | 333 |" in text
    assert "| StreamBP | 777 |" in text
    assert "| seqsplit | 1.50 s | 0.625 |" in text
    assert "- lost: `ValueError: no`" in text


def test_an_interrupted_run_is_taken_up_and_merged(tmp_path):
    begun = Store(tmp_path / "begun.json")
    begun.put("a", {"x": 1})
    again = Store(tmp_path / "begun.json")
    assert "a" in again
    final = tmp_path / "final.json"
    final.write_text(json.dumps({"a": {"x": 0}, "b": {"x": 2}}))
    again.merge_into(final)
    assert Store(final).records == {"a": {"x": 1}, "b": {"x": 2}}
    assert Store(tmp_path / "begun.json").records == {}
