"""A link with a bottleneck between a user's process, or some ranks, and the other ranks.

Two hosts, which are network namespaces of this machine, are joined by `link.c`, whose rate and
delay are set. Measured are sends and fetches beside plain streams, redistribution and products of
ranks on both hosts, and how much of a transfer a computation hides. Needs root and a C compiler.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import ray

from alchemist_ray import AlchemistSession
from benchmarks.harness import in_turns
from benchmarks.papers.experiment import BLUE, ORANGE, Page, Setting, repeated, side
from benchmarks.papers.layouts import routed
from benchmarks.streams import PLAIN, plain_sockets, plain_streams, served
from mpi_workers.data import node_connections
from tests.faults import inside
from tests.faults.hosts import PROBE, Hosts, why_not

SOURCE = Path(__file__).with_name("link.c")


class Link(NamedTuple):
    """Gb/s and the milliseconds of a round trip; 0: as this machine allows."""

    rate: float
    round_trip: float

    def __str__(self) -> str:
        return f"{self.rate:g} Gb/s, {self.round_trip:g} ms" if self.rate else "not limited"


LINKS = (Link(0, 0), Link(10, 0.1), Link(10, 5), Link(1, 0.1), Link(1, 5))
STREAMS = (1, 2, 4)
MTU = 65520  # as in the report on virtual clusters; no packet is larger
QUEUE = 1000  # packets that wait at the sender: none is lost
SIDE = 2500  # of the matrix that is moved, 50 MB
SIDES = (1000, 2000, 3000, 4000)  # of the products
CPUS = (3, 1)  # of the hosts: two ranks on the first one, and one on each
LIMIT_S = 600.0  # of one link
DIVISORS = {"small": 1.0, "node": 1.0, "cluster": 1.0}

Found = dict[str, list[float]]  # seconds of the turns, by what was measured


def missing() -> str | None:
    """Why the links cannot be measured; None: they can."""
    return why_not() or (None if shutil.which("cc") else "no C compiler")


def run(setting: Setting) -> Page:
    """Every link in turn, in one cluster of two hosts."""
    n = side(SIDE, setting.divisor(DIVISORS))
    sides = [side(of, setting.divisor(DIVISORS)) for of in SIDES]
    page = Page(
        "links",
        "Transfers over links of 1 and 10 Gb/s",
        f"{n} x {n} ({8e-6 * n * n:.3g} MB) and products of {', '.join(map(str, sides))} rows and "
        "columns; two hosts are network namespaces of one machine, joined by `link.c` (packets of "
        f"up to {MTU} bytes; none is lost)",
    )
    if (reason := missing()) is not None:
        page.notes.append(f"Not measured: {reason}.")
        return page
    found: dict[Link, Found] = {}
    with Hosts(2) as hosts, linked(hosts) as shape, ExitStack() as stack:
        hosts.start_ray(CPUS, store_bytes=1 << 30)
        plain = stack.enter_context(served(PLAIN, n, hosts[0]))
        for link in LINKS:
            shape(link)
            print(f"  {link}", flush=True)
            found[link] = hosts[1].call(
                "benchmarks.papers.links:measured", plain, n, sides, setting.runs, limit_s=LIMIT_S
            )
    page.data = {str(link): its for link, its in found.items()} | {"n": n, "sides": sides}
    fill(page)
    return page


def fill(page: Page) -> None:
    """Tables, verdicts and figure of the times that the page has."""
    found = {link: page.data[str(link)] for link in LINKS}
    _tables(page, found, page.data["n"], page.data["sides"])
    page.figure_inches = (8.0, 4.5)
    page.draw = lambda figure: _draw(figure, found, page.data["n"])


@contextmanager
def linked(hosts: Hosts) -> Iterator[Callable[[Link], None]]:
    """Join two hosts by a link; the function that sets its rate and delay."""
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/link"
        subprocess.run(["cc", "-O2", "-o", program, SOURCE], check=True)
        pids = [str(hosts[number].init) for number in (0, 1)]
        with subprocess.Popen(
            [program, *pids], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdin is not None
            assert process.stdout is not None

            def shape(link: Link) -> None:
                print(link.rate * 1e9, link.round_trip / 2 * 1e6, file=process.stdin, flush=True)
                if process.stdout.readline() != "ready\n":
                    raise RuntimeError("the link has ended")

            shape(LINKS[0])
            for host in (hosts[0], hosts[1]):
                for words in (
                    ["link", "set", "eth0", "down"],
                    ["addr", "flush", "dev", "eth0"],
                    ["addr", "add", f"{host.ip}/24", "dev", "link0"],
                    ["link", "set", "link0", "mtu", MTU, "txqueuelen", QUEUE, "up"],
                    ["route", "replace", PROBE, "dev", "link0"],
                ):
                    host.run("ip", *words)
            yield shape
            process.stdin.close()


# --- on the second host, where the user's process is ---


def measured(plain: str, n: int, sides: list[int], runs: int) -> Found:
    """Everything over the link as it is now; the ranks are on the first host, or on both."""
    inside.join(2)
    found: Found = {}
    with AlchemistSession(2, strategy="STRICT_PACK", progress=False) as als:
        A = np.random.default_rng(1).random((n, n))
        for streams in STREAMS:
            sockets = plain_sockets(plain, streams)
            node_connections.STREAMS_PER_NODE = streams
            with routed(als, "TCP"):
                found |= _streams(als, A, sockets, runs)
            for one in sockets:
                one.close()
        node_connections.STREAMS_PER_NODE = 2
        for of in sides:
            found |= _hidden(als, of, runs)
    with AlchemistSession(2, strategy="STRICT_SPREAD", progress=False) as als:
        H = als.send_matrix(A, layout="VC_STAR")
        found["redistribution"] = list(repeated(lambda: H.to_layout("STAR_VC").free(), runs))
        B, C = (als.send_matrix(np.ones((sides[-1],) * 2), layout="MC_MR") for _ in range(2))
        matmul = als.load_library("linalg").matmul
        found["product of both"] = list(repeated(lambda: matmul(B, C).free(), runs))
    return found


def _streams(als: AlchemistSession, A: Any, sockets: list[socket.socket], runs: int) -> Found:
    """Sends and fetches beside as many plain streams; the round trip."""
    out = np.empty_like(A)
    H = als.send_matrix(A)
    works: dict[str, Callable[[], object]] = {
        "plain send": plain_streams(sockets, A, b"r"),
        "send": lambda: als.send_matrix(A).free(),
        "plain fetch": plain_streams(sockets, out, b"s"),
        "fetch": H.fetch,
        "round trip": plain_streams(sockets[:1], A[0, :1], b"s"),
    }
    times = in_turns(works, runs + 1)
    return {f"{name} {len(sockets)}": list(took.turns[1:]) for name, took in times.items()}


def _hidden(als: AlchemistSession, n: int, runs: int) -> Found:
    """A send, a product, and both at once; a fetch."""
    matmul = als.load_library("linalg").matmul
    A = np.random.default_rng(2).random((n, n))
    B, C = als.send_matrix(A), als.send_matrix(A)

    def both(transfer: Callable[[], object]) -> None:
        pending = matmul.remote(B, C)
        transfer()
        ray.get(pending).free()

    def send() -> None:
        als.send_matrix(A).free()

    works: dict[str, Callable[[], object]] = {
        "send of": send,
        "fetch of": C.fetch,
        "product of": lambda: matmul(B, C).free(),
        "send during product of": lambda: both(send),
        "fetch during product of": lambda: both(C.fetch),
    }
    times = in_turns(works, runs + 1)
    return {f"{name} {n}": list(took.turns[1:]) for name, took in times.items()}


# --- the page ---


def _tables(page: Page, found: dict[Link, Found], n: int, sides: list[int]) -> None:
    best = {link: {name: min(turns) for name, turns in its.items()} for link, its in found.items()}
    free = best[LINKS[0]]
    bits = 64e-9 * n * n
    kinds = ("plain send", "send", "plain fetch", "fetch")
    counts = "/".join(map(str, STREAMS))
    add = page.table(
        "link", "round trip, ms", *(f"{kind}, {counts} streams, Gb/s" for kind in kinds)
    )
    for link, took in best.items():
        rates = [
            " / ".join(f"{bits / took[f'{kind} {count}']:.2f}" for count in STREAMS)
            for kind in kinds
        ]
        add(link, f"{1e3 * min(took[f'round trip {count}'] for count in STREAMS):.2f}", *rates)
    page.notes.append(
        "Best of the turns. A plain send or fetch moves the same bytes between sockets. A send "
        "includes the commands that make, seal and free the matrix. Both hosts and the link share "
        "the cores of this machine: on the fast links these are the limit, and nothing is hidden."
    )
    add = page.table(
        "link", "redistribution, s", "Gb/s each way", f"product, {sides[-1]} x {sides[-1]}, s",
        "x without a limit",
    )  # fmt: skip
    for link, took in best.items():
        moved, product = took["redistribution"], took["product of both"]
        # VC_STAR to STAR_VC: each of two ranks sends the other a quarter of the matrix.
        add(
            link, f"{moved:.3g}", f"{bits / 4 / moved:.2f}", f"{product:.3g}",
            f"{product / free['product of both']:.2f}",
        )  # fmt: skip
    add = page.table(
        "link", "n", "product, s", "send, s", "send during the product, s", "send hidden, %",
        "fetch, s", "fetch during the product, s", "fetch hidden, %",
    )  # fmt: skip
    for link, took in best.items():
        for of in sides:
            add(
                link, of, f"{took[f'product of {of}']:.3g}",
                *(
                    cell
                    for what in ("send", "fetch")
                    for cell in (
                        f"{took[f'{what} of {of}']:.3g}",
                        f"{took[f'{what} during product of {of}']:.3g}",
                        f"{_hidden_share(found[link], what, of):.0f}",
                    )
                ),
            )  # fmt: skip
    _conclude(page, found, best, bits, sides)


def _hidden_share(its: Found, what: str, n: int) -> float:
    """The part of a transfer's time that a product at the same time makes up for, in %.

    The median of the turns, in each of which the three were measured one after the other.
    """
    turns = zip(
        its[f"{what} of {n}"], its[f"product of {n}"], its[f"{what} during product of {n}"],
        strict=True,
    )  # fmt: skip
    shares = [(alone + product - both) / alone for alone, product, both in turns]
    return 100 * min(1.0, max(0.0, median(shares)))


def _conclude(
    page: Page,
    found: dict[Link, Found],
    best: dict[Link, dict[str, float]],
    bits: float,
    sides: list[int],
) -> None:
    slow = [link for link in best if link.rate == min(one.rate for one in LINKS if one.rate)]
    shares = [
        100 * bits / best[link][f"{what} {count}"] / link.rate
        for link in slow for what in ("send", "fetch") for count in STREAMS
    ]  # fmt: skip
    page.measured(
        f"on {slow[0].rate:g} Gb/s sends and fetches reach {min(shares):.0f} to {max(shares):.0f} "
        "% of the link, with any number of streams"
    )
    far = max((link for link in best if link.rate), key=lambda link: link.rate * link.round_trip)
    gains = {
        what: best[far][f"{what} {STREAMS[0]}"] / best[far][f"{what} {STREAMS[-1]}"]
        for what in ("plain fetch", "send", "fetch")
    }
    page.measured(
        f"on {far} {STREAMS[-1]} streams take "
        + ", ".join(f"{1 / gain:.2f} (a {what})" for what, gain in gains.items())
        + f" of the time of one: with {far.round_trip:g} ms the link holds "
        f"{far.rate * far.round_trip / 8:.3g} MB, more than one socket's buffer"
    )
    for link in slow:
        hides = [of for of in sides if best[link][f"product of {of}"] > best[link][f"send of {of}"]]
        page.measured(
            f"on {link} a product takes longer than the send of an operand "
            + (f"from n = {hides[0]}" if hides else f"at none of n = {', '.join(map(str, sides))}")
            + f", and at n = {sides[-1]} {_hidden_share(found[link], 'send', sides[-1]):.0f} % of "
            "the send are hidden by a product at the same time"
        )


def _draw(figure: Any, found: dict[Link, Found], n: int) -> None:
    """What part of each link sends and fetches use; a line for as many plain streams."""
    axes = figure.subplots()
    links = [link for link in found if link.rate]
    bars = [(what, count) for what in ("send", "fetch") for count in STREAMS]
    width = 0.8 / len(bars)
    for k, (what, count) in enumerate(bars):
        at = np.arange(len(links)) + (k - (len(bars) - 1) / 2) * width
        shares = [
            [6.4e-6 * n * n / min(found[link][f"{kind}{what} {count}"]) / link.rate
             for link in links]
            for kind in ("", "plain ")
        ]  # fmt: skip
        axes.bar(
            at, shares[0], 0.9 * width, color=ORANGE if what == "send" else BLUE,
            alpha=(0.4, 0.7, 1)[STREAMS.index(count)],
            label=f"{what}, {count} stream{'s' if count > 1 else ''}",
        )  # fmt: skip
        axes.hlines(
            shares[1], at - 0.45 * width, at + 0.45 * width, color="black",
            label="as many plain streams" if k == len(bars) - 1 else None,
        )  # fmt: skip
    axes.set_xticks(range(len(links)), [str(link) for link in links])
    axes.set_xlabel("link")
    axes.set_ylabel("rate, % of the link's")
    figure.legend(loc="outside right upper")
