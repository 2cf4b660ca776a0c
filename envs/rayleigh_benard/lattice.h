/* A rank's slab of a Rayleigh-Benard cell as a lattice Boltzmann gas: parameters, units, memory
 * layout, initial states, time steps.
 *
 * Boussinesq convection in two dimensions between two plates, periodic in x. Lengths are in lattice
 * nodes and times in lattice steps. The plates are one height and one unit of temperature apart
 * (bottom 1/2, top -1/2). The free-fall velocity is `velocity` nodes per step:
 *
 *     viscosity   = velocity height sqrt(Pr / Ra)
 *     diffusivity = velocity height / sqrt(Pr Ra)
 *     buoyancy    = velocity^2 / height           (g beta of rho g beta T, the upward force)
 *
 * Each rank owns a slab of whole columns, with a halo column on either side. */
#ifndef RAYLEIGH_BENARD_LATTICE_H
#define RAYLEIGH_BENARD_LATTICE_H

#include <alchemist.h>

enum {
    FLOW = 9,               /* D2Q9: populations 0 to 8 carry mass and momentum */
    POPULATIONS = FLOW + 5, /* D2Q5: populations 9 to 13 carry heat */
    LANES = 8,              /* columns begin at multiples of this many nodes */
    CROSSING = 4,           /* populations that leave a slab on one side */
    RECORD = 5              /* numbers of a column besides its populations: see lattice_save */
};

#define HOT 0.5
#define COLD (-0.5)

typedef struct {
    int64_t height, width; /* nodes of the whole cell */
    double rayleigh, prandtl;
    double velocity;
} cell_parameters;

typedef struct {
    cell_parameters cell;
    double viscosity, diffusivity, buoyancy;
    int64_t first, columns; /* this rank's columns: first to first + columns */
    int64_t pitch;          /* distance between columns; at least height + 1 */
    int64_t plane;          /* distance between populations */
    double *now, *next;     /* populations after the collision, each a plane, 64-byte aligned */
    double *bottom;         /* temperature of the bottom plate, for each column */
    double *entering;       /* heat that entered through the bottom in the last step */
    double *leaving;        /* heat that left through the top in the last step */
    double *entered, *left; /* the same since the state began */
    double *outbox, *inbox; /* halo messages to and from left and right; NULL until needed */
    int64_t steps;          /* since the state began */
    int torn;               /* a run was interrupted: ranks may be at different steps */
} lattice;

/* Offset of column x (-1 and `columns` are the halo) in the plane of a population. */
static inline int64_t lattice_column(const lattice *L, int64_t population, int64_t x) {
    return population * L->plane + LANES + (x + 1) * L->pitch;
}

/* The first column of a rank when `width` columns are divided among `size` ranks. */
static inline int64_t lattice_first(int64_t width, int size, int rank) {
    return width / size * rank + (rank < width % size ? rank : width % size);
}

/* Size of a column's record: `height` numbers of each population, then RECORD more. */
static inline int64_t lattice_record(const lattice *L) {
    return POPULATIONS * L->cell.height + RECORD;
}

/* --- lattice.c --- */

/* Density, velocity and temperature of a node. */
typedef struct {
    double density, u, v, temperature;
} fluid;

/* Allocate this rank's slab. On failure: NULL, and the error is set on the call. */
lattice *lattice_new(alchemist_call *call, const cell_parameters *cell);
void lattice_free(lattice *L);

/* Set fluid at rest with temperature(x, y): x in [0, 1) of the width, y in (0, 1) of the height. */
void lattice_rest(lattice *L, double (*temperature)(const void *about, double x, double y),
                  const void *about);
/* Add to the temperature. */
void lattice_warm(lattice *L, double (*temperature)(const void *about, double x, double y),
                  const void *about);

/* Run steps with the bottom plate unchanged. Collective; an interrupted run sets L->torn. */
int lattice_run(alchemist_call *call, lattice *L, int64_t steps);
/* Fail if a run was interrupted: the state is of no use until it is replaced. */
int lattice_whole(alchemist_call *call, const lattice *L);

fluid lattice_fluid(const lattice *L, int64_t x, int64_t y);

/* Copy the record (lattice_record numbers) of a column out of and into the slab. */
void lattice_save(const lattice *L, int64_t x, double *record);
void lattice_load(lattice *L, int64_t x, const double *record);

/* Gather `count` numbers of every column of the cell on every rank, in order. Sums over the result
 * do not depend on the slab boundaries. The caller frees *all; it is not allocated on failure.
 * Collective. */
int gather_columns(alchemist_call *call, const lattice *L, const double *mine, int64_t count,
                   double **all);

/* --- collide.c --- */

/* Stream, collide and force columns first to last, from L->now into L->next. */
void lattice_collide(lattice *L, int64_t first, int64_t last);

#endif
