"""Spark's JVM: the jar of Alchemist in it, its jobs, and matrices as its classes read them.

`java/` has the sources, in Scala, whose compiler is among Spark's jars. Their jar is in the wheel
and in the image; in a clone `make env` builds it, or the first use. It is added to a Spark that
already runs without it (`spark.jars`).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import shutil
import subprocess
import tempfile
import threading
import uuid
import zipfile
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyspark
from py4j.protocol import Py4JError
from pyspark import InheritableThread
from pyspark.errors import PySparkException

from alchemist_ray.attached.matrix_ref import MatrixRef
from alchemist_ray.background import in_thread
from alchemist_ray.errors import DtypeError, TransferError
from alchemist_ray.version import __version__
from mpi_workers.data.description import DataEndpoints, TransferTarget
from mpi_workers.matrix.node_shares import chunk_bytes, products

T = TypeVar("T")

SOURCES = Path(__file__).with_name("java")
SPARK_JARS = Path(pyspark.__file__).parent / "jars"
SCALAC = ("-cp", f"{SPARK_JARS}/*", "scala.tools.nsc.Main", "-usejavacp", "-encoding", "UTF-8")
MANIFEST = f"Manifest-Version: 1.0\nImplementation-Version: {__version__}\n"
BUILD_TIMEOUT_S = 300.0  # 10 s on a quiet machine

JAR = "alchemist-spark"
SOURCE = "alchemist.spark.MatrixSource"
MAPPED = True  # executors on the ranks' node map their memory; tests of TCP switch it off
POLL_INTERVAL_S = 0.5  # between checks of the gang
CANCEL_TIMEOUT_S = 20.0  # for a cancelled job to end
MESSAGE_CHARS = 2000  # of a message from Spark


class Readers:
    """The matrices that objects of Spark read, each until Java has collected these objects.

    A matrix is then freed as if this process had dropped a handle, at the next use of Spark here:
    Java has no hook for its collection.
    """

    def __init__(self, java: Any) -> None:
        self._java = java  # a `Dropped`
        self._handles: dict[int, MatrixRef] = {}
        self._numbers = itertools.count()

    def add(self, made: Any, handle: MatrixRef) -> None:
        """An object in the JVM reads a matrix."""
        number = next(self._numbers)
        self._java.watchSource(made, number)
        self._handles[number] = handle

    def release(self) -> None:
        """Drop the handles of objects that were collected."""
        with contextlib.suppress(Py4JError, OSError):  # Spark has ended; the next call says so
            while self._handles and (number := self._java.poll()) >= 0:
                del self._handles[number]


_lock = threading.Lock()
# Of the last application: its id, the class `Sender`, and who reads in it. With Spark's end its
# objects cannot read any more.
_attached: tuple[str, Any, Readers] | None = None


def sender(spark: Any) -> Any:
    """The Java class `Sender` in Spark's JVM. Raises `TransferError` without the jar."""
    return _attachment(spark)[0]


def readers(spark: Any) -> Readers:
    """Who reads matrices in this application. Raises `TransferError` without the jar."""
    return _attachment(spark)[1]


def _attachment(spark: Any) -> tuple[Any, Readers]:
    global _attached
    context = spark.sparkContext
    application = context.applicationId
    with _lock:
        if _attached is None or _attached[0] != application:
            if not _present(context):
                _attach(context, build())
            # Each name of a package is a search in Spark's jars.
            java = context._jvm.alchemist.spark
            _attached = application, java.Sender, Readers(java.Dropped())
        _, found, its = _attached
        its.release()
        return found, its


def release() -> None:
    """Drop the handles of objects of Spark that were collected."""
    with _lock:
        if _attached is not None:
            _attached[2].release()


def detach() -> None:
    """Spark has ended: its objects read nothing any more."""
    global _attached
    with _lock:
        _attached = None


def _no_jar(reason: str) -> TransferError:
    return TransferError(f"Spark needs the jar of Alchemist to move rows, and has none: {reason}")


def _present(context: Any) -> bool:
    """Whether Spark was started with the jar (`spark.jars`). `TransferError`: of another version.

    A jar that an earlier application of this JVM has attached is not on the executors.
    """
    java = context._jvm.java.lang
    try:
        if JAR in context.getConf().get("spark.jars", ""):
            found = java.Thread.currentThread().getContextClassLoader().loadClass(SOURCE)
        else:
            found = java.Class.forName(SOURCE)  # on the class path of Spark itself
        version = found.getPackage().getImplementationVersion()
    except Py4JError:
        return False
    if version != __version__:
        raise _no_jar(f"spark.jars has the jar of version {version}, not {__version__}")
    return True


def _attach(context: Any, jar: Path) -> None:
    """Add the jar to the driver's class loader, and to the executors' with the next job."""
    loader = context._jvm.java.lang.Thread.currentThread().getContextClassLoader()
    if not hasattr(loader, "addURL") or "MutableURLClassLoader" not in loader.getClass().getName():
        raise _no_jar(f"Spark's class loader takes no jar at run time: set spark.jars to {jar}")
    loader.addURL(context._jvm.java.io.File(str(jar)).toURI().toURL())
    context._jsc.addJar(str(jar))


def build() -> Path:
    """The jar of these sources, from the last build or a new one. Raises `TransferError`."""
    sources = sorted(SOURCES.rglob("*.scala"))
    digest = hashlib.sha256(f"{pyspark.__version__.rpartition('.')[0]} {__version__}".encode())
    for source in sources:
        digest.update(source.read_bytes())
    name = f"{JAR}-{digest.hexdigest()[:12]}.jar"
    folders = [SOURCES, Path.home() / ".cache" / "alchemist-on-ray"]
    for folder in folders:
        if (folder / name).exists():
            return folder / name
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return _compile(sources, folder / name)
    raise _no_jar(f"neither {folders[0]} nor {folders[1]} can be written")


def _compile(sources: list[Path], jar: Path) -> Path:
    home = os.environ.get("JAVA_HOME", "")
    java = (shutil.which("java", path=f"{home}/bin") if home else None) or shutil.which("java")
    if java is None:
        raise _no_jar(
            "it is not built, and no Java was found to build it: install one (apt-get install "
            "default-jre; JAVA_HOME names it), or a wheel of alchemist-on-ray with the jar"
        )
    with tempfile.TemporaryDirectory(dir=jar.parent) as folder:
        command = [java, *SCALAC, "-d", folder, *map(str, sources)]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise _no_jar(f"{java} failed: {error}") from error
        if done.returncode:
            raise _no_jar(f"{java} failed: {(done.stdout + done.stderr).strip()[-500:]}")
        unfinished = Path(folder) / "new.jar"
        with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("META-INF/MANIFEST.MF", MANIFEST)
            for found in sorted(Path(folder).rglob("*.class")):
                archive.write(found, found.relative_to(folder))
        unfinished.replace(jar)
    for old in jar.parent.glob(f"{JAR}-*.jar"):
        if old != jar:
            old.unlink(missing_ok=True)
    return jar


def run(spark: Any, what: str, action: Callable[[], T], alive: Callable[[], object]) -> T:
    """Run an action that starts a Spark job, and cancel the job when it is no longer needed.

    Parameters
    ----------
    spark : SparkSession
    what : str
        Its description, for Spark's UI and for errors.
    action : callable
        Starts the job and waits for it.
    alive : callable
        Called twice a second. If it raises, the job is cancelled; so does Ctrl-C.

    Raises
    ------
    TransferError
        If the job fails or Spark has ended.
    """
    context = spark.sparkContext
    group = f"alchemist-{uuid.uuid4().hex}"

    def work() -> T:
        context.setJobGroup(group, f"Alchemist: {what}", interruptOnCancel=True)
        return action()

    done = in_thread(work, InheritableThread)  # with this thread's properties of Spark
    try:
        while not wait([done], POLL_INTERVAL_S).done:
            alive()
    except BaseException:
        with contextlib.suppress(Exception):  # Spark may have ended
            context.cancelJobGroup(group)
        wait([done], CANCEL_TIMEOUT_S)
        raise
    try:
        return done.result()
    except BaseException as error:
        raise _as_transfer_error(what, error) from error


def _as_transfer_error(what: str, error: BaseException) -> BaseException:
    """The error to raise for a failed job; errors of the user's code are not changed."""
    if not isinstance(error, PySparkException | Py4JError | OSError):
        return error
    java = getattr(error, "java_exception", None)
    if java is not None:
        with contextlib.suppress(Py4JError, OSError):
            return TransferError(f"Spark could not {what}: {_without_stack(java.getMessage())}")
    if isinstance(error, PySparkException):
        return TransferError(f"Spark could not {what}: {_without_stack(str(error))}")
    return TransferError(f"Spark could not {what}: its JVM does not answer and has probably ended")


def _without_stack(message: str | None) -> str:
    """A message from the JVM without its stack trace."""
    lines = (message or "no reason given").partition("\nDriver stacktrace")[0].splitlines()
    return "\n".join(line for line in lines if not line.startswith("\tat "))[:MESSAGE_CHARS]


def description(endpoints: DataEndpoints, target: TransferTarget) -> dict[str, Any]:
    """A matrix to send, as `Target` reads it.

    The products of runs are computed here, so that Scala needs to know no layout.

    Raises
    ------
    DtypeError
        If Spark's columns have no such dtype.
    """
    if target.dtype.kind in "uc" or target.dtype == np.float16:
        raise DtypeError(f"Spark has no columns of dtype {target.dtype}: convert with astype first")
    by_node: dict[int, list[int]] = {}
    rows, cols = target.distribution.shape
    for rank, *_copies in target.distribution.holders(0, rows, 0, cols):
        by_node.setdefault(endpoints.node_of(rank), []).append(rank)
    nodes = []
    for number, some in sorted(by_node.items()):
        addresses = endpoints.nodes[number].addresses
        host, _, port = addresses[-1].removeprefix("tcp:").rpartition(":")
        shares = products(target.distribution, sorted(some))
        nodes.append(
            {
                "number": number,
                "host": host,
                "port": int(port),
                "ranks": [[rank, *(target.distribution.runs(rank) or ())] for rank in sorted(some)],
                "chunk": chunk_bytes(len(some)),
                "products": shares,
            }
        )
    return {
        "token": endpoints.token,
        "matrix": target.matrix,
        "rows": rows,
        "cols": cols,
        "dtype": target.dtype.name,
        "mapped": MAPPED,
        "nodes": nodes,
    }
