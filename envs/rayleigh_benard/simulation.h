/* A control problem: heaters in the bottom plate, probes in the fluid, episodes; its routines. */
#ifndef RAYLEIGH_BENARD_SIMULATION_H
#define RAYLEIGH_BENARD_SIMULATION_H

#include "lattice.h"

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
enum {
    NUSSELT,                     /* 1 + <v T> height / (diffusivity * 1) */
    NUSSELT_BOTTOM, NUSSELT_TOP, /* through the plates */
    KINETIC_ENERGY,              /* <u u + v v> / 2 in units of velocity^2 */
    SCORED,                      /* those before are in a score, too */
    TOTAL_MASS = SCORED, TOTAL_HEAT, /* sums over all nodes */
    HEAT_ENTERED, HEAT_LEFT,         /* through the plates, since the state began */
    MEASURES
};

typedef struct {
    lattice *L;
    task_parameters task;
    int64_t substeps;  /* lattice steps between actions */
    double reference;  /* Nusselt number from which rewards are counted */
    double carried;    /* through the plates after the spin-up */
    int transient;     /* whether the reference is of a flow that had not developed */
    double *developed; /* this rank's columns (lattice_record each) after the spin-up */
    uint64_t random;   /* state of the generator */
    int64_t actions;   /* in this episode */
    double *columns;   /* measurements of this rank's columns; see measure.c */
    int measured;      /* whether the members below belong to the current step */
    double found[MEASURES];
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

/* --- control.c --- */

/* Allocate, spin up, and set the reference (NAN: the Nusselt number after the spin-up).
 * Collective. */
int simulation_new(alchemist_call *call, const cell_parameters *cell, const task_parameters *task,
                   double reference, simulation **made);
void simulation_free(void *state);

int simulation_reset(alchemist_call *call, simulation *S);
int simulation_step(alchemist_call *call, simulation *S, const double *action);

/* Deviations of the heaters from their mean for an action: the nearest profile of zero mean within
 * the amplitude. The action is clipped to [-1, 1]; then all numbers are shifted by the same amount
 * until the mean of the clipped result is 0. */
void heaters_from(const task_parameters *task, const double *action, double *heaters);

/* --- measure.c --- */

/* Observations are clipped to this. Only a diverged simulation reaches it. */
#define OBSERVABLE 10.0

/* Numbers measured per column. */
int64_t measured_of_a_column(const task_parameters *task);

/* Bring S->found, S->local and S->probes up to date. Collective. */
int simulation_measure(alchemist_call *call, simulation *S);

/* The observation of an agent: the probes, beginning with its own heater; 3 probe_rows heaters
 * numbers. */
void simulation_observe(const simulation *S, int64_t agent, double *observation);
double simulation_reward(const simulation *S, int64_t agent);

/* --- routines: setup.c, fields.c, library.c --- */

#define ROUTINE(NAME) int NAME(alchemist_call *call, const alchemist_value *in, alchemist_value *out)

ROUTINE(routine_setup);
ROUTINE(routine_spec);
ROUTINE(routine_render);
ROUTINE(routine_save_state);
ROUTINE(routine_load_state);

/* Declare the simulation `S` of a routine, which fails before setup. */
#define SIMULATION(S)                                                                     \
    simulation *S = call->state;                                                          \
    if (S == NULL) return alchemist_fail(call, "there is no simulation yet: call setup() first")
/* The same, with S->found, S->local and S->probes of the current step. */
#define MEASURED(S)                                  \
    SIMULATION(S);                                   \
    const int measured = simulation_measure(call, S); \
    if (measured != ALCHEMIST_OK) return measured

/* Allocate a result that is a list of numbers. NULL, and the error is set, without memory. */
static inline double *give_numbers(alchemist_call *call, alchemist_value *out, int64_t count) {
    double *numbers = call->host->allocate(call, (size_t)count * sizeof(double));
    out->numbers = numbers;
    out->count = count;
    return numbers;
}

#endif
