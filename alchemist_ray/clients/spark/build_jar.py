"""``python -m alchemist_ray.clients.spark.build_jar``: prints the path of the jar."""

from __future__ import annotations

import sys

from alchemist_ray.clients.spark.jvm import NoJar, build


def main() -> int:
    try:
        sys.stdout.write(f"{build()}\n")
    except NoJar as reason:
        sys.stderr.write(f"no jar: {reason}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
