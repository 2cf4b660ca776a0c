"""Steady rolls by another method (Fourier x Chebyshev), to verify the lattice gas.

``python -m benchmarks.rayleigh_benard.spectral`` prints the Nusselt numbers that `validate`
compares with. Only the equations are shared with the simulator: in free-fall units, with the stream
function psi (w = psi_x, u = -psi_z), vorticity zeta = laplace(psi) and T = 1 - z + theta,

    zeta_t + u zeta_x + w zeta_z = sqrt(Pr / Ra) laplace(zeta) + theta_x
    theta_t + u theta_x + w theta_z = laplace(theta) / sqrt(Pr Ra) + w

and psi = psi_z = theta = 0 at the plates. Diffusion is implicit (one dense solve per wave number),
the rest explicit; only the steady state matters.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
WAVE_NUMBER = 3.117


def derivative(order: int) -> tuple[Array, Array]:
    """Chebyshev's differentiation matrix and points on [0, 1] (Trefethen, Spectral Methods)."""
    x = np.cos(np.pi * np.arange(order + 1) / order)
    c = np.r_[2.0, np.ones(order - 1), 2.0] * (-1.0) ** np.arange(order + 1)
    D = np.outer(c, 1 / c) / (x[:, None] - x[None] + np.eye(order + 1))
    return 2 * (D - np.diag(D.sum(axis=1))), (x + 1) / 2


def nusselt(
    rayleigh: float,
    prandtl: float = 0.71,
    *,
    order: int = 24,
    points: int = 36,
    time: float = 70.0,
    step: float = 0.02,
) -> float:
    """Nusselt number of a pair of steady rolls of the critical wavelength, at the plate.

    Parameters
    ----------
    rayleigh, prandtl : float
    order, points : int
        Chebyshev's order from plate to plate; points sideways (a third of them for dealiasing).
    time, step : float
        Duration and time step, in free-fall times.
    """  # fmt: skip
    D, z = derivative(order)
    one, last = np.eye(order + 1), order
    viscosity, diffusivity = (prandtl / rayleigh) ** 0.5, (rayleigh * prandtl) ** -0.5
    k = WAVE_NUMBER * np.arange(points // 2 + 1)
    laplace = np.stack([D @ D - wave**2 * one for wave in k])
    flow = laplace - step * viscosity * laplace @ laplace
    flow[:, [0, last]], flow[:, [1, last - 1]] = one[[0, last]], D[[0, last]]
    heat = one - step * diffusivity * laplace
    heat[:, [0, last]] = one[[0, last]]
    flow, heat = np.linalg.inv(flow), np.linalg.inv(heat)
    ik, kept = 1j * k[:, None], (np.arange(len(k)) < points // 3)[:, None]

    def physical(waves: Array) -> Array:
        return np.fft.irfft(waves, points, axis=0)

    def carried(psi: Array, what: Array) -> Array:
        u, w = physical(-psi @ D.T), physical(ik * psi)
        return kept * np.fft.rfft(u * physical(ik * what) + w * physical(what @ D.T), axis=0)

    def each(matrices: Array, waves: Array) -> Array:
        found: Array = np.einsum("kij,kj->ki", matrices, waves)
        return found

    x = np.arange(points) / points
    theta = np.fft.rfft(0.3 * np.outer(np.cos(2 * np.pi * x), np.sin(np.pi * z)), axis=0)
    psi = np.zeros_like(theta)
    for _ in range(round(time / step)):
        zeta = each(laplace, psi)
        turned = zeta + step * (ik * theta - carried(psi, zeta))
        warmed = theta + step * (ik * psi - carried(psi, theta))
        turned[:, [0, 1, last - 1, last]] = 0.0
        warmed[:, [0, last]] = 0.0
        psi, theta = each(flow, turned), each(heat, warmed)
    return float(1 - (physical(theta) @ D.T).mean(axis=0)[-1])


def main() -> int:
    """Print each number at two resolutions."""
    for rayleigh in (5e3, 1e4, 3e4):
        coarse, fine = nusselt(rayleigh), nusselt(rayleigh, order=32, points=48)
        print(f"Ra {rayleigh:.0e}: {coarse:.4f} {fine:.4f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
