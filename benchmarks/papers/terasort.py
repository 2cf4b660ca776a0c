"""TeraSort on Spark alone, as a program that prints the seconds of each run on a line.

    python -m benchmarks.papers.terasort 1000000000 --folder /scratch --runs 3 --master local[2]

Records of 100 bytes (key of 10, value of 90) are generated into files (TeraGen), read, sorted by
key and written (TeraSort: this is timed), and validated (TeraValidate): the keys of all output
files in order, count and sum of CRC-32 of the records as before. The files are Parquet without
compression.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.spark_mllib import started

RECORD, KEY = 100, 10
PART = 64 << 20  # bytes of a file, as of a block of HDFS
KEYS = f"substring(unhex(md5(cast(id as string))), 1, {KEY}) as key"
VALUES = f"cast(rpad(hex(id), {RECORD - KEY}, 'x') as binary) as value"
ROWS = 1 << 20  # of a batch that the validation reads

Keys = NDArray[np.uint8]


def generate(spark: Any, nbytes: int, folder: Path) -> None:
    """Write records with random keys."""
    count = nbytes // RECORD
    parts = max(1, nbytes // PART)
    records = spark.range(0, count, 1, parts).selectExpr(KEYS, VALUES)
    records.write.option("compression", "none").parquet(f"file://{folder}")


def sort(spark: Any, given: Path, result: Path) -> None:
    """Sort records by key: sample, exchange by range of keys, sort each range, write."""
    records = spark.read.parquet(f"file://{given}").orderBy("key")
    records.write.option("compression", "none").parquet(f"file://{result}")


def checksum(spark: Any, folder: Path) -> tuple[int, int]:
    """Number of records, and the sum of their CRC-32, which is the same in any order."""
    records = spark.read.parquet(f"file://{folder}")
    row = records.selectExpr("count(*) as n", "sum(crc32(concat(key, value))) as total").first()
    return int(row.n), int(row.total)


def is_sorted(folder: Path) -> bool:
    """Whether the keys of all files of a folder, in the order of their names, ascend."""
    last: Keys | None = None
    for keys in _batches(folder):
        if last is not None:
            keys = np.concatenate([last, keys])
        high = keys[:, :8].copy().view(">u8")[:, 0]
        low = keys[:, 8:].copy().view(">u2")[:, 0]
        ascend = (high[1:] > high[:-1]) | ((high[1:] == high[:-1]) & (low[1:] >= low[:-1]))
        if not ascend.all():
            return False
        last = keys[-1:]
    return True


def _batches(folder: Path) -> Iterator[Keys]:
    """Keys as arrays of shape (rows, 10)."""
    from pyarrow import parquet

    for path in sorted(folder.glob("part-*.parquet")):
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(ROWS, columns=["key"]):
                if batch.num_rows:
                    text = b"".join(batch.column(0).to_pylist())
                    yield np.frombuffer(text, np.uint8).reshape(-1, KEY)


def main() -> None:
    """Generate, sort, validate; print seconds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("nbytes", type=int)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--master", required=True)
    parser.add_argument("--folder", type=Path, help="where the files are (default: TMPDIR)")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="terasort-", dir=options.folder))
    try:
        spark = started(native=False, master=options.master, memory_gb=4)
        generate(spark, options.nbytes, folder / "given")
        expected = checksum(spark, folder / "given")
        for run in range(options.runs):
            result = folder / f"sorted-{run}"
            begun = time.perf_counter()
            sort(spark, folder / "given", result)
            took = time.perf_counter() - begun
            if checksum(spark, result) != expected or not is_sorted(result):
                sys.exit(f"the sorted records in run {run} are not the given ones in order")
            print(json.dumps(took), flush=True)
            shutil.rmtree(result)
        spark.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
