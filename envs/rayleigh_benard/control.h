/* The control problem: heaters in the bottom plate, probes in the fluid, episodes. */
#ifndef RAYLEIGH_BENARD_CONTROL_H
#define RAYLEIGH_BENARD_CONTROL_H

#include "lattice.h"

typedef struct {
    int64_t heaters;        /* equal pieces of the bottom plate */
    double amplitude;       /* the most that one may differ from the plate's mean */
    int64_t agents;         /* 1, or one for each heater */
    int64_t probe_rows;     /* probes above each heater */
    int64_t episode_length; /* actions */
    double time_step;       /* between actions, in free-fall times (height / velocity) */
    double spin_up;         /* free-fall times before the first episode */
    int64_t roll_pairs;     /* that the flow begins with */
    double perturbation;    /* of the temperature that it begins with */
    double disturbance;     /* of the temperature at a reset */
} task;

/* What is measured of the whole cell; the same bits on any number of ranks. */
typedef struct {
    double nusselt;                        /* 1 + <v T> height / (diffusivity * 1) */
    double nusselt_bottom, nusselt_top;    /* through the plates */
    double kinetic_energy;                 /* <u u + v v> / 2 in units of velocity^2 */
    double mass, heat;                     /* sums over all nodes */
    double heat_entered, heat_left;        /* through the plates, since the state began */
} measures;

typedef struct {
    lattice *L;
    task has;
    int64_t substeps;  /* lattice steps between actions */
    double reference;  /* Nusselt number that rewards are counted from */
    double *developed; /* this rank's columns (lattice_record each) after the spin-up */
    uint64_t random;   /* state of the generator */
    int64_t actions;   /* in this episode */
    double *columns;   /* what is measured of this rank's columns; see measure.c */
    int measured;      /* that the following are of this very moment */
    measures found;
    double *local;     /* Nusselt number above each heater */
    double *probes;    /* 3 x probe_rows for each heater, as they are observed */
} simulation;

/* Memory, spin-up, reference (NAN: the Nusselt number after the spin-up). Collective. */
int simulation_new(alchemist_call *call, const cell *is, const task *has, double reference,
                   simulation **made);
void simulation_free(simulation *S);

void simulation_seed(simulation *S, int64_t seed);
int simulation_reset(alchemist_call *call, simulation *S);
int simulation_step(alchemist_call *call, simulation *S, const double *action);

/* Where piece j begins if `whole` nodes are cut into so many pieces: a node belongs to the piece
 * that its middle lies in. */
static inline int64_t piece_begins(int64_t j, int64_t pieces, int64_t whole) {
    return (2 * j * whole + pieces - 1) / (2 * pieces);
}
static inline int64_t piece_of(int64_t node, int64_t pieces, int64_t whole) {
    return (2 * node + 1) * pieces / (2 * whole);
}

/* How many numbers are measured of a column. */
int64_t measured_of_a_column(const task *has);

/* Bring S->found, S->local and S->probes up to date. Collective. */
int simulation_measure(alchemist_call *call, simulation *S);

#define OBSERVABLE 10.0 /* observations are cut off at this; only a broken simulation gets there */

/* What agent number `agent` sees: the probes, beginning with its heater. 3 probe_rows heaters. */
void simulation_observe(const simulation *S, int64_t agent, double *observation);
double simulation_reward(const simulation *S, int64_t agent);

/* What heaters differ from their mean by, for an action: the nearest profile of zero mean that is
 * nowhere beyond the amplitude. Numbers beyond -1 and 1 count as these; all are shifted alike until
 * the mean of what remains between -1 and 1 is 0. */
void heaters_from(const task *has, const double *action, double *heaters);

/* All columns of the cell on every rank, in order, from `count` numbers for each of a rank's
 * sums over them do not depend on where slabs are cut. *all is the caller's to free, and
 * not made if it fails. Collective. */
int gather_columns(alchemist_call *call, const lattice *L, const double *mine, int64_t count,
                   double **all);

#endif
