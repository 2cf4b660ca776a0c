/* Episodes of a simulation: spin-up, resets, actions. */
#ifndef RAYLEIGH_BENARD_CONTROL_H
#define RAYLEIGH_BENARD_CONTROL_H

#include "simulation.h"

/* Allocate, spin up, and set the reference (NAN: the Nusselt number after the spin-up).
 * Collective. */
int simulation_new(alchemist_call *call, const cell_parameters *cell, const task_parameters *task,
                   double reference, simulation **made);
void simulation_free(simulation *S);

void simulation_seed(simulation *S, int64_t seed);
int simulation_reset(alchemist_call *call, simulation *S);
int simulation_step(alchemist_call *call, simulation *S, const double *action);

/* Deviations of the heaters from their mean for an action: the nearest profile of zero mean within
 * the amplitude. The action is clipped to [-1, 1]; then all numbers are shifted by the same amount
 * until the mean of the clipped result is 0. */
void heaters_from(const task_parameters *task, const double *action, double *heaters);

#endif
