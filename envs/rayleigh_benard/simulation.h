/* The state of a control problem: heaters in the bottom plate, probes in the fluid, episodes. */
#ifndef RAYLEIGH_BENARD_SIMULATION_H
#define RAYLEIGH_BENARD_SIMULATION_H

#include "slab.h"

typedef struct {
    int64_t heaters;        /* equal pieces of the bottom plate */
    double amplitude;       /* largest deviation of a heater from the plate's mean */
    int64_t agents;         /* 1, or one per heater */
    int64_t probe_rows;     /* probes above each heater */
    int64_t episode_length; /* actions */
    double time_step;       /* between actions, in free-fall times (height / velocity) */
    double spin_up;         /* free-fall times before the first episode */
    int64_t roll_pairs;     /* in the initial temperature */
    double perturbation;    /* of the initial temperature */
    double disturbance;     /* of the temperature at a reset */
} task_parameters;

/* Measurements of the whole cell; bit-identical on any number of ranks. */
typedef struct {
    double nusselt;                     /* 1 + <v T> height / (diffusivity * 1) */
    double nusselt_bottom, nusselt_top; /* through the plates */
    double kinetic_energy;              /* <u u + v v> / 2 in units of velocity^2 */
    double mass, heat;                  /* sums over all nodes */
    double heat_entered, heat_left;     /* through the plates, since the state began */
} measures;

typedef struct {
    lattice *L;
    task_parameters task;
    int64_t substeps;  /* lattice steps between actions */
    double reference;  /* Nusselt number from which rewards are counted */
    double *developed; /* this rank's columns (lattice_record each) after the spin-up */
    uint64_t random;   /* state of the generator */
    int64_t actions;   /* in this episode */
    double *columns;   /* measurements of this rank's columns; see measure.c */
    int measured;      /* whether the members below belong to the current step */
    measures found;
    double *local;     /* Nusselt number above each heater */
    double *probes;    /* 3 x probe_rows for each heater, scaled as observed */
} simulation;

/* First node of piece j when `whole` nodes are cut into `pieces`: a node belongs to the piece that
 * contains its midpoint. */
static inline int64_t piece_begins(int64_t j, int64_t pieces, int64_t whole) {
    return (2 * j * whole + pieces - 1) / (2 * pieces);
}
static inline int64_t piece_of(int64_t node, int64_t pieces, int64_t whole) {
    return (2 * node + 1) * pieces / (2 * whole);
}

#endif
