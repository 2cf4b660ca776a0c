/* One step of the lattice Boltzmann gas in columns of nodes: streaming, collision, forcing.
 *
 * Every node takes the populations that arrive from its neighbours (streaming) and relaxes them
 * towards their equilibrium with one time (BGK: Qian, d'Humieres & Lallemand, EPL 17, 479, 1992).
 * The flow feels buoyancy F = rho g beta T upwards by the scheme of Guo, Zheng & Shi (Phys. Rev. E
 * 65, 046308, 2002):
 *
 *     rho u  = sum c_q f_q + F / 2
 *     f_q'   = f_q - (f_q - f_q^eq) / tau + (1 - 1/(2 tau)) w_q (3 (c_q - u) + 9 (c_q . u) c_q) . F
 *     f_q^eq = w_q rho (1 + 3 c_q . u + 9/2 (c_q . u)^2 - 3/2 u . u)
 *
 * and the temperature is a passive D2Q5 gas (w = 1/3, 1/6) advected by the flow:
 *
 *     g_q'   = g_q - (g_q - g_q^eq) / tau_T,   g_q^eq = w_q T (1 + 3 c_q . u)
 *
 * with viscosity (tau - 1/2) / 3 and diffusivity (tau_T - 1/2) / 3.
 *
 * Written with explicit vector types (GCC and Clang) instead of relying on auto-vectorisation:
 * every node goes through the same operations wherever the slabs are cut, so results are bit-identical on
 * any number of ranks. The pitch of a column is a whole number of packs. The nodes above the plate
 * are computed too, but no node of the fluid reads them. */
#include "lattice.h"

#if defined(__AVX512F__)
#define PACK_BYTES 64
#elif defined(__AVX__)
#define PACK_BYTES 32
#else
#define PACK_BYTES 16
#endif

typedef double pack __attribute__((vector_size(PACK_BYTES)));
typedef double loose_pack __attribute__((vector_size(PACK_BYTES), aligned(8), may_alias));

enum { NODES = PACK_BYTES / 8 };

/* Relax a pair of opposite populations. Their sum is even in the direction, their difference odd:
 * `along` is c_q . u of the first one, `push` its (1 - 1/(2 tau)) F . c_q. */
static inline void relax(pack *one, pack *other, double weight, double omega, pack density,
                         pack base, pack along, pack lift, pack push) {
    const pack even = weight * (omega * density * (base + 4.5 * along * along) +
                                9.0 * along * push - 3.0 * lift);
    const pack odd = (3.0 * weight) * (omega * density * along + push);
    *one += even + odd - omega * *one;
    *other += even - odd - omega * *other;
}

#define TAKE(q, behind) (*(const loose_pack *)(from + (q) * plane + i - (behind)))
#define GIVE(q) (*(pack *)(to + (q) * plane + i))

void lattice_collide(lattice *L, int64_t first, int64_t last) {
    const int64_t plane = L->plane, pitch = L->pitch;
    const double omega = 1.0 / (0.5 + 3.0 * L->viscosity);
    const double omega_heat = 1.0 / (0.5 + 3.0 * L->diffusivity);
    const double buoyancy = L->buoyancy, half = 1.0 - 0.5 * omega;
    const double *restrict from = L->now;
    double *restrict to = L->next;
    const int64_t begin = lattice_column(L, 0, first), end = lattice_column(L, 0, last);

    for (int64_t i = begin; i < end; i += NODES) {
        /* Directions: 1 right, 2 up, 3 left, 4 down, 5 to 8 diagonal. */
        pack f0 = TAKE(0, 0), f1 = TAKE(1, pitch), f2 = TAKE(2, 1), f3 = TAKE(3, -pitch);
        pack f4 = TAKE(4, -1), f5 = TAKE(5, pitch + 1), f6 = TAKE(6, 1 - pitch);
        pack f7 = TAKE(7, -pitch - 1), f8 = TAKE(8, pitch - 1);
        pack g0 = TAKE(9, 0), g1 = TAKE(10, pitch), g2 = TAKE(11, 1), g3 = TAKE(12, -pitch);
        pack g4 = TAKE(13, -1);

        const pack T = g0 + (g1 + g3) + (g2 + g4);
        const pack density = f0 + ((f1 + f3) + (f2 + f4)) + ((f5 + f7) + (f6 + f8));
        const pack force = buoyancy * density * T;
        const pack per = 1.0 / density;
        const pack rising = f5 - f7, falling = f8 - f6; /* along the two diagonals */
        const pack u = (f1 - f3 + rising + falling) * per;
        const pack v = (f2 - f4 + rising - falling + 0.5 * force) * per;

        const pack base = 1.0 - 1.5 * (u * u + v * v);
        const pack push = half * force, lift = push * v, none = push - push;
        f0 += (4. / 9) * (omega * density * base - 3.0 * lift) - omega * f0;
        relax(&f1, &f3, 1. / 9, omega, density, base, u, lift, none);
        relax(&f2, &f4, 1. / 9, omega, density, base, v, lift, push);
        relax(&f5, &f7, 1. / 36, omega, density, base, u + v, lift, push);
        relax(&f8, &f6, 1. / 36, omega, density, base, u - v, lift, -push);

        const pack rest = (omega_heat / 6) * T;
        const pack right = 3.0 * rest * u, up = 3.0 * rest * v;
        g0 += 2.0 * rest - omega_heat * g0;
        g1 += rest + right - omega_heat * g1;
        g3 += rest - right - omega_heat * g3;
        g2 += rest + up - omega_heat * g2;
        g4 += rest - up - omega_heat * g4;

        GIVE(0) = f0, GIVE(1) = f1, GIVE(2) = f2, GIVE(3) = f3, GIVE(4) = f4;
        GIVE(5) = f5, GIVE(6) = f6, GIVE(7) = f7, GIVE(8) = f8;
        GIVE(9) = g0, GIVE(10) = g1, GIVE(11) = g2, GIVE(12) = g3, GIVE(13) = g4;
    }
}
