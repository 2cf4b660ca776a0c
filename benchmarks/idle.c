/* A simulator whose step costs nothing: what is left is what a step costs beyond the simulation. */
#include <alchemist.h>

enum { SIZE = 16 };

static double *state(alchemist_call *call) {
    if (call->state == NULL) call->state = calloc(SIZE + 2, sizeof(double));
    return (double *)call->state;
}

#define ROUTINE(name) \
    static int name(alchemist_call *call, const alchemist_value *in, alchemist_value *out)

ROUTINE(spec) {
    (void)call, (void)in;
    out[0].string = "{\"observation\": {\"shape\": [16]}, \"action\": {\"shape\": [4]}}";
    return ALCHEMIST_OK;
}

ROUTINE(reset) {
    (void)in, (void)out;
    memset(state(call), 0, SIZE * sizeof(double));
    return ALCHEMIST_OK;
}

ROUTINE(step) {
    (void)out;
    for (int i = 0; i < SIZE; i++) state(call)[i] += in[0].numbers[i % 4];
    return ALCHEMIST_OK;
}

ROUTINE(get_state) {
    (void)in;
    out[0].numbers = state(call);
    out[0].count = SIZE;
    return ALCHEMIST_OK;
}

ROUTINE(get_score) {
    (void)in;
    out[0].numbers = state(call);
    out[0].count = 1;
    return ALCHEMIST_OK;
}

static const alchemist_routine routines[] = {
    {"spec", "Spec.", spec, NULL, ALCHEMIST_RESULTS({"spec", ALCHEMIST_STRING, "JSON"})},
    {"reset", "Reset.", reset, NULL, NULL},
    {"step", "Step.", step, ALCHEMIST_PARAMETERS({"action", ALCHEMIST_FLOATS, "4", NULL}), NULL},
    {"get_state", "State.", get_state, NULL, ALCHEMIST_RESULTS({"x", ALCHEMIST_FLOATS, "16"})},
    {"get_score", "Score.", get_score, NULL, ALCHEMIST_RESULTS({"r", ALCHEMIST_FLOATS, "1"})},
    {0}};

ALCHEMIST_LIBRARY_CLOSED("idle", "Costs nothing.", routines, free)
