"""What a gateway tells Prometheus."""

from __future__ import annotations

import numpy as np
import pytest

from alchemist_ray import AlchemistSession, status
from alchemist_ray.errors import AlchemistError, AuthError
from alchemist_ray.gateway.server.access import TokenFile
from alchemist_ray.gateway.server.actor import GatewayInfo
from tests.alchemist_ray.measures.test_metrics import EXPORT_LIMIT_S, scraped, total
from tests.support import traces


def test_sessions_bytes_and_refusals_are_counted(
    gateway: GatewayInfo, tokens: TokenFile, cluster: str
) -> None:
    def gauge() -> float:
        return total(scraped(), "alchemist_gateway_sessions", user="counted")

    before = scraped()
    token = tokens.create("counted", ("call",))
    with AlchemistSession(1, address=gateway.address, token=token) as als:
        A = als.send_matrix(np.ones((1000, 100)))
        A.fetch()
        with pytest.raises(AuthError):
            als.run(print)  # the token lacks the scope run_code
        with pytest.raises(AlchemistError):
            AlchemistSession(1, address=gateway.address, token="alch_" + "0" * 12 + "_" + "0" * 64)
        changes = (
            ("alchemist_gateway_bytes_total", {"direction": "send"}, 800_000),
            ("alchemist_gateway_bytes_total", {"direction": "fetch"}, 800_000),
            ("alchemist_gateway_refusals_total", {"of": "connection", "cause": "AuthError"}, 1),
            ("alchemist_gateway_refusals_total", {"of": "command", "cause": "AuthError"}, 1),
        )

        def counted() -> bool:
            now = scraped()
            return gauge() == 1 and all(
                total(now, name, **labels) - total(before, name, **labels) >= least
                for name, labels, least in changes
            )

        assert "counted" in {gang.owner.partition("@")[0] for gang in status()}
        assert traces.wait_until(counted, EXPORT_LIMIT_S, 0.5) is not None, scraped()
    assert traces.wait_until(lambda: gauge() == 0, EXPORT_LIMIT_S, 0.5) is not None
