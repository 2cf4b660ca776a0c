"""``python -m alchemist_ray.clients.spark.build_jar``: prints the path of the jar."""

from __future__ import annotations

import sys

from alchemist_ray.clients.spark.jvm import build
from alchemist_ray.errors import TransferError


def main() -> int:
    try:
        sys.stdout.write(f"{build()}\n")
    except TransferError as reason:
        sys.stderr.write(f"{reason}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
