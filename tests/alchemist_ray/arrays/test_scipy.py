"""SciPy's functions that follow the array API standard compute on the ranks.

SciPy decides when it is imported: one process with ``SCIPY_ARRAY_API=1`` runs this file for all.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest
import ray
import scipy.fft
import scipy.integrate
import scipy.ndimage
import scipy.signal
import scipy.special
import scipy.stats
from scipy.spatial import distance

from alchemist_ray import AlchemistSession, Handle
from tests.support.commands import run

x = np.random.default_rng(0).random((30, 4))
y = x[:, ::-1].copy()

OF_ONE = {
    scipy.special: "cbrt digamma entr erf erfc exp10 exp1 exp2 expi expit gamma gammaln i0 i0e i1"
    " i1e log_ndtr log_softmax logit logsumexp ndtr ndtri sinc softmax",
    scipy.stats: "circmean circvar describe differential_entropy entropy gmean gstd gzscore hmean"
    " iqr jarque_bera kurtosis kurtosistest lmoment median_abs_deviation mode moment normaltest"
    " rankdata sem skew skewtest tmean tstd tvar variation zscore",
    scipy.signal: "detrend hilbert medfilt periodogram welch",
    scipy.fft: "dct fft rfft",
    scipy.integrate: "cumulative_trapezoid trapezoid",
    scipy.ndimage: "laplace",
}
OF_TWO = {
    scipy.special: "chdtr gammainc huber kl_div rel_entr stdtrit xlog1py xlogy",
    scipy.stats: "bartlett f_oneway mannwhitneyu pearsonr ttest_ind ttest_rel",
    scipy.signal: "convolve correlate fftconvolve oaconvolve",
    distance: "cdist",
}


def _called(system: Any, name: str, count: int) -> Any:
    return lambda *arrays: getattr(system, name)(*arrays[:count])


WORK: dict[str, Any] = {
    **{
        f"{system.__name__}.{name}": _called(system, name, count)
        for count, table in ((1, OF_ONE), (2, OF_TWO))
        for system, names in table.items()
        for name in names.split()
    },
    "betainc": lambda a, b: scipy.special.betainc(a, a, b),
    "chisquare": lambda a, b: scipy.stats.chisquare(a, a),
    "decimate": lambda a, b: scipy.signal.decimate(a, 2, axis=0),
    "gaussian_filter": lambda a, b: scipy.ndimage.gaussian_filter(a, 1.0),
    "ks_2samp": lambda a, b: scipy.stats.ks_2samp(a[:, 0], b[:, 0]),
    "linregress": lambda a, b: tuple(scipy.stats.linregress(a[:, 0], b[:, 0])),
    "pmean": lambda a, b: scipy.stats.pmean(a, 2),
    "quantile": lambda a, b: scipy.stats.quantile(a, 0.5),
    "resample": lambda a, b: scipy.signal.resample(a, 10, axis=0),
    "savgol_filter": lambda a, b: scipy.signal.savgol_filter(a, 5, 2, axis=0),
    "simpson": lambda a, b: scipy.integrate.simpson(a, axis=0),
    "trim_mean": lambda a, b: scipy.stats.trim_mean(a, 0.1),
    "ttest_1samp": lambda a, b: scipy.stats.ttest_1samp(a, 0.5),
}  # fmt: skip


@pytest.fixture(scope="module")
def wrong(cluster: str) -> dict[str, str]:
    """What is wrong with the results of each function; nothing if they are those of arrays."""
    done = run(sys.executable, "-W", "ignore", "-m", __name__, cluster, SCIPY_ARRAY_API="1")
    assert not done.returncode, done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("name", WORK)
def test_the_result_is_that_of_arrays(wrong: dict[str, str], name: str) -> None:
    assert not wrong[name]


def test_large_results_stay_on_the_ranks(wrong: dict[str, str]) -> None:
    assert wrong["handles"] == ""


def _numbers(result: Any) -> list[Any]:
    """The arrays of a result, which may be a tuple or have attributes in place of elements."""
    if hasattr(result, "statistic"):
        return [np.asarray(result.statistic), np.asarray(result.pvalue)]
    several = result if isinstance(result, tuple) else (result,)
    return [np.asarray(one) for one in several if not isinstance(one, tuple)]


def _compare(address: str) -> dict[str, str]:
    ray.init(address=address, log_to_driver=False)
    wrong = {}
    with AlchemistSession(2) as als:
        A, B = als.send_matrix(x), als.send_matrix(y)
        for name, work in WORK.items():
            try:
                pairs = zip(_numbers(work(A, B)), _numbers(work(x, y)), strict=True)
                for mine, arrays in pairs:
                    np.testing.assert_allclose(mine, arrays, rtol=1e-7, atol=1e-12)
                wrong[name] = ""
            except Exception as error:
                wrong[name] = f"{type(error).__name__}: {error}"
        kept = (scipy.special.expit(A), scipy.stats.zscore(A), scipy.signal.hilbert(A))
        wrong["handles"] = " ".join(type(one).__name__ for one in kept if type(one) is not Handle)
    return wrong


if __name__ == "__main__":
    print(json.dumps(_compare(sys.argv[1])))
