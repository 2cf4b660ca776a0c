"""NumPy's own .npy: a header, then the elements (numpy.lib.format, versions 1.0 to 3.0)."""

from __future__ import annotations

import io

from numpy.lib import format as npy_format

from ali.files.formats import Options, Spec, checked
from ali.files.paths import Place
from ali.files.raw import RawFormat, RawSource
from mpi_workers.failures import Failure

HEADER = 64 << 10  # 64 KiB: none that NumPy writes of numbers is longer


class Npy(RawFormat):
    def look(self, place: Place, options: Options) -> RawSource:
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
            shape = checked(shape, dtype, place.path)
            if by_columns and len(shape) > 2:
                raise Failure(
                    "ShapeError",
                    f"{place.path}: an array of shape {shape} in Fortran's order: save it with "
                    "np.save(path, np.ascontiguousarray(x))",
                )
            return RawSource(file, head.tell(), shape, dtype, by_columns=by_columns)
        except BaseException:
            file.close()
            raise

    def create(self, path: str, spec: Spec, old: str) -> int:
        with open(path, "xb") as file:
            npy_format.write_array_header_1_0(
                file, {"descr": spec.dtype.str, "fortran_order": False, "shape": spec.array_shape}
            )
            offset = file.tell()
            file.truncate(offset + spec.shape[0] * spec.shape[1] * spec.dtype.itemsize)
        return offset


FORMAT = Npy()
