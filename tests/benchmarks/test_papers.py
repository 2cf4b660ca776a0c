"""The papers' experiments at a tiny size; statistics, tables, figures and pages."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import papers
from benchmarks.papers import (
    condest,
    factors,
    layouts,
    links,
    rl,
    session,
    spark,
    spark_scales,
    svd_scaling,
)
from benchmarks.papers.__main__ import EXPERIMENTS, claims, main, redraw
from benchmarks.papers.experiment import (
    PAGES,
    PAPERS,
    Page,
    Sample,
    Setting,
    effect,
    less,
    repeated,
    side,
)
from benchmarks.papers.phases import measured

TINY = Setting("small", runs=2, divide=1e5, spark=False)


def test_a_sample_has_mean_and_standard_deviation() -> None:
    found = Sample([1.0, 2.0, 3.0])
    assert (found.mean, found.spread) == (2.0, 1.0)
    assert str(found) == "2 ± 1"
    assert str(Sample([0.5])) == "0.5 (1 run)"


def test_the_first_run_is_not_counted() -> None:
    calls: list[int] = []
    assert len(repeated(lambda: calls.append(1), 3)) == 3
    assert len(calls) == 4


def test_sizes_shrink_so_that_bytes_are_divided() -> None:
    assert side(10_000, 100) == 1000
    m, n = side(5_000_000, 1000), side(10_000, 1000)
    assert m * n == pytest.approx(5_000_000 * 10_000 / 1000, rel=0.01)
    assert side(3, 1e9) == 1
    assert Setting("node").divisor({"node": 10.0}) == 10
    assert TINY.divisor({"small": 10.0}) == 1e5


def page_of(folder: Path, **values: Any) -> str:
    page = Page("trial", "Nobody 2000, Table I", "half of it", **values)
    add = page.table("a", "b")
    add(1, Sample([1.0, 3.0]))
    page.conclude(True, "it is fast", "2018, IV-A", "it took a second")
    page.conclude(None, "it is cheap", "2019, II", "no price is known")
    page.data = {"seconds": [1.0, 3.0]}
    page.draw = lambda figure: figure.subplots().plot([1, 2])
    page.save(TINY, folder)
    return (folder / "trial.md").read_text()


def test_a_page_has_table_verdicts_figure_and_json(tmp_path: Path) -> None:
    text = page_of(tmp_path, load=0.0)
    assert "| 1 | 2 ± 1 |" in text
    place = f"[2018, IV-A]({PAPERS['2018']})"
    claim = "**The paper's claim holds here:** it is fast"
    assert f"{claim} ({place}), because it took a second." in text
    assert "**The paper's claim cannot be tested here:** it is cheap" in text
    assert "Scale `small`: half of it." in text
    assert "![Nobody 2000, Table I](trial.png)" in text
    assert "loaded" not in text
    assert (tmp_path / "trial.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "trial.json").read_text())["data"] == {"seconds": [1.0, 3.0]}


def test_text_around_the_markers_stays_and_load_is_stated(tmp_path: Path) -> None:
    (tmp_path / "trial.md").write_text("# Mine\n\n<!-- trial -->\nold\n<!-- /trial -->\n\nafter\n")
    text = page_of(tmp_path, load=1e6)
    assert text.startswith("# Mine\n\n<!-- trial -->\n")
    assert text.endswith("<!-- /trial -->\n\nafter\n")
    assert "\nold\n" not in text
    assert "Taken on a loaded machine" in text


def test_a_row_with_another_number_of_cells_is_refused() -> None:
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        Page("trial", "", "").table("a", "b")("alone")


def draws(page: Page, folder: Path) -> None:
    """Check that a page has a figure with content."""
    page.save(TINY, folder)
    assert (folder / f"{page.name}.png").stat().st_size > 5000


class Freed:
    """Something that is freed once."""

    count = 0

    def free(self) -> None:
        self.count += 1


def test_phases_free_what_they_sent_and_computed() -> None:
    made: list[Freed] = []

    def new(*_: object) -> Freed:
        made.append(Freed())
        return made[-1]

    found = measured(lambda: [new(), new()], new, lambda result: None, 2)
    assert [len(times) for times in found] == [2, 2, 2]
    assert [freed.count for freed in made] == 9 * [1]
    assert 0 <= found.share <= 100


def test_spark_is_left_out_with_a_reason() -> None:
    assert spark.Alone(TINY).times("svd", 10, 10, 2) == "left out (`--no-spark`)"
    cluster = Setting("cluster")
    assert spark.missing_master(cluster) is not None
    assert spark.missing_master(Setting("cluster", spark_master="spark://head:7077")) is None


def test_the_listing_of_the_paper_runs_and_its_values_are_checked(cluster: str) -> None:
    page = session.run(Setting("small", runs=1))
    assert page.verdicts[0].startswith("**The paper's claim holds here")
    text = page.text(TINY)
    assert text.count("Data transfer times breakdown") == 2
    assert text.count(" shared memory ") == 2  # a row in each table
    (last,) = re.findall(r"^\[\[(\d.*)\]\]$", text, re.M | re.S)  # in the figure's order
    printed = [float(value) for value in last.split()]
    assert printed == sorted(printed, reverse=True)
    assert printed[0] == pytest.approx(session.PRINTED[0], rel=0.01)
    assert "rank 2 on node" in text


def test_layouts_buffers_and_routes_are_all_measured(cluster: str, tmp_path: Path) -> None:
    page = layouts.run(TINY)
    assert page.data.pop(layouts.WITHOUT_SPARK) == "left out (`--no-spark`)"
    assert len(page.data) == 2 * 2 * len(layouts.LAYOUTS) * len(layouts.BUFFERS)
    assert all(len(times) == TINY.runs for times in page.data.values())
    assert "larger buffers are faster (TCP)" in "".join(page.verdicts)
    draws(page, tmp_path)


def test_each_factor_of_a_send_is_compared_in_all_settings_of_the_others(
    cluster: str, tmp_path: Path
) -> None:
    page = factors.run(TINY)
    assert len(page.data) == 2 ** len(factors.FACTORS)
    assert all(len(found) == TINY.runs for found in page.data.values())
    assert [row[0] for row in page.tables[0][1]] == list(factors.FACTORS)
    draws(page, tmp_path)
    times = {
        levels: 2.0 if "wide" in levels else 1.0 for levels in product(*factors.FACTORS.values())
    }
    ratios = factors._ratios(times)
    assert set(ratios["shape"]) == {2.0}
    assert set(ratios["layout"]) == {1.0}


@pytest.mark.root
@pytest.mark.skipif(links.missing() is not None, reason=str(links.missing()))
def test_links_have_their_rate_and_delay_and_hide_what_they_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = links.Link(1, 5)
    monkeypatch.setattr(links, "LINKS", (links.Link(0, 0), slow))
    page = links.run(Setting("small", runs=2, divide=25))
    took = {name: min(turns) for name, turns in page.data[str(slow)].items()}
    assert 0.005 < took["round trip 1"] < 0.02
    bits = 64 * 500 * 500
    for name in ("plain send 1", "plain fetch 4", "send 2", "fetch 4"):
        assert 0.1 < bits / took[name] / 1e9 < 1.0, name
    draws(page, tmp_path)


@pytest.mark.parametrize(("both", "hidden"), [(5.0, 0), (4.0, 50), (3.0, 100), (2.0, 100)])
def test_a_transfer_is_hidden_by_what_both_take_less_than_their_sum(
    both: float, hidden: float
) -> None:
    took = {"send of 9": [2.0], "product of 9": [3.0], "send during product of 9": [both]}
    assert links._hidden_share(took, "send", 9) == hidden


def test_the_scaling_of_an_svd_is_measured_without_spark(cluster: str, tmp_path: Path) -> None:
    page = svd_scaling.run(TINY)
    assert len(page.data["growing"]) == len(svd_scaling.ROWS)
    assert [len(page.data[kind]) for kind in ("strong", "weak")] == 2 * [len(page.data["gangs"])]
    assert "of Spark there are no times: left out" in "".join(page.verdicts)
    page.save(TINY, tmp_path)
    assert "left out (`--no-spark`)" in (tmp_path / "svd_scaling.md").read_text()


def test_spark_is_compared_by_the_same_method_in_each_turn() -> None:
    (arpack, _), (gram, _) = svd_scaling.METHODS.values()
    found: dict[str, Sample | str] = {
        arpack: Sample([1.0, 2.0]),
        gram: Sample([0.5, 0.5]),
        svd_scaling.BETTER: Sample([3.0, 4.0]),
        svd_scaling.TUNED: Sample([4.0, 1.0]),
        svd_scaling.PAPERS: Sample([8.0]),  # one run
    }
    assert svd_scaling._factors(found, "ARPACK") == [8.0, 4.0]
    assert svd_scaling._factors(found, "Gram matrix") == [6.0, 2.0]
    found[svd_scaling.TUNED] = found[svd_scaling.PAPERS] = "took more than 25 s"
    assert svd_scaling._factors(found, "ARPACK") == []
    assert svd_scaling._factors(found, "Gram matrix") == [6.0, 8.0]


@pytest.mark.skipif(spark.missing(Setting()) is not None, reason=str(spark.missing(Setting())))
def test_spark_computes_when_it_is_asked_and_goes_on_after_a_run_that_took_too_long() -> None:
    with spark.Asked(Setting(), "svd", 200, 30, 5, native=False, limit_s=60) as program:
        took = program.seconds(30)
        assert isinstance(took, float)
        assert 0 < took < 60
        program._limit_s = 0.001
        assert program.seconds(5) == program.seconds(5) == "took more than 0 s"
        program._limit_s = 60
        assert isinstance(program.seconds(30), float)


@pytest.mark.parametrize("name", ["table1", "transfer_shapes", "cg_timit"])
def test_an_experiment_runs_without_spark(cluster: str, tmp_path: Path, name: str) -> None:
    draws(EXPERIMENTS[name].run(TINY), tmp_path)
    assert "left out (`--no-spark`)" in (tmp_path / f"{name}.md").read_text()


def test_the_condition_number_of_the_matrices_is_known() -> None:
    A = condest.matrix(60)
    assert np.linalg.cond(A) == pytest.approx(condest.COND, rel=1e-6)


def test_learning_curves_are_drawn_from_the_stored_runs(tmp_path: Path) -> None:
    page = rl.run(TINY)
    assert page.verdicts[0].startswith("**Measured here, no claim of the papers:** ")
    draws(page, tmp_path)
    assert "there are no runs" in rl.run(TINY, tmp_path).verdicts[0]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_page_is_what_its_stored_data_say(name: str, tmp_path: Path) -> None:
    page = PAGES / f"{name}.md"
    (tmp_path / page.name).write_text(page.read_text())
    redraw(name, tmp_path)
    assert (tmp_path / page.name).read_text() == page.read_text()
    figure = PAGES / f"{name}.png"
    assert (
        figure.exists()
        == (tmp_path / figure.name).exists()
        == (f"({name}.png)" in page.read_text())
    )


def test_every_verdict_on_a_claim_links_its_section() -> None:
    for name in EXPERIMENTS:
        for verdict in json.loads((PAGES / f"{name}.json").read_text())["verdicts"]:
            if not verdict.startswith("**Measured here"):
                assert any(f"]({url})" in verdict for url in PAPERS.values()), verdict


# Claims of which one follows from the other, or that two pages word differently.
SAME = (
    ("VC_STAR is faster than MC_MR and STAR_VC", "MC_MR is slightly more expensive than VC_STAR"),
    (
        "wide matrices are faster than narrow ones",
        "short and wide is more efficient than tall and thin",
    ),
    ("wide matrices vary far less than tall ones", "short and wide varies less than tall and thin"),
)  # fmt: skip


def test_one_claim_has_one_verdict_on_all_pages() -> None:
    verdicts: dict[str, set[str]] = {}
    for page in PAGES.glob("*.json"):
        for line in json.loads(page.read_text())["verdicts"]:
            if (judged := Page.judged(line)) is not None:
                verdicts.setdefault(judged[0], set()).add(judged[2])
    assert len(verdicts) > 25
    for one, other in SAME:
        verdicts[one] |= verdicts[other]
    assert not {claim: said for claim, said in verdicts.items() if len(said) > 1}
    assert (PAGES / "claims.md").read_text() == claims()


def test_a_verdict_follows_from_its_own_noise() -> None:
    assert effect([1.1, 1.2, 1.3]) == 1
    assert effect([0.8, 0.9, 0.95, 0.97, 1.2]) == -1
    assert effect([0.9, 1.2, 1.3, 0.95]) == 0
    assert less(Sample([1.0, 1.2]), Sample([2.0, 2.2]))
    assert not less(Sample([1.0, 1.8]), Sample([1.6, 2.2]))


def test_the_reports_own_table_passes_the_rules_of_its_claims() -> None:
    report = spark_scales.reported()
    assert [holds for holds, _ in spark_scales.verdicts(report).values()] == [True] * 3
    tenfold = {
        scale: {name: Sample([3 * 10.0**step]) for name in its}
        for step, (scale, its) in enumerate(report.items())
    }
    assert [holds for holds, _ in spark_scales.verdicts(tenfold).values()] == [False] * 3
    noisy = {
        scale: {
            name: Sample(its[name].mean * factor for factor in (0.25, 1, 4)[:: (-1) ** step])
            for name in its
        }
        for step, (scale, its) in enumerate(report.items())
    }
    assert [holds for holds, _ in spark_scales.verdicts(noisy).values()] == ["noise"] * 3
    late = [holds for holds, _ in spark_scales.verdicts(tenfold, loaded=True).values()]
    assert late == [False, False, "noise"]  # growths are quotients of the same turn


def test_every_experiment_has_a_page_and_a_line_in_the_readme() -> None:
    readme = (Path(papers.__file__).with_name("README.md")).read_text()
    for name in EXPERIMENTS:
        page = (PAGES / f"{name}.md").read_text()
        assert f"<!-- {name} -->" in page
        assert f"(../results/papers/{name}.md)" in readme


def test_an_unknown_experiment_is_refused_with_the_names(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["table9"])
    assert "no experiment table9; there are session, layouts" in capsys.readouterr().err
