"""scikit-learn computes on the ranks with its array API dispatch; results are those of arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from sklearn import config_context, metrics
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.ensemble import RandomForestRegressor
from sklearn.kernel_approximation import Nystroem
from sklearn.linear_model import (
    LinearRegression,
    LogisticRegression,
    PoissonRegressor,
    Ridge,
    RidgeClassifier,
    RidgeClassifierCV,
    RidgeCV,
)
from sklearn.metrics import pairwise
from sklearn.model_selection import (
    GridSearchCV,
    cross_val_predict,
    cross_val_score,
    train_test_split,
)
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import (
    Binarizer,
    KernelCenterer,
    LabelEncoder,
    MaxAbsScaler,
    MinMaxScaler,
    Normalizer,
    PolynomialFeatures,
    StandardScaler,
)
from sklearn.utils import all_estimators, get_tags

from alchemist_ray import AlchemistSession, Handle
from alchemist_ray.errors import MatrixError

random = np.random.default_rng(0)
x = random.normal(size=(200, 6)) * [6, 5, 4, 3, 2, 1]
y = (x[:, 0] + random.normal(size=200) > 0).astype(int)
t = x @ np.arange(6.0) + random.normal(size=200)
guess, chance = (x[:, 0] > 0.2).astype(int), np.clip(y * 0.6 + random.random(200) * 0.3, 0, 1)

PREPROCESSING = (
    StandardScaler, MaxAbsScaler, MinMaxScaler, Normalizer, PolynomialFeatures, Binarizer,
)  # fmt: skip
OF_CLASSES = (
    "accuracy_score zero_one_loss hamming_loss balanced_accuracy_score confusion_matrix "
    "cohen_kappa_score f1_score"
)
OF_CHANCES = "brier_score_loss log_loss d2_brier_score d2_log_loss_score roc_auc_score"
CURVES = "roc_curve precision_recall_curve det_curve"
OF_NUMBERS = (
    "mean_squared_error mean_absolute_error r2_score mean_absolute_percentage_error max_error "
    "mean_squared_log_error root_mean_squared_error root_mean_squared_log_error mean_pinball_loss "
    "mean_tweedie_deviance mean_poisson_deviance mean_gamma_deviance explained_variance_score "
    "median_absolute_error d2_absolute_error_score d2_pinball_score d2_tweedie_score"
)
PAIRWISE = (
    "euclidean_distances cosine_similarity cosine_distances linear_kernel polynomial_kernel "
    "rbf_kernel sigmoid_kernel paired_cosine_distances paired_euclidean_distances "
    "pairwise_distances pairwise_kernels"
)
Work = Callable[[Any, Any, Any, Any, Any], Any]


def scaled_ridge() -> Any:
    return make_pipeline(StandardScaler(), Ridge(solver="svd"))


WORK: dict[str, Work] = {
    "PCA": lambda X, Y, T, G, C: PCA(3, svd_solver="full").fit(X).transform(X),
    "PCA back": lambda X, Y, T, G, C: (p := PCA(3, svd_solver="full").fit(X)).inverse_transform(
        p.transform(X)
    ),
    "PCA randomized": lambda X, Y, T, G, C: PCA(
        3, svd_solver="randomized", random_state=0, power_iteration_normalizer="QR"
    ).fit(X).explained_variance_,
    "Ridge": lambda X, Y, T, G, C: Ridge(solver="svd").fit(X, T).predict(X),
    "RidgeCV": lambda X, Y, T, G, C: RidgeCV().fit(X, T).predict(X),
    "RidgeClassifierCV": lambda X, Y, T, G, C: RidgeClassifierCV().fit(X, Y).predict(X),
    "LogisticRegression": lambda X, Y, T, G, C: LogisticRegression().fit(X, Y).predict_proba(X),
    "GaussianNB": lambda X, Y, T, G, C: GaussianNB().fit(X, Y).predict_proba(X),
    "PoissonRegressor": lambda X, Y, T, G, C: PoissonRegressor().fit(X / 9, abs(T)).predict(X / 9),
    "Nystroem": lambda X, Y, T, G, C: Nystroem(n_components=5, random_state=0).fit_transform(X),
    "a pipeline": lambda X, Y, T, G, C: make_pipeline(
        StandardScaler(), PCA(3, svd_solver="full"), Ridge(solver="svd")
    ).fit(X, T).predict(X),
    "cross_val_score": lambda X, Y, T, G, C: cross_val_score(scaled_ridge(), X, T, cv=3),
    "cross_val_score of classes": lambda X, Y, T, G, C: cross_val_score(
        LinearDiscriminantAnalysis(), X, Y, cv=3
    ),
    "cross_val_predict": lambda X, Y, T, G, C: cross_val_predict(scaled_ridge(), X, T, cv=3),
    "GridSearchCV": lambda X, Y, T, G, C: GridSearchCV(
        scaled_ridge(), {"ridge__alpha": [0.1, 10, 1000]}, cv=3
    ).fit(X, T).predict(X),
    "RidgeClassifier": lambda X, Y, T, G, C: RidgeClassifier(solver="svd").fit(X, Y).predict(X),
    "LDA": lambda X, Y, T, G, C: LinearDiscriminantAnalysis().fit(X, Y).predict(X),
    "LDA chances": lambda X, Y, T, G, C: LinearDiscriminantAnalysis().fit(X, Y).predict_proba(X),
    "KernelCenterer": lambda X, Y, T, G, C: KernelCenterer().fit_transform(X @ X.T),
    "LabelEncoder": lambda X, Y, T, G, C: LabelEncoder().fit_transform(Y),
    "train_test_split": lambda X, Y, T, G, C: tuple(train_test_split(X, Y, random_state=0)),
    **{kind.__name__: lambda X, Y, T, G, C, kind=kind: kind().fit_transform(X)
       for kind in PREPROCESSING},
    **{name: lambda X, Y, T, G, C, name=name: getattr(metrics, name)(Y, G)
       for name in OF_CLASSES.split()},
    **{name: lambda X, Y, T, G, C, name=name: getattr(metrics, name)(Y, C)
       for name in (*OF_CHANCES.split(), *CURVES.split())},
    **{name: lambda X, Y, T, G, C, name=name: getattr(metrics, name)(abs(T) + 1, abs(T) + 1.5)
       for name in OF_NUMBERS.split()},
    **{name: lambda X, Y, T, G, C, name=name: getattr(pairwise, name)(X, X)
       for name in PAIRWISE.split()},
}  # fmt: skip


OF_SCORES = {"cross_val_score", "cross_val_score of classes"}  # arrays of scores, made here


@pytest.fixture(autouse=True)
def dispatch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SCIPY_ARRAY_API", "1")
    # StandardScaler divides 0 by 0, and silences that for NumPy's own arrays only.
    with config_context(array_api_dispatch=True), np.errstate(divide="ignore", invalid="ignore"):
        yield


@pytest.mark.parametrize("name", WORK)
def test_the_result_is_that_of_arrays_and_stays_on_the_ranks(
    session: AlchemistSession, name: str
) -> None:
    wanted = WORK[name](x, y, t, guess, chance)
    found = WORK[name](*map(session.send_matrix, (x, y, t, guess, chance)))
    several = isinstance(wanted, tuple)
    for mine, arrays in zip(found if several else [found], wanted if several else [wanted],
                            strict=True):  # fmt: skip
        is_array = isinstance(arrays, np.ndarray) and name not in OF_SCORES
        assert isinstance(mine, Handle) == is_array
        np.testing.assert_allclose(np.asarray(mine), arrays, rtol=1e-8, atol=1e-6)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of estimators that it will remove
def test_every_estimator_that_the_dispatch_lists_is_here() -> None:
    listed = set()
    for name, kind in all_estimators():
        with contextlib.suppress(TypeError, AttributeError):  # those that need arguments
            if get_tags(kind()).array_api_support:
                listed.add(name)
    assert "PCA" in listed
    short = {"LDA": "LinearDiscriminantAnalysis"}
    assert listed <= {short.get(name, name) for name in WORK}


@pytest.mark.parametrize(
    "estimator",
    [LinearRegression(), KMeans(3, random_state=0), RandomForestRegressor(3, random_state=0)],
)
def test_estimators_without_dispatch_compute_here_on_a_copy(
    session: AlchemistSession, estimator: Any
) -> None:
    wanted = estimator.fit(x, t).predict(x)
    X, T = session.send_matrix(x), session.send_matrix(t)
    with config_context(array_api_dispatch=False):
        found = estimator.fit(X, T).predict(X)
    assert isinstance(found, np.ndarray)
    np.testing.assert_allclose(found, wanted)


def test_what_does_not_run_says_why(session: AlchemistSession) -> None:
    X = session.send_matrix(x)
    for solver in ("covariance_eigh", "auto"):  # it writes to eigenvecs.T
        with pytest.raises(MatrixError, match=r"is a copy.*PCA\(svd_solver='full'\)"):
            PCA(3, svd_solver=solver).fit(X)
    with pytest.raises(ValueError, match="different devices: cpu, gang"):  # it has no dispatch
        KMeans(3).fit(X)
