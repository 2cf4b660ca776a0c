/* Declarations shared by the routines of the library. */
#ifndef RAYLEIGH_BENARD_LIBRARY_H
#define RAYLEIGH_BENARD_LIBRARY_H

#include "control.h"

#define ROUTINE(NAME) int NAME(alchemist_call *call, const alchemist_value *in, alchemist_value *out)

ROUTINE(routine_setup); /* setup.c */
ROUTINE(routine_spec);
ROUTINE(routine_render); /* fields.c */
ROUTINE(routine_save_state);
ROUTINE(routine_load_state);

/* The simulation. Before setup: NULL, and the error is set on the call. */
static inline simulation *simulated(alchemist_call *call) {
    if (call->state == NULL)
        alchemist_fail(call, "there is no simulation yet: call setup() first");
    return call->state;
}

/* Allocate a result that is a list of numbers. */
static inline int give_numbers(alchemist_call *call, alchemist_value *out, int64_t count,
                               double **numbers) {
    *numbers = call->host->allocate(call, (size_t)count * sizeof(double));
    if (*numbers == NULL) return ALCHEMIST_FAILED;
    out->numbers = *numbers;
    out->count = count;
    return ALCHEMIST_OK;
}

#endif
