"""256 peers with the whole protocol (DHT, matchmaking, exchange) in virtual time: some minutes."""

from __future__ import annotations

import pytest

from tests.integration.test_averaging_mixing import mix, predicted


@pytest.mark.timeout(900)
@pytest.mark.parametrize("failures", [0.0, 0.1])
def test_256_peers_in_groups_of_16(failures: float) -> None:
    result = mix(256, 16, 4, failures, seed=3)
    print(f"{result}, predicted {predicted(256, 16, failures):.4f}")
    assert result.mean_drift < 1e-6
    assert result.rate <= 1.5 * predicted(256, 16, failures)
    assert result.averaged >= (0.8 - failures) * 256 * 4
