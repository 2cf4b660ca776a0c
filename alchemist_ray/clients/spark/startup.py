"""Spark on Ray: starts RayDP with the Java options that it needs, within a time limit.

Without a list of ``--add-opens`` RayDP 1.6 fails on Java 17, and its caller waits forever for the
JVM that ended. If Ray has no CPUs for the executors, the first Spark job waits forever.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, NoReturn

import ray
from pyspark import SparkContext
from pyspark.sql import SparkSession
from ray.exceptions import RayError

from alchemist_ray.background import in_thread
from alchemist_ray.clients.spark import jvm
from alchemist_ray.cluster.ray_cluster import join_ray
from alchemist_ray.errors import AlchemistError, LaunchError, ResourceError
from alchemist_ray.plural import counted

OPENED = (
    "java.lang", "java.lang.invoke", "java.lang.reflect", "java.io", "java.math", "java.net",
    "java.nio", "java.text", "java.time", "java.util", "java.util.concurrent",
    "java.util.concurrent.atomic", "sun.nio.ch", "sun.nio.cs", "sun.security.action",
    "sun.util.calendar",
)  # fmt: skip
JAVA_OPTIONS = " ".join(
    [
        "-XX:+IgnoreUnrecognizedVMOptions",
        *(f"--add-opens=java.base/{p}=ALL-UNNAMED" for p in OPENED),
    ]
)
OPTION_KEYS = (
    "spark.driver.extraJavaOptions",
    "spark.executor.extraJavaOptions",
    "spark.ray.raydp_app_master.extraJavaOptions",
)
JAVAS = (8, 11, 17)  # of Spark 3.5
MASTER_CPUS = 1  # that RayDP's master actor requests while it is placed
CLEAN_TIMEOUT_S = 60.0  # for cleaning up after a failed start
CANCEL_TIMEOUT_S = 5.0  # for a JVM to accept that jobs are cancelled
JVM_END_S = 10.0  # for a JVM to end by itself
TAIL_LINES = 25  # lines of a log in an error


def init_spark(
    app_name: str,
    num_executors: int,
    executor_cores: int,
    executor_memory: str | int,
    *,
    configs: Mapping[str, str] | None = None,
    start_timeout_s: float = 180.0,
    **options: Any,
) -> Any:
    """Start Spark on the Ray cluster of this process, and wait for its executors.

    Parameters
    ----------
    app_name : str
    num_executors, executor_cores : int
        Executors are Ray actors with `executor_cores` CPUs each.
    executor_memory : str or int
        Of each executor, e.g. ``"2GB"``, or bytes.
    configs : dict, optional
        Spark settings. Java options are added to those that Spark on Ray needs.
    start_timeout_s : float
        Time limit until all executors run, in seconds.
    **options
        As `raydp.init_spark` takes them: ``enable_hive``, ``fault_tolerant_mode``,
        ``placement_group_strategy``, ``placement_group``, ``placement_group_bundle_indexes``.

    Returns
    -------
    pyspark.sql.SparkSession

    Raises
    ------
    AlchemistError
        If RayDP is not installed, or Spark already runs in this process.
    ResourceError
        If the Ray cluster does not have enough free CPUs, or less than one executor or core is
        requested; nothing has been started.
    LaunchError
        If there is no suitable Java, or the start fails or takes too long; with the last lines
        of the JVM's log. Nothing is left behind.

    Notes
    -----
    Takes about 10 s, and minutes on a busy machine, because three kinds of JVM are started.
    Executors run the Python of this process. Ctrl-C cancels Spark's jobs, as PySpark does,
    unless the program has installed its own handler. Call `stop_spark` at the end.
    """
    try:
        import raydp  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise AlchemistError(
            f"Spark on Ray needs {error.name}: pip install 'alchemist-on-ray[spark]'"
        ) from None
    if SparkContext._active_spark_context is not None:
        raise AlchemistError("Spark already runs in this process: call stop_spark() first")
    if min(num_executors, executor_cores) < 1:
        raise ResourceError(
            f"num_executors={num_executors}, executor_cores={executor_cores}: "
            "both must be at least 1"
        )
    check_java()
    join_ray(None)
    if not {"placement_group", "placement_group_strategy"} & options.keys():
        _check_cpus(num_executors, executor_cores)
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    settings = {"spark.ui.showConsoleProgress": "false", **(configs or {})}
    for key in OPTION_KEYS:
        settings[key] = f"{JAVA_OPTIONS} {settings.get(key, '')}".strip()
    begun, deadline = time.time(), time.monotonic() + start_timeout_s
    started = in_thread(
        lambda: raydp.init_spark(
            app_name, num_executors, executor_cores, executor_memory, configs=settings, **options
        )
    )

    def failed(reason: str) -> LaunchError:
        return LaunchError(f"{reason}{_log_tail(begun)}")

    try:
        if not wait([started], start_timeout_s).done:
            raise failed(
                f"Spark has not started in {start_timeout_s:g} s (start_timeout_s): its JVM hangs "
                "or has ended, or the machine is busy"
            )
        if (failure := started.exception()) is not None:
            raise failed(f"Spark did not start: {_first_line(failure)}") from failure
        spark = started.result()
        scala = spark.sparkContext._jsc.sc()
        # RayDP returns before the executors run. The driver counts as one.
        while (there := scala.getExecutorMemoryStatus().size() - 1) < num_executors:
            if time.monotonic() > deadline:
                raise failed(
                    f"{there} of {num_executors} Spark executors have started in "
                    f"{start_timeout_s:g} s (start_timeout_s): check the free CPUs and memory with "
                    "`ray status`"
                )
            time.sleep(0.1)
    except BaseException:
        _clean(app_name, started)
        raise
    _cancel_jobs_on_ctrl_c(spark.sparkContext)
    return spark


def stop_spark() -> None:
    """End Spark, its executors and the JVM of this process, also if `init_spark` did not start it.

    Matrices that were sent from it stay; results of `to_spark` end with it. Ctrl-C has its usual
    meaning again. Does nothing if Spark does not run.
    """
    context = SparkContext._active_spark_context
    if (raydp := sys.modules.get("raydp")) is not None:
        with contextlib.suppress(Exception):  # Ray or the JVM has ended; the rest is ended below
            raydp.stop_spark()
    if context is not None:
        with contextlib.suppress(Exception):
            context.stop()
    _end_jvm(context)
    jvm.detach()
    _restore_ctrl_c()


def _cancel_jobs_on_ctrl_c(context: Any) -> None:
    """Let SIGINT cancel Spark's jobs. PySpark does so only if the main thread starts Spark."""
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may set handlers
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return

    def cancel() -> None:
        with contextlib.suppress(Exception):  # Spark may have ended
            context.cancelAllJobs()

    def interrupted(*_: object) -> NoReturn:
        # This thread's connection to the JVM is in use: it waits for the job.
        thread = threading.Thread(target=cancel, name="cancel-spark", daemon=True)
        thread.start()
        thread.join(CANCEL_TIMEOUT_S)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupted)


def _restore_ctrl_c() -> None:
    """Let SIGINT only raise KeyboardInterrupt again.

    PySpark's handler outlives its context: it would cancel the jobs of an ended Spark, and raise
    the error of that instead.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    module = str(getattr(signal.getsignal(signal.SIGINT), "__module__", ""))
    if module == __name__ or module.startswith("pyspark."):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_jvm(context: Any = None) -> None:
    """End the JVM of this process, which otherwise outlives its SparkContext."""
    gateway = SparkContext._gateway
    if context is not None:
        context._gateway = gateway  # needed by JVM objects that are dropped later
    SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = SparkSession._activeSession = None
    SparkSession.builder._options.clear()
    if gateway is None:
        return
    with contextlib.suppress(Exception):
        gateway.shutdown()
    process = getattr(gateway, "proc", None)
    if process is None:
        return
    with contextlib.suppress(OSError):
        process.stdin.close()  # the JVM ends when its input closes
    try:
        process.wait(JVM_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def check_java() -> None:
    """Check that Spark can use the Java that it would find. Raises `LaunchError`."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which(f"{home}/bin/java") if home else shutil.which("java")
    if java is None:
        where = f"in JAVA_HOME={home}" if home else "on the PATH"
        raise LaunchError(
            f"Spark needs Java, and there is no Java {where}: install a JRE of version "
            f"{JAVAS[-1]} (Debian: openjdk-17-jre-headless)"
        )
    try:
        done = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{java} cannot be run: {error}") from None
    output = done.stderr + done.stdout
    found = re.search(r'version "(?:1\.)?(\d+)', output)
    version = int(found.group(1)) if found else 0
    if done.returncode or version not in JAVAS:
        first = output.strip().splitlines()[0] if output.strip() else "nothing"
        raise LaunchError(
            f"{java} reports {first!r}; Spark 3.5 needs Java {', '.join(map(str, JAVAS))}: set "
            "JAVA_HOME or PATH to one of these"
        )


def _check_cpus(executors: int, cores: int) -> None:
    needed = executors * cores + MASTER_CPUS
    free = ray.available_resources().get("CPU", 0.0)
    if needed > free:
        total = ray.cluster_resources().get("CPU", 0.0)
        raise ResourceError(
            f"Spark executors ({executors}, each of {counted(cores, 'CPU')}) and RayDP's master "
            f"need {needed} CPUs; {free:g} of the Ray cluster's {total:g} are free: request "
            "fewer, or free some"
        )


def _clean(app_name: str, started: Future[Any]) -> None:
    """End everything of a failed start.

    RayDP's actor and the JVM may start during the clean-up, so it is repeated until the start has
    ended.
    """
    deadline = time.monotonic() + CLEAN_TIMEOUT_S
    while True:
        with contextlib.suppress(RayError, ValueError):
            ray.kill(ray.get_actor(f"{app_name}_SPARK_MASTER"))
        if started.done() or time.monotonic() > deadline:
            break
        with contextlib.suppress(Exception):
            _end_jvm()
        wait([started], 0.5)
    with contextlib.suppress(Exception):
        if started.done():
            stop_spark()
        else:  # it has RayDP's lock
            _end_jvm()


def _first_line(error: BaseException) -> str:
    cause = getattr(error, "cause", None) or error
    lines = [line for line in str(cause).strip().splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[-1].strip() if lines else ''}"


def _log_tail(begun: float) -> str:
    """The last lines that JVMs have logged since `begun`, if Ray's logs are on this node."""
    with contextlib.suppress(Exception):
        folder = Path(ray._private.worker._global_node.get_logs_dir_path())  # type: ignore[attr-defined]
        logs = [
            path
            for path in folder.glob("*")
            if re.search("java|raydp", path.name) and path.stat().st_mtime >= begun
        ]
        for path in sorted(logs, key=lambda p: p.stat().st_mtime, reverse=True):
            lines = path.read_text(errors="replace").strip().splitlines()[-TAIL_LINES:]
            if lines:
                return f"\n--- end of {path.name} ---\n" + "\n".join(lines)
    return ""
