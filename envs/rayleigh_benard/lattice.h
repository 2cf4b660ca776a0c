/* A slab as a lattice Boltzmann gas: memory, initial states, and time steps. */
#ifndef RAYLEIGH_BENARD_LATTICE_H
#define RAYLEIGH_BENARD_LATTICE_H

#include "slab.h"

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

fluid lattice_fluid(const lattice *L, int64_t x, int64_t y);

/* Copy the record (lattice_record numbers) of a column out of and into the slab. */
void lattice_save(const lattice *L, int64_t x, double *record);
void lattice_load(lattice *L, int64_t x, const double *record);

#endif
