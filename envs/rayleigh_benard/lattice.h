/* A slab of a Rayleigh-Benard cell as a lattice Boltzmann gas: what there is, and what it does.
 *
 * Boussinesq convection in two dimensions between two plates, periodic in x. Lengths are counted in
 * lattice nodes, times in lattice steps; the plates are one height and one unit of temperature
 * apart (bottom 1/2, top -1/2), and the free-fall velocity is `velocity` nodes a step:
 *
 *     viscosity   = velocity height sqrt(Pr / Ra)
 *     diffusivity = velocity height / sqrt(Pr Ra)
 *     buoyancy    = velocity^2 / height           (g beta of rho g beta T, the force upwards)
 *
 * Each rank has a slab of whole columns, and a halo column at either side of it. */
#ifndef RAYLEIGH_BENARD_LATTICE_H
#define RAYLEIGH_BENARD_LATTICE_H

#include <alchemist.h>

enum {
    FLOW = 9,                 /* D2Q9: populations 0 to 8 carry mass and momentum */
    POPULATIONS = FLOW + 5,   /* D2Q5: populations 9 to 13 carry heat */
    LANES = 8,                /* columns begin at multiples of so many nodes */
    CROSSING = 4,             /* populations that leave a slab at one side */
    RECORD = 5                /* numbers of a column beside its populations: see lattice_save */
};

#define HOT 0.5
#define COLD (-0.5)

/* What is simulated. */
typedef struct {
    int64_t height, width; /* nodes of the whole cell */
    double rayleigh, prandtl;
    double velocity;
} cell;

typedef struct {
    cell is;
    double viscosity, diffusivity, buoyancy;
    int64_t first, columns; /* this rank's columns: first to first + columns */
    int64_t pitch;          /* from a column to the next one; at least height + 1 */
    int64_t plane;          /* from a population to the next one */
    double *now, *next;     /* populations after the collision, each a plane, 64-byte aligned */
    double *bottom;         /* temperature of the bottom plate, for each column */
    double *entering;       /* heat that came in through the bottom in the last step */
    double *leaving;        /* heat that went out through the top in the last step */
    double *entered, *left; /* the same since the state began */
    double *outbox, *inbox; /* halo messages to and from left and right; NULL: to be made */
    int64_t steps;          /* since the state began */
    int torn;               /* a run was ended between two steps of different ranks */
} lattice;

/* Where column x (-1 and `columns` are the halo) of a population begins. */
static inline int64_t lattice_column(const lattice *L, int64_t population, int64_t x) {
    return population * L->plane + LANES + (x + 1) * L->pitch;
}

/* The first of a rank's columns, if `width` columns are dealt to `size` ranks in slabs. */
static inline int64_t lattice_first(int64_t width, int size, int rank) {
    return width / size * rank + (rank < width % size ? rank : width % size);
}

/* Density, velocity and temperature of a node. */
typedef struct {
    double density, u, v, temperature;
} fluid;

/* Memory for this rank's slab, or NULL (and the call has been told). */
lattice *lattice_new(alchemist_call *call, const cell *is);
void lattice_free(lattice *L);

/* Fluid at rest, temperature(x, y) as given: x in [0, 1) of the width, y in (0, 1) of the height. */
void lattice_rest(lattice *L, double (*temperature)(const void *about, double x, double y),
                  const void *about);
/* Add to the temperature. */
void lattice_warm(lattice *L, double (*temperature)(const void *about, double x, double y),
                  const void *about);

/* So many steps, with the bottom plate as it is. Collective; can be left, and then L->torn. */
int lattice_run(alchemist_call *call, lattice *L, int64_t steps);

fluid lattice_fluid(const lattice *L, int64_t x, int64_t y);

/* A column's state: its populations, `height` numbers each, and RECORD numbers more. */
static inline int64_t lattice_record(const lattice *L) {
    return POPULATIONS * L->is.height + RECORD;
}
void lattice_save(const lattice *L, int64_t x, double *record);
void lattice_load(lattice *L, int64_t x, const double *record);

/* One step of the columns from..to: streaming, collision, forcing. In collide.c. */
void lattice_collide(lattice *L, int64_t from, int64_t to);

#endif
