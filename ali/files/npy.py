"""NumPy's own .npy: a header, then the elements (numpy.lib.format, versions 1.0 to 3.0)."""

from __future__ import annotations

import io

from numpy.lib import format as npy_format

from ali.files.formats import Options, Source, Spec, checked_shape, refuse
from ali.files.paths import Place, together
from ali.files.raw import RawFormat, RawSource
from ali.interface import Context
from mpi_workers.failures import Failure

HEADER = 64 << 10  # 64 KiB: none that NumPy writes of numbers is longer


class Npy(RawFormat):
    def open(self, ctx: Context, place: Place, options: Options) -> Source:
        return together(ctx, place.path, lambda: self._open(place, options))

    def _open(self, place: Place, options: Options) -> RawSource:
        refuse(place, "data sets inside", options.dataset)
        refuse(place, "header lines", options.header)
        file = place.open()
        try:
            head = io.BytesIO(file.read(0, min(HEADER, file.size)))
            try:
                version = npy_format.read_magic(head)
                reader = (
                    npy_format.read_array_header_1_0
                    if version == (1, 0)
                    else npy_format.read_array_header_2_0
                )
                shape, by_columns, dtype = reader(head)
            except (ValueError, EOFError, SyntaxError) as error:
                raise Failure("FileError", f"{place.path} is not a .npy file: {error}") from None
            if dtype.kind not in "biufc":
                raise Failure(
                    "DtypeError", f"{place.path}: elements of dtype {dtype} are not numbers"
                )
            return RawSource(
                file, head.tell(), checked_shape(shape, place.path), dtype, by_columns=by_columns
            )
        except BaseException:
            file.close()
            raise

    def create(self, path: str, spec: Spec, old: str) -> int:
        place = Place(old)
        refuse(place, "data sets inside", spec.options.dataset)
        refuse(place, "names of columns", spec.options.names)
        refuse(place, "other data sets to keep", spec.options.append)
        with open(path, "xb") as file:
            npy_format.write_array_header_1_0(
                file, {"descr": spec.dtype.str, "fortran_order": False, "shape": spec.array_shape}
            )
            offset = file.tell()
            file.truncate(offset + spec.shape[0] * spec.shape[1] * spec.dtype.itemsize)
        return offset


FORMAT = Npy()
