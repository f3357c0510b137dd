"""configs/delay: the page is what its raw data give, and what a row costs is counted on common seeds."""

from pathlib import Path

from delay_costs import page as delay_page

COMMITTED = Path(__file__).resolve().parents[2] / "configs/delay"
NAMED = dict(config="c", steps=10, b1=0.9, gradient_frac=0.1)


def run(lr: float, seed: int, delay: int, held_out: float) -> dict:
    return NAMED | dict(lr=lr, seed=seed, delay=delay, held_out=held_out)


def test_the_page_is_what_its_raw_data_give():
    assert delay_page.page(COMMITTED) == (COMMITTED / "README.md").read_text()


def test_rows_have_the_seeds_of_which_both_runs_are_there_and_prices_are_of_common_seeds(tmp_path):
    file = tmp_path / delay_page.FILE
    for seed, prompt, delayed in ((0, 2.0, 2.01), (1, 4.0, 4.03)):
        delay_page.add(file, run(0.1, seed, 0, prompt))
        delay_page.add(file, run(0.1, seed, 1, delayed))
    delay_page.add(file, run(0.2, 0, 0, 1.0))
    assert [row.settings[0] for row in delay_page.rows_of(delay_page.read(file))] == [0.1]
    delay_page.add(file, run(0.2, 0, 1, 9.0))
    delay_page.add(file, run(0.2, 0, 1, 1.5))  # in place of the one before
    free, best = delay_page.rows_of(delay_page.read(file))
    assert free.losses == {0: (2.0, 2.01), 1: (4.0, 4.03)} and best.losses == {0: (1.0, 1.5)}
    assert free.cost == "+0.0200 +- 0.1271" and best.cost == "+0.5000"
    assert abs(free.price(best) - 1.0) < 1e-9
    assert "ends 1.000 above 0.2, 0.9, 0.1, 50 times as much" in delay_page.page(tmp_path)
