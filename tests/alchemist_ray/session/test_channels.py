"""Running calls of two gangs exchange fields; a program looks at a running call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ali
from alchemist_ray import AlchemistSession, couple
from alchemist_ray.errors import (
    AlchemistError,
    BadArgumentError,
    ChannelError,
    DtypeError,
    LayoutError,
    SessionError,
    ShapeError,
)
from mpi_workers.matrix.dtypes import DTYPES
from tests.support import traces
from tests.support.build import needs_compiler, shared_object
from tests.support.layouts import SOME_LAYOUTS

Pair = tuple[AlchemistSession, AlchemistSession]
EXCHANGES = Path(__file__).parents[3] / "benchmarks" / "gangs.c"


@pytest.fixture(scope="module")
def pair(cluster: str) -> Iterator[Pair]:
    """Gangs of 3 and of 2 ranks, with a channel."""
    with AlchemistSession(3) as a, AlchemistSession(2) as b:
        couple(a, b)
        yield a, b


@pytest.fixture
def gangs(pair: Pair) -> Iterator[tuple[AlchemistSession, ...]]:
    """These two, and one of 1 rank."""
    with AlchemistSession(1) as c:
        yield *pair, c
    couple(*pair)


def both(one: Callable[[], Any], other: Callable[[], Any]) -> tuple[Any, Any]:
    """The results of two calls that run at the same time."""
    with ThreadPoolExecutor(2) as threads:
        futures = threads.submit(one), threads.submit(other)
        return futures[0].result(60), futures[1].result(60)


def exchanged(comm: Any, given: Any, like: Any, count: int, layout: str | None) -> Any:
    """Both sides send first; the last field that came, and whether all had their number."""
    channel = ali.context().channel("interface")
    got = None
    for k in range(count):
        if given.dtype.kind in "iuf":
            given.local[...] = k
        channel.send(given)
        got = channel.receive(like=like if layout is None else None)
        if given.dtype.kind in "iuf":
            assert (got.local == k).all(), (k, got.local)
    return got


@settings(
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_equals_numpy(gangs: tuple[AlchemistSession, ...], data: st.DataObject) -> None:
    pair = data.draw(st.permutations(gangs), "gangs")[:2]
    couple(*pair)
    shape = tuple(data.draw(st.lists(st.integers(0, 5), min_size=0, max_size=8), "shape"))
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    layouts = [data.draw(st.sampled_from(SOME_LAYOUTS), "layout") for _ in range(2)]
    rng = np.random.default_rng(1)
    arrays = [rng.integers(0, 2, shape).astype(dtype) for _ in pair]
    fields = [
        als.send_matrix(x, layout=layout)
        for als, x, layout in zip(pair, arrays, layouts, strict=True)
    ]

    def once(comm: Any, given: Any) -> Any:
        channel = ali.context().channel("interface")
        channel.send(given)
        return channel.receive(like=given), channel.name

    (B, _), (A, _) = both(*(
        lambda als=als, X=X: als.run(once, X) for als, X in zip(pair, fields, strict=True)
    ))  # fmt: skip
    for got, x, layout in ((A, arrays[0], layouts[1]), (B, arrays[1], layouts[0])):
        assert (got.shape, got.dtype, got.layout) == (x.shape, x.dtype, layout)
        np.testing.assert_array_equal(got.fetch(), x)


def test_fields_come_in_order_without_a_deadlock(pair: Pair) -> None:
    a, b = pair
    A, B = a.send_matrix(np.zeros((40, 30)), layout="MC_MR"), b.send_matrix(np.zeros((40, 30)))
    both(lambda: a.run(exchanged, A, A, 200, None), lambda: b.run(exchanged, B, B, 200, "sent"))


def test_a_fast_side_waits(pair: Pair) -> None:
    a, b = pair

    def sends(comm: Any) -> None:
        ctx = ali.context()
        channel, A = ctx.channel("interface"), ctx.zeros((4,), "float64")
        for k in range(10):
            A.local[...] = k
            channel.send(A)
            ctx.show("sent", A)

    def receives(comm: Any, count: int) -> list[float]:
        channel = ali.context().channel("interface")
        got = [channel.receive() for _ in range(count)]
        return [float(comm.bcast(field.local.max() if field.local.size else 0)) for field in got]

    view = a.watch("sent")
    with ThreadPoolExecutor(2) as threads:
        sending = threads.submit(a.run, sends)
        meeting = threads.submit(b.run, receives, 1)  # takes one field, and its call ends
        assert meeting.result(60) == [0.0]
        with pytest.raises(ChannelError, match="its call has returned"):
            sending.result(60)
    assert view.latest() is None  # the call is over
    results = both(lambda: a.run(sends), lambda: b.run(receives, 10))
    assert results[1] == [float(k) for k in range(10)]


def test_a_submitted_call_has_channels(pair: Pair) -> None:
    with AlchemistSession(2, name="submits", lifetime="detached") as a:
        couple(a, pair[1])
        A, B = a.send_matrix(np.zeros(9)), pair[1].send_matrix(np.zeros(9))
        call = a.submit(exchanged, A, A, 3, None)
        pair[1].run(exchanged, B, B, 3, None)
        assert call.result(timeout=60).shape == (9,)
    AlchemistSession.stop_gang("submits")
    couple(*pair)


def test_what_does_not_fit_is_refused(pair: Pair) -> None:
    a, b = pair
    with pytest.raises(BadArgumentError, match="two gangs"):
        couple(a, a)
    with pytest.raises(BadArgumentError, match="name of a channel"):
        couple(a, b, "")

    def asks(comm: Any) -> None:
        ali.context().channel("nothing")

    with pytest.raises(ChannelError, match=r"no channel 'nothing' \(it has 'interface'\): couple"):
        a.run(asks)

    def sends(comm: Any, given: Any) -> None:
        ali.context().channel("interface").send(given)

    def into(comm: Any, out: Any) -> None:
        ali.context().channel("interface").receive(out=out)

    def tried(x: Any, like: Any) -> BaseException | None:
        A, B = a.send_matrix(x), b.send_matrix(like)
        with ThreadPoolExecutor(2) as threads:
            sending = threads.submit(a.run, sends, A)
            taking = threads.submit(b.run, into, B)
            sending.exception(60)
            return taking.exception(60)

    assert isinstance(tried(np.ones(3), np.ones(4)), ShapeError)
    assert isinstance(tried(np.ones(3), np.ones(3, "float32")), DtypeError)
    sparse = pytest.importorskip("scipy.sparse")
    S = sparse.random(9, 9, 0.5, format="csr")
    A = a.send_matrix(S)
    with ThreadPoolExecutor(2) as threads:
        taking = threads.submit(b.run, into, b.send_matrix(np.ones(3)))
        with pytest.raises(LayoutError, match="dense"):
            a.run(lambda comm, A: _send_packed(A), A)
        assert isinstance(taking.exception(60), ChannelError)


def _send_packed(A: Any) -> None:
    ali.context().channel("interface").send(A.packed)


@needs_compiler
def test_a_library_in_c_exchanges_fields_with_python(
    pair: Pair, tmp_path_factory: pytest.TempPathFactory
) -> None:
    a, b = pair
    path = shared_object(EXCHANGES, tmp_path_factory.mktemp("c") / "gangs.so")
    library = a.load_library("gangs", path)

    def echoes(comm: Any, n: int, count: int) -> None:
        ctx = ali.context()
        channel, A = ctx.channel("interface"), ctx.zeros((n,), "float64")
        for k in range(-1, count):
            A.local[...] = k
            channel.send(A)
            channel.receive(out=A)

    seconds, _ = both(lambda: library.exchange(1000, 50), lambda: b.run(echoes, 1000, 50))
    assert seconds > 0
    with pytest.raises(ChannelError, match="no channel 'interface'"), AlchemistSession(1) as alone:
        alone.load_library("gangs", path).exchange(10, 1)


def test_a_program_looks_at_a_running_call(pair: Pair) -> None:
    a, _ = pair
    stop = a.send_matrix(np.zeros(1), name="stop")

    def shows(comm: Any, stop: Any) -> int:
        ctx = ali.context()
        T, k = ctx.zeros((30, 20, 2), "float64", "MC_MR"), 0
        while not comm.allreduce(float(stop.stored.sum())) and k < 1_000_000:
            T.stored[...] = k
            ctx.show("T", T)
            time.sleep(0.005)  # of a step
            k += 1
        return k

    view = a.watch("T")
    assert view.latest() is None
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(a.run, shows, stop)
        seen = []
        for frame in view:
            assert frame.shape == (30, 20, 2)
            assert len(np.unique(frame)) == 1  # of one moment
            assert frame[0, 0, 0] == view.frame
            seen.append(view.frame)
            if len(seen) == 5:
                break
        assert seen == sorted(set(seen))
        call.cancel()
        a.cancel()
        call.exception(60)
    assert traces.wait_until(lambda: view.latest() is None, 10) is not None


@pytest.fixture
def there(cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Options of sessions through a gateway."""
    actor = pytest.importorskip("alchemist_ray.gateway.server.actor")
    access = pytest.importorskip("alchemist_ray.gateway.server.access")
    monkeypatch.setenv("HOME", str(tmp_path))  # for the certificate
    tokens = access.TokenFile(tmp_path / "tokens.json")
    token = tokens.create("anna", ("call", "run_code"))
    audit = str(tmp_path / "audit.log")
    info = actor.serve("127.0.0.1", 0, tokens=str(tokens.path), audit=audit)
    yield {"address": info.address, "token": token}
    info.stop()


def test_through_a_gateway(there: Any, pair: Pair) -> None:
    with AlchemistSession(2, **there) as a, AlchemistSession(1, **there) as b:
        with pytest.raises(BadArgumentError, match="in different ways"):
            couple(a, pair[1])
        couple(a, b)
        _through_a_gateway(a, b)


def _through_a_gateway(a: AlchemistSession, b: AlchemistSession) -> None:
    A, B = a.send_matrix(np.zeros((4, 3))), b.send_matrix(np.zeros((4, 3)))
    both(lambda: a.run(exchanged, A, A, 20, None), lambda: b.run(exchanged, B, B, 20, None))
    for about in ("b", {"other": "another", "fields": 2}, {"other": A.gang}):
        body = {"op": "run", "task": {"name": "f"}, "uses": [], "channels": {"interface": about}}
        with pytest.raises(AlchemistError, match=r"malformed channel|it has ended"):
            a.connection._open_channel().request(body)
    with pytest.raises(SessionError, match="gateway"):
        a.watch("T")
