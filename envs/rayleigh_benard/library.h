/* What the routines of the library share. */
#ifndef RAYLEIGH_BENARD_LIBRARY_H
#define RAYLEIGH_BENARD_LIBRARY_H

#include "control.h"

#define ROUTINE(NAME) int NAME(alchemist_call *call, const alchemist_value *in, alchemist_value *out)

ROUTINE(routine_setup); /* setup.c */
ROUTINE(routine_spec);
ROUTINE(routine_render); /* fields.c */
ROUTINE(routine_save_state);
ROUTINE(routine_load_state);

/* What is simulated; NULL before setup, and the caller has been told. */
static inline simulation *simulated(alchemist_call *call) {
    if (call->state == NULL)
        alchemist_fail(call, "there is nothing to simulate yet: call setup() first");
    return call->state;
}

/* Memory for a result that is a list of numbers. */
static inline int give_numbers(alchemist_call *call, alchemist_value *out, int64_t count,
                               double **numbers) {
    *numbers = call->host->allocate(call, (size_t)count * sizeof(double));
    if (*numbers == NULL) return ALCHEMIST_FAILED;
    out->numbers = *numbers;
    out->count = count;
    return ALCHEMIST_OK;
}

#endif
