"""What every handle can become: an array of dask's, a Dataset of Ray's, a DataFrame of Spark's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alchemist_ray.arrays.handle import Handle


class Convertible:
    """The methods of a handle that give its matrix to another system."""

    __slots__ = ()

    def to_dask(self: Handle, chunks: Any = "auto") -> Any:  # type: ignore[misc]
        """A lazy dask array of the matrix; see `alchemist_ray.clients.dask.to_dask`."""
        from alchemist_ray.clients import dask  # noqa: PLC0415

        return dask.to_dask(self, chunks)

    def to_dataset(  # type: ignore[misc]
        self: Handle,
        columns: Sequence[str] | None = None,
        *,
        override_num_blocks: int | None = None,
    ) -> Any:
        """A lazy Ray Dataset of the matrix; see `alchemist_ray.clients.ray_data.to_dataset`."""
        from alchemist_ray.clients import ray_data  # noqa: PLC0415

        return ray_data.to_dataset(self, columns, override_num_blocks=override_num_blocks)

    def to_spark(  # type: ignore[misc]
        self: Handle,
        spark: Any = None,
        kind: str = "DataFrame",
        *,
        block: tuple[int, int] | None = None,
    ) -> Any:
        """The matrix as one of Spark's; see `alchemist_ray.clients.spark.to_spark`."""
        from alchemist_ray.clients import spark as client  # noqa: PLC0415

        return client.to_spark(self, spark, kind, block=block)
