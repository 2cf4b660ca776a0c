/* Measurements, observations and rewards of a simulation. */
#ifndef RAYLEIGH_BENARD_MEASURE_H
#define RAYLEIGH_BENARD_MEASURE_H

#include "simulation.h"

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

#endif
