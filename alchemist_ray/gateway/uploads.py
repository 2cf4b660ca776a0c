"""Files of users' functions, through a gateway: in parts, over the control channel."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from alchemist_ray.functions.uploads import Uploads
from alchemist_ray.gateway.protocol import PART_NBYTES


class GatewayUploads(Uploads):
    """This process's files on a gang behind a gateway."""

    def put(self, name: str, content: bytes) -> None:
        for offset in range(0, max(1, len(content)), PART_NBYTES):
            part = content[offset : offset + PART_NBYTES]
            last = offset + PART_NBYTES >= len(content)
            self.connection.request(
                {"op": "stage", "name": name, "offset": offset, "content": part, "last": last}
            )

    def collect(self, name: str) -> list[NDArray[np.uint8]]:
        sizes = self.connection.request({"op": "collect", "name": name})["sizes"]
        return [self._part(name, number, nbytes) for number, nbytes in enumerate(sizes)]

    def _part(self, name: str, number: int, nbytes: int) -> NDArray[np.uint8]:
        part = np.empty(nbytes, np.uint8)
        for offset in range(0, nbytes, PART_NBYTES):
            body = {"op": "read_part", "name": name, "part": number, "offset": offset}
            content = self.connection.request(body)["content"]
            part[offset : offset + len(content)] = np.frombuffer(content, np.uint8)
        return part
