"""A matrix goes from gang to gang behind a gateway, with the rights of its user's token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from alchemist_ray import AlchemistSession
from alchemist_ray.errors import AuthError, TransferError
from alchemist_ray.gateway.client import ask
from alchemist_ray.gateway.protocol import GatewayAddress
from alchemist_ray.gateway.server.access import TokenFile


def test_both_gangs_must_be_the_users(
    cluster: str, there: dict[str, Any], tokens: TokenFile
) -> None:
    x = np.random.default_rng(1).random((90, 40))
    days = np.array(["2020-01-01", "NaT"], "M8[D]")
    with AlchemistSession(2, **there) as a, AlchemistSession(1, **there) as b:
        A = a.send_matrix(x, layout="MC_MR")
        B = b.send_matrix(A, layout="STAR_VC", dtype="float32")
        np.testing.assert_array_equal(B.fetch(), x.astype("float32"))
        times = b.send_matrix(a.send_matrix(days), dtype="M8[s]")
        np.testing.assert_array_equal(times.fetch(), days.astype("M8[s]"))
        asked = {"op": "copy_matrix", "source": A.gang, "gang": B.gang, "name": "A"}
        asked["matrices"] = [[A.id, "float64"], [B.id, "float32"]]
        with pytest.raises(AuthError, match="private to another user"):
            ask(GatewayAddress.parse(there["address"]), tokens.create("eve"), asked)
        with AlchemistSession(1) as inside, pytest.raises(TransferError, match="different ways"):
            inside.send_matrix(A)
